"""Actors and learners that are killed and started again: every transition arrives once, and weights never go back."""

import json
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from subprocess import PIPE

import pytest
from tests.system.trainer_process import make_buffer, sweep, transition
from tests.waiting import wait_for

from understudy.compat import QueuedDataStore, TrainerClient, TrainerServer, make_trainer_config
from understudy.selftest.faulty_proxy import free_port

PROCESS = Path(__file__).with_name("trainer_process.py")


class Process:
    """One of trainer_process.py, spoken to line by line."""

    def __init__(self, *command):
        self._process = subprocess.Popen(
            [sys.executable, PROCESS, *map(str, command)], stdin=PIPE, stdout=PIPE, text=True
        )

    def hear(self):
        line = self._process.stdout.readline()
        assert line, f"the process ended with {self._process.wait()}"
        return json.loads(line)

    def ask(self, command):
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()
        return self.hear()

    def kill(self):
        self._process.kill()
        self._process.communicate()


@pytest.fixture
def cleanup():
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def start(cleanup):
    """Starts processes at once and waits until all of them are ready; what a failed test leaves is killed."""

    def start(*commands):
        processes = [Process(*command) for command in commands]
        for process in processes:
            cleanup.callback(process.kill)
        assert [process.hear() for process in processes] == ["ready"] * len(processes)
        return processes

    return start


@pytest.fixture
def port():
    """A free one, with a free one behind it."""
    return free_port(count=2)


@pytest.fixture
def serve(cleanup, tmp_path, port):
    """A learner in this process: its buffer and its server."""

    def serve():
        buffer = cleanup.enter_context(make_buffer(tmp_path / "replay"))
        server = TrainerServer(make_trainer_config(port, port + 1))
        server.register_data_store("actor_env", buffer)
        server.start(threaded=True)
        cleanup.callback(server.stop)
        return buffer, server

    return serve


@pytest.fixture
def connect(cleanup, port):
    """An actor in this process: its queue and its client."""

    def connect(**options):
        queue = QueuedDataStore(50_000)
        client = TrainerClient(
            "actor_env",
            "127.0.0.1",
            make_trainer_config(port, port + 1),
            data_stores={"actor_env": queue},
            **{"timeout_ms": 30_000, **options},
        )
        cleanup.callback(client.stop)
        return queue, client

    return connect


def pairs(world, *numbers):
    return {(world, number) for number in numbers}


def test_actor_restart_delivers_every_transition(serve, start, port, tmp_path):
    """In agentlace the second actor's numbers start at 0 again, and what the server believes to have is lost."""
    buffer, server = serve()
    [first] = start(("actor", port, 1, 0, 300, 30_000, tmp_path / "spool"))
    assert first.ask("go") == {"updated": True, "waiting": 0}
    first.kill()
    [second] = start(("actor", port, 1, 300, 150, 500, tmp_path / "spool"))
    server.stop()  # it goes on without a learner, and is killed
    assert second.ask("go")["updated"] is False
    second.kill()
    server = TrainerServer(make_trainer_config(port, port + 1))
    server.register_data_store("actor_env", buffer)
    server.start(threaded=True)
    [third] = start(("actor", port, 1, 450, 200, 30_000, tmp_path / "spool"))
    assert third.ask("go") == {"updated": True, "waiting": 0}
    assert len(buffer) == buffer.latest_data_id() == 650
    assert sweep(buffer) == pairs(1, *range(650))
    server.stop()


def test_second_actor_with_the_same_name_delivers_everything(serve, start, port):
    """In agentlace nothing of the second one's arrives."""
    buffer, _ = serve()
    actors = start(("actor", port, 1, 0, 300, 30_000), ("actor", port, 2, 0, 300, 30_000))
    for actor in actors:
        actor._process.stdin.write("go\n")
        actor._process.stdin.flush()
    assert [actor.hear() for actor in actors] == [{"updated": True, "waiting": 0}] * 2
    assert len(buffer) == buffer.latest_data_id() == 600
    assert sweep(buffer) == pairs(1, *range(300)) | pairs(2, *range(300))


def test_learner_restart_duplicates_nothing(start, connect, port, tmp_path):
    """In agentlace the new learner asks for everything that the queue still has, and gets it twice."""
    [learner] = start(("learner", tmp_path, port))
    queue, client = connect(timeout_ms=50)
    for number in range(400):
        queue.insert(transition(1, number))
        if number % 10 == 0:
            client.update()
        if number == 200:
            learner.kill()  # in the middle of it
    assert not client.update()
    [learner] = start(("learner", tmp_path, port))
    deadline = time.monotonic() + 20
    while not client.update():
        assert time.monotonic() < deadline
    assert learner.ask("count") == [400, 0, 400, 0]
    assert {tuple(pair) for pair in learner.ask("sweep")} == pairs(1, *range(400))


def test_no_stale_parameters_after_learner_restart(start, connect, port, tmp_path):
    """In agentlace an actor that comes later gets nothing, and what a restarted learner sends is taken, however old."""
    [learner] = start(("learner", tmp_path, port))
    got, late = [], []
    _, client = connect()
    client.recv_network_callback(lambda params: got.append((client.policy_version, float(params["bias"]))))
    for number in (10, 20, 30):
        newest = learner.ask(f"publish {number}")
    wait_for(lambda: client.policy_version == newest)
    learner.kill()
    [learner] = start(("learner", tmp_path, port))
    _, later = connect()
    later.recv_network_callback(lambda params: late.append(float(params["bias"])))
    wait_for(lambda: later.policy_version == newest)
    assert late == [30.0]
    assert client.policy_version == newest
    assert got[-1][1] == 30.0
    assert learner.ask("publish 40") == newest + 1
    wait_for(lambda: client.policy_version == later.policy_version == newest + 1)
    assert got[-1][1] == late[-1] == 40.0
    assert got == sorted(got)


def test_the_hil_serl_loop_runs_with_its_imports_changed(start, cleanup, port, tmp_path):
    [learner] = start(("hil-serl-learner", tmp_path, port))
    actor = Process("hil-serl-actor", port)
    cleanup.callback(actor.kill)
    acted = actor.hear()
    learned = learner.ask("done")
    assert all(acted["updated"])
    assert acted["answers"] == [{}] * 12
    assert acted["dropped"] == 0
    assert learned["version"] >= acted["version"] > 1  # on a busy machine the learner goes on after the actor
    assert learned["step"] // 5 * 5 - acted["params"] == 5 * (learned["version"] - acted["version"])
    assert acted["updates"] > 1

    own = [(7, number) for episode in range(12) for number in range(10 + 35 * episode, 35 + 35 * episode)]
    taken_over = [pair for pair in own if 11 <= (pair[1] - 10) % 35 < 18]
    assert learned["replay"] == len(own) == 300
    assert [tuple(pair) for pair in learned["replay_pairs"]] == own
    assert acted["intervened"] == len(taken_over)
    assert learned["demo"] == 30 + len(taken_over)
    assert [tuple(pair) for pair in learned["demo_pairs"]] == sorted([(1, n) for n in range(30)] + taken_over)
    assert {"environment": {"succeed": True, "left": False, "episode": {"r": [1.5], "l": 25}}} in learned["stats"]

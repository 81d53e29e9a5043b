"""What breaks between an actor and a learner elsewhere, each as a test with real processes, sockets and disks.

| process | takes from | blocks on | woken by |
|---|---|---|---|
| the test | - | the others' output; deliveries | - |
| server | chunks | see server.py | gRPC |
| actor | its command line | the spool; the server, if told to wait for it | the outbox |
"""

import logging
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent import futures
from pathlib import Path

import grpc
import numpy as np
import pytest

from understudy.core import ArraySpec, BacklogError, FencedError, Spec, Step, StepSpec, UnderstudyError
from understudy.replay import Reader, verify
from understudy.selftest.faulty_proxy import Proxy, free_port
from understudy.service import OutboxConfig, connect
from understudy.service.client.connection import Connection, Credentials
from understudy.service.wire.message import to_json
from understudy.service.wire.protocol import SERVICE, VERSION, WRITE

SPEC = StepSpec(
    observation=Spec(ArraySpec(shape=(4,), dtype="float32")), action=Spec(ArraySpec(shape=(1,), dtype="float32"))
)
WAIT_S = 30.0

SERVER = """
import sys, time
from understudy.replay import Store
from understudy.service import Server, ServerConfig

with Server(Store.open(sys.argv[1]), ServerConfig(port=int(sys.argv[2]))):
    print("ready", flush=True)
    time.sleep(1000)
"""

ACTOR = """
import sys, time
from tests.system.test_delivery import write
from understudy.service import connect
from tests.system.test_delivery import SPEC

address, name, spool, first, last, wait = sys.argv[1:]
writer = connect(address).writer(name, SPEC, spool=spool)
for seed in range(int(first), int(last)):
    write(writer, seed)
    print(seed, flush=True)  # write() has flushed: it is recorded
if wait == "deliver":
    assert writer.wait_delivered(30), writer.delivery
    writer.close()
else:
    time.sleep(1000)
"""


def write(writer, seed, num_steps=100, wait=True):
    """An episode of which every row can be told from every other."""
    writer.begin(seed=seed, actor=writer.name)
    for index in range(num_steps):
        writer.append(step(seed, index, last=index == num_steps - 1))
    writer.end(observation(seed, num_steps))
    if wait:
        writer.flush()


def step(seed, index, *, last):
    return Step(observation=observation(seed, index), action=np.float32([index]), reward=float(index), terminated=last)


def observation(seed, index):
    return np.float32([seed, index, seed * 1000 + index, 7])


def stored(path):
    """How often each row is in the store, by (seed, index); all of them are what was written."""
    seen = Counter()
    with Reader(path) as reader:
        for record in reader.episodes():
            _, columns = reader.rows(record.id)
            values = columns["observation"]
            assert (values[:, 0] == record.info.seed).all()
            assert (np.diff(values[:, 1]) == 1).all()  # each follows the one before it
            assert np.array_equal(values[:, 2], values[:, 0] * 1000 + values[:, 1])
            seen.update((int(a), int(b)) for a, b in values[:, :2])
    assert verify(path).ok
    return seen


def rows_of(seeds, num_steps=100):
    return Counter((seed, index) for seed in seeds for index in range(num_steps + 1))


class ServerProcess:
    """A server that can be killed and started again at the same address."""

    def __init__(self, path):
        self.path = path
        self.port = free_port()
        self.address = f"127.0.0.1:{self.port}"
        self._process = None

    def start(self):
        self._process = python(SERVER, self.path, self.port)
        assert self._process.stdout.readline() == "ready\n"

    def kill(self):
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


def python(code, *arguments):
    return subprocess.Popen([sys.executable, "-c", code, *map(str, arguments)], stdout=subprocess.PIPE, text=True)


@pytest.fixture
def server(tmp_path):
    process = ServerProcess(tmp_path / "store")
    yield process
    process.kill()


@pytest.fixture
def remote(server):
    with connect(server.address) as remote:
        yield remote


@pytest.fixture
def actor(server, tmp_path, monkeypatch):
    """Starts actors in processes of their own, which write episodes `first` to `last`; their output says which."""
    monkeypatch.setenv("PYTHONPATH", f"{Path(__file__).parents[2]}:{Path(__file__).parents[2] / 'src'}")
    running = []

    def start(first, last, *, wait="deliver", spool="spool"):
        running.append(python(ACTOR, server.address, "arm", tmp_path / spool, first, last, wait))
        return running[-1]

    yield start
    for process in running:
        process.kill()
        process.wait()
        process.stdout.close()


# ---- the cases


def test_actor_restart_delivers_every_transition(server, actor):
    server.start()
    assert actor(0, 5).wait(WAIT_S) == 0
    assert actor(5, 20).wait(WAIT_S) == 0
    assert stored(server.path) == rows_of(range(20))  # 2,000 steps: 500, and 1,500 after the restart


def test_second_actor_on_the_same_name_is_not_silently_lost(server, remote, tmp_path):
    server.start()
    first = remote.writer("arm", SPEC, spool=tmp_path / "first")
    for seed in range(3):
        write(first, seed)
    assert first.wait_delivered(WAIT_S)
    second = remote.writer("arm", SPEC, spool=tmp_path / "second")
    for seed in range(100, 112):
        write(second, seed)
    assert second.wait_delivered(WAIT_S)
    told = []  # recorded, and the server will not have them from this one
    with pytest.raises(FencedError, match="'arm' was replaced by a newer process of the same name"):
        write_until_refused(first, told)
    with pytest.raises(UnderstudyError, match=r"rows that were recorded and not delivered stay in .*/first/"):
        first.close()
    left = first.delivery.recorded
    assert left > 0
    second.close()
    with remote.writer("arm", SPEC, spool=tmp_path / "first") as third:
        assert third.wait_delivered(WAIT_S)
    found = stored(server.path)
    assert max(found.values()) == 1
    assert not rows_of([*range(3), *told, *range(100, 112)]) - found
    assert found.total() == 15 * 101 + left


def write_until_refused(writer, told):
    for seed in range(3, 97):
        write(writer, seed)
        told.append(seed)
    writer.wait_delivered(WAIT_S)


def test_server_restart_duplicates_nothing(server, remote, tmp_path):
    server.start()
    patient = OutboxConfig(block_timeout_s=WAIT_S)
    with remote.writer("arm", SPEC, spool=tmp_path / "spool", commit_steps=10, config=patient) as writer:
        for seed in range(30):
            write(writer, seed, wait=seed % 2 == 0)
            if seed in (5, 12, 25):  # with chunks on their way
                server.kill()
                server.start()
        write(writer, 30, num_steps=1)
        assert writer.wait_delivered(WAIT_S)
        assert writer.delivery.delivered == 30 * 101 + 2
    found = stored(server.path)
    assert found == rows_of(range(30)) + rows_of([30], num_steps=1)
    with Reader(server.path) as reader:
        assert sum(record.num_steps for record in reader.episodes()) == 3001


@pytest.mark.parametrize("overflow", ["drop_newest", "drop_oldest"])
def test_overflow_is_counted_never_silent(server, remote, tmp_path, caplog, overflow):
    config = OutboxConfig(queue_steps=50, spool_bytes=4000, overflow=overflow)
    with caplog.at_level(logging.WARNING):
        writer = remote.writer("arm", SPEC, spool=tmp_path / "spool", commit_steps=10, config=config)
        for seed in range(10):  # the server is not there
            write(writer, seed, wait=False)
    dropped = writer.delivery.dropped
    assert 0 < dropped < 1010
    assert "rows dropped so far" in caplog.text
    server.start()
    assert writer.wait_delivered(WAIT_S)
    assert writer.delivery.dropped == dropped
    writer.close()
    found = stored(server.path)
    assert found.total() == 1010 - dropped
    assert max(found.values()) == 1


def test_overflow_that_blocks_raises_and_is_counted(server, remote, tmp_path):
    config = OutboxConfig(queue_steps=20, spool_bytes=2000, block_timeout_s=0.05)
    writer = remote.writer("arm", SPEC, spool=tmp_path / "spool", commit_steps=10, config=config)
    writer.begin(seed=0)
    taken = []
    with pytest.raises(BacklogError, match=r"the queue is full with 20 steps after 0\.05 s of waiting"):
        append_until_refused(writer, taken)
    assert writer.delivery.refused == 1
    assert writer.delivery.dropped == 0
    server.start()
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:  # the step that raised is kept, and goes with the next commit
        try:
            assert writer.wait_delivered(WAIT_S)
            break
        except BacklogError:
            time.sleep(0.1)
    writer.cut()
    writer.close()
    assert stored(server.path) == Counter((0, index) for index in taken)


def append_until_refused(writer, taken):
    for index in range(1000):
        taken.append(index)  # the one that raises is taken, too
        writer.append(step(0, index, last=False))


def test_actor_killed_loses_nothing_recorded(server, actor):
    """The server is away all the while; a second process, which writes nothing, delivers what the first recorded."""
    process = actor(0, 1000, wait="stay")
    seeds = [process.stdout.readline() for _ in range(20)]
    process.kill()
    seeds += process.communicate()[0].splitlines(keepends=True)
    told = [int(seed) for seed in seeds if seed.endswith("\n")]
    server.start()
    assert actor(0, 0).wait(WAIT_S) == 0
    found = stored(server.path)
    assert len(told) >= 20
    assert not rows_of(told) - found
    assert max(found.values()) == 1


@pytest.mark.serial
def test_control_loop_never_waits_for_a_dead_server(server, remote, tmp_path):
    """100 Hz with two cameras; the server dies, is away for a while and comes back.

    The quietest of three runs counts, because what else a machine does is not the writer's doing.
    """
    best = np.inf
    for attempt in range(3):
        server.start()
        took_ms = append_through_an_outage(server, remote, tmp_path / f"spool-{attempt}")
        server.kill()
        p50, p99 = np.quantile(took_ms, [0.5, 0.99])
        print(f"append at 100 Hz, two cameras: median {p50:.3f} ms, p99 {p99:.3f} ms, longest {max(took_ms):.3f} ms")
        best = min(best, p99)
        if best < 5.0:
            break
    assert best < 5.0
    with Reader(server.path) as reader:
        assert [record.num_rows for record in reader.episodes()] == [300] * (attempt + 1)


def append_through_an_outage(server, remote, spool):
    """How long each `append` took, in milliseconds."""
    camera = ArraySpec(shape=(128, 128, 3), dtype="uint8")
    spec = StepSpec(
        observation=Spec({"wrist_1": camera, "wrist_2": camera}), action=Spec(ArraySpec(shape=(7,), dtype="float32"))
    )
    frames = np.random.default_rng(0).integers(0, 256, (16, 128, 128, 3), np.uint8)

    def die_and_come_back():
        time.sleep(0.5)
        server.kill()
        time.sleep(1.0)
        server.start()

    took_ms = []
    outage = threading.Thread(target=die_and_come_back)
    with remote.writer("arm", spec, spool=spool) as writer:
        writer.begin(seed=0)
        outage.start()
        started = time.perf_counter()
        for index in range(300):
            time.sleep(max(started + index * 0.01 - time.perf_counter(), 0))
            frame = {"wrist_1": frames[index % 16], "wrist_2": frames[(index + 1) % 16]}
            now = time.perf_counter()
            writer.append(Step(observation=frame, action=np.zeros(7, np.float32), reward=0.0))
            took_ms.append((time.perf_counter() - now) * 1e3)
        outage.join()
        writer.cut()
        assert writer.wait_delivered(WAIT_S)
        assert writer.delivery.dropped == writer.delivery.refused == 0
    return took_ms


# ---- what the chain test brought to light


def test_a_gap_in_the_spool_does_not_stop_what_follows(server, remote, tmp_path, caplog):
    """Someone moved the file of a damaged chunk away, as the error says; the rest goes on as an episode of its own."""
    writer = remote.writer("arm", SPEC, spool=tmp_path / "spool", commit_steps=10)
    write(writer, 0)
    writer.close(0)
    chunks = sorted((tmp_path / "spool").glob("*/*.safetensors"))
    chunks[4].unlink()
    chunks[7].unlink()
    server.start()
    with remote.writer("arm", SPEC, spool=tmp_path / "spool") as writer:
        write(writer, 1)
        assert writer.wait_delivered(WAIT_S)
    missing = Counter((0, index) for index in [*range(40, 50), *range(70, 80)])
    assert stored(server.path) == rows_of([0, 1]) - missing
    assert "lacks chunks 4 to 4, and they are not in the spool" in caplog.text


def test_a_late_hello_takes_no_name_away(server, remote, tmp_path):
    """The hello of a process that has died since, held up on its way, arrives when another has taken its place."""
    server.start()
    with remote.writer("arm", SPEC, spool=tmp_path / "spool") as writer:
        write(writer, 0)
        assert writer.wait_delivered(WAIT_S)
        hello = {"version": VERSION, "writer": "arm", "incarnation": "dead", "spec": SPEC.to_json()}
        connection = Connection(server.address, Credentials())
        assert b'"last_seq":-1' in next(connection.exchange(WRITE, iter([to_json(hello)])))
        connection.close()
        write(writer, 1)
        assert writer.wait_delivered(WAIT_S)
    assert stored(server.path) == rows_of([0, 1])


def test_an_answer_to_what_was_not_sent_is_not_believed(remote, server, tmp_path):
    """A server, or a link, that acknowledges chunk 7 when chunk 0 was sent: the spool keeps everything."""

    def answer(requests, context):
        next(requests)
        yield to_json({"last_seq": -1, "max_message_bytes": 1 << 20})
        for _ in requests:
            yield to_json({"seq": 7, "commit": 1})

    liar = grpc.server(futures.ThreadPoolExecutor(4))
    handler = grpc.method_handlers_generic_handler(SERVICE, {WRITE: grpc.stream_stream_rpc_method_handler(answer)})
    liar.add_generic_rpc_handlers((handler,))
    liar.add_insecure_port(server.address)
    liar.start()
    with remote.writer("arm", SPEC, spool=tmp_path / "spool", commit_steps=10) as writer:
        write(writer, 0)
        assert not writer.wait_delivered(0.5)
        liar.stop(0).wait()
        assert writer.delivery.recorded == 101
        assert writer.delivery.delivered == 0
        server.start()
        assert writer.wait_delivered(WAIT_S)
    assert stored(server.path) == rows_of([0])


def test_a_link_of_seconds_is_slow_and_not_dead(server):
    server.start()
    with Proxy(server.port) as proxy, connect(proxy.address) as remote:
        proxy.delay(1.2)
        assert list(remote.status(timeout_s=WAIT_S)) == [proxy.address]


@pytest.mark.nightly
def test_a_link_that_is_silently_gone_is_noticed(server, tmp_path):
    server.start()
    with (
        Proxy(server.port) as proxy,
        connect(proxy.address) as remote,
        remote.writer("arm", SPEC, spool=tmp_path / "spool") as writer,
    ):
        write(writer, 0)
        assert writer.wait_delivered(WAIT_S)
        proxy.silence()
        write(writer, 1)
        assert writer.wait_delivered(28.0)
    assert stored(server.path) == rows_of([0, 1])

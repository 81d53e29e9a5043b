"""The actor: the same episodes for the same seed, name and number; other ones for others; and it survives its world."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partialmethod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.waiting import wait_for
from tests.worlds import RealTable

from understudy.algorithms import SAC
from understudy.core import NO_VERSION, Source
from understudy.envs import IsolatedWorld, ToyTable, WorldFactory
from understudy.envs.workers.outcomes import WorkerDied
from understudy.policies import Stats
from understudy.processes.stop import Stopped, StopRequest
from understudy.replay import Reader, Store
from understudy.replay.format.paths import parameter_files
from understudy.service import Remote, Server, ServerConfig, connect
from understudy.service.wire.message import pieces, to_json
from understudy.service.wire.parameters import encode_parameters
from understudy.service.wire.protocol import PUBLISH
from understudy.training.data.run_episode import EpisodeResult
from understudy.training.offpolicy.actor import MAX_ATTEMPTS, Actor, run_actor
from understudy.training.offpolicy.local_run import LocalRun
from understudy.training.offpolicy.rlpd import RLPDConfig
from understudy.training.runs.config import ConfigError
from understudy.training.runs.health import Health
from understudy.training.runs.run import Run

TOY = WorldFactory(factory="understudy.envs.toy:ToyTable", options={"cameras": False})


def lived(tmp_path: Path, config: RLPDConfig, name: str, numbers: list[int]) -> list[Any]:
    path = tmp_path / f"{config.seed}-{name}-{numbers}"
    world = ToyTable(cameras=False)
    with Store.open(path) as store:
        actor = Actor(config, world, store.writer(name, world.step_spec), name=name)
        for number in numbers:
            actor.run_episode(None, number)
    with Reader(path) as reader:
        return [reader.read(record.id) for record in reader.episodes()]


def test_an_episode_is_decided_by_seed_name_and_number(tmp_path: Path) -> None:
    config = RLPDConfig()
    first, second = lived(tmp_path, config, "a", [0, 1])
    assert set(first.source.tolist()) == {Source.RANDOM}
    assert set(first.policy_version.tolist()) == {NO_VERSION}
    assert first.info.split == "train"
    (again,) = lived(tmp_path, config, "a", [1])
    assert again.action.tolist() == second.action.tolist()
    assert again.info.init_state == second.info.init_state
    others = [second, *lived(tmp_path, config, "b", [0]), *lived(tmp_path, RLPDConfig(seed=1), "a", [0])]
    assert all(other.action.tolist() != first.action.tolist() for other in others)


def test_a_world_that_dies_costs_an_episode_and_one_that_always_dies_ends_it(tmp_path: Path) -> None:
    with Store.open(tmp_path / "store") as store, IsolatedWorld(TOY) as world:
        deaths = 0

        def show(observation: Any, seen: Any) -> None:
            nonlocal deaths
            if seen["step"] == 3 and deaths and world.worker.pid:
                deaths -= 1
                os.kill(world.worker.pid, signal.SIGKILL)

        actor = Actor(RLPDConfig(), world, store.writer("a", world.step_spec), name="a", show=show)
        deaths = MAX_ATTEMPTS - 1
        assert actor.run_episode(None, 0).num_steps > 3
        deaths = MAX_ATTEMPTS
        with pytest.raises(WorkerDied):
            actor.run_episode(None, 1)
    with Reader(tmp_path / "store") as reader:
        states = [record.state for record in reader.episodes()]
    assert states == ["cut"] * (MAX_ATTEMPTS - 1) + ["ended"] + ["cut"] * MAX_ATTEMPTS


def test_actors_share_what_the_learner_may_be_behind_and_end_when_told(tmp_path: Path) -> None:
    config = RLPDConfig(
        env="toy:touch_purple?cameras=false", start_steps=100, max_pending_updates=600, updates_per_step=1
    )
    lived = []
    for num_actors in (1, 4):
        with Store.open(tmp_path / str(num_actors)) as store, Server(store, ServerConfig(port=0)) as server:
            health = Health(None, role="actor", name="a")
            steps: list[int] = []

            def watch(number: int, rolled: EpisodeResult, version: int | None, steps: list[int] = steps) -> None:
                steps.append(rolled.num_steps)

            stop = StopRequest()
            with ThreadPoolExecutor(1) as pool:
                running = pool.submit(
                    run_actor,
                    config,
                    server.address,
                    name="a",
                    health=health,
                    watch=watch,
                    num_actors=lambda n=num_actors: n,
                    stop=stop,
                )
                wait_for(lambda health=health: health.now()["doing"] == "waiting for the learner")  # type: ignore[misc]
                stop.request()
                with pytest.raises(Stopped, match="; all its steps are on the server; start it again to continue"):
                    running.result()
            lived.append(sum(steps))
            with Reader(store.path) as reader:
                assert sum(record.num_steps for record in reader.episodes()) == sum(steps)  # delivered at the end
    assert 700 < lived[0] <= 800
    assert 175 < lived[1] <= 275


def test_an_actor_ends_by_itself_when_the_run_has_its_steps(tmp_path: Path) -> None:
    config = RLPDConfig(env="toy:touch_purple?cameras=false", steps=250, start_steps=1000)
    with Store.open(tmp_path / "store") as store, Server(store, ServerConfig(port=0)) as server:
        assert run_actor(config, server.address, name="a") >= 3  # nobody learns, and nobody tells it to end
        with Reader(store.path) as reader:
            lengths = [record.num_steps for record in reader.episodes()]
        assert sum(lengths) >= 250 > sum(lengths[:-1])
        assert run_actor(config, server.address, name="a") == 0
        assert run_actor(config, server.address, name="b") == 0


def test_an_episode_that_does_not_end_in_time_is_truncated_and_kept(tmp_path: Path) -> None:
    config = RLPDConfig(env="toy:touch_purple?cameras=false", start_steps=1000)
    stop = StopRequest(grace_s=0)
    with Store.open(tmp_path / "store") as store, ToyTable(cameras=False) as world:

        def show(observation: Any, seen: Any) -> None:
            if seen["step"] == 3:
                stop.request()

        actor = Actor(config, world, store.writer("a", world.step_spec), name="a", show=show, stop=stop)
        assert actor.run_episode(None, 0).num_steps == 4
        assert actor.in_progress == (0, 0)
    with Reader(tmp_path / "store") as reader:
        (record,) = reader.episodes()
        assert (record.state, record.num_steps) == ("ended", 4)
        assert reader.read(record.id).truncated.tolist() == [False, False, False, True]


# ---- when there is no policy


SMALL = "?cameras=false&state=task"
SIMULATED = RLPDConfig(env=f"toy:touch_purple{SMALL}")
REAL = RLPDConfig(env=f"tests.worlds:RealTable{SMALL}&task=touch_purple", cloning_updates=100)


def publish_policy(remote: Remote) -> int:
    world = ToyTable(cameras=False, state="task")
    stats = Stats.none(SIMULATED.inputs(world.step_spec))
    policy = SAC(SIMULATED.sac, world.step_spec, stats, seed=0).policy(version=0)
    metadata = {"policy": json.dumps(policy.description()), "pending_updates": "0", "finished": "0"}
    return remote.publish(policy.parameters(), metadata=metadata)


@contextmanager
def acting(config: RLPDConfig, address: str) -> Iterator[tuple[Health, list[int | None]]]:
    """An actor in a thread: its health, and the version of the policy of each episode."""
    health = Health(None, role="actor", name="arm")
    versions: list[int | None] = []
    stop = StopRequest()

    def watch(number: int, result: EpisodeResult, version: int | None) -> None:
        versions.append(version)

    with ThreadPoolExecutor(1) as pool:
        options: dict[str, Any] = {"name": "arm", "health": health, "watch": watch, "stop": stop}
        running = pool.submit(run_actor, config, address, **options)
        try:
            yield health, versions
        finally:
            stop.request()
            with pytest.raises(Stopped):
                running.result()


def is_waiting(health: Health) -> Callable[[], bool]:
    return lambda: str(health.now()["doing"]).startswith("waiting for")


def num_random(path: Path) -> int:
    with Reader(path) as reader:
        return sum(record.num_random for record in reader.episodes())


def test_an_actor_that_starts_during_an_upload_acts_with_the_version_before(tmp_path: Path) -> None:
    released, sent = threading.Event(), threading.Event()

    def stalled() -> Iterator[bytes]:
        yield to_json({"version": None})
        yield from list(pieces(encode_parameters({"w": np.zeros(10**6, np.float32)}, {}, bfloat16=False)))[:2]
        sent.set()
        released.wait()

    with (
        Store.open(tmp_path / "store") as store,
        Server(store, ServerConfig(port=0)) as server,
        connect(server.address) as remote,
        ThreadPoolExecutor(1) as pool,
    ):
        assert publish_policy(remote) == 1
        connection = next(iter(remote._connections.values()))
        upload = pool.submit(connection.upload, PUBLISH, stalled(), timeout_s=None)
        assert sent.wait(30)
        try:
            with acting(SIMULATED, server.address) as (_, versions):
                wait_for(lambda: versions)
        finally:
            released.set()
        assert upload.exception() is not None
    assert set(versions) == {1}
    assert num_random(tmp_path / "store") == 0


def test_once_a_version_existed_an_actor_waits_for_the_next(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    patient = partialmethod(Remote.newest_version, timeout_s=60.0)  # a busy server is not taken for one that is away
    monkeypatch.setattr(Remote, "newest_version", patient)
    with Store.open(tmp_path / "store") as store:
        with Server(store, ServerConfig(port=0)) as server, connect(server.address) as remote:
            publish_policy(remote)
        (path,) = parameter_files(store.path)
        os.truncate(path, 1000)
        with (
            Server(store, ServerConfig(port=0)) as server,
            connect(server.address) as remote,
            acting(SIMULATED, server.address) as (health, versions),
        ):
            reason = "waiting for a policy: version 1 was published and has not arrived"
            wait_for(lambda: health.now()["doing"] == reason)
            assert not versions
            assert publish_policy(remote) == 2
            wait_for(lambda: versions)
    assert set(versions) == {2}
    assert num_random(tmp_path / "store") == 0
    assert caplog.text.count("version 1 was published and has not arrived") == 1


def test_on_a_real_robot_an_actor_waits_for_the_first_policy(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    RealTable.executed.clear()
    with (
        Store.open(tmp_path / "store") as store,
        Server(store, ServerConfig(port=0)) as server,
        connect(server.address) as remote,
        acting(REAL, server.address) as (health, versions),
    ):
        wait_for(is_waiting(health))
        wait_for(lambda: caplog.text.count("random actions were not asked for") == 1)
        assert not versions
        assert not RealTable.executed
        assert publish_policy(remote) == 1
        wait_for(lambda: versions)
    assert set(versions) == {1}
    assert num_random(tmp_path / "store") == 0


def test_random_actions_on_a_real_robot_are_asked_for_by_name(tmp_path: Path) -> None:
    untrained = RLPDConfig(env=REAL.env)
    with Store.open(tmp_path / "store") as store, RealTable(cameras=False) as world:
        writer = store.writer("arm", world.step_spec)
        with pytest.raises(ConfigError, match=r"got 0: .* if nothing real moves, set simulated = True in its class"):
            Actor(untrained, world, writer, name="arm")
        with pytest.raises(ConfigError, match=r"start_steps: expected 0, .* got 20 steps with random actions"):
            Actor(RLPDConfig(env=REAL.env, cloning_updates=100, start_steps=20), world, writer, name="arm")
        with pytest.raises(ConfigError, match=r"there is no policy yet, and random actions are not allowed"):
            Actor(REAL, world, writer, name="arm").run_episode(None, 0)
        assert num_random(tmp_path / "store") == 0
        asked = RLPDConfig(env=REAL.env, random_actions=True)
        Actor(asked, world, writer, name="arm").run_episode(None, 0)
        assert num_random(tmp_path / "store") > 0


def test_a_local_run_on_a_real_robot_needs_demonstrations(tmp_path: Path) -> None:
    RealTable.executed.clear()
    run = Run.create(tmp_path / "run", "rlpd", REAL)
    with LocalRun(run) as local, pytest.raises(ConfigError, match=r"no policy yet, .* record demonstrations first"):
        local.run()
    assert not RealTable.executed


def test_what_another_program_published_is_not_acted_with(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with (
        Store.open(tmp_path / "store") as store,
        Server(store, ServerConfig(port=0)) as server,
        connect(server.address) as remote,
    ):
        remote.publish({"w": np.zeros(3)}, metadata={"by": "another program"})
        with acting(SIMULATED, server.address) as (health, versions):
            wait_for(is_waiting(health))
            wait_for(lambda: "version 1 is no policy of an RLPD learner" in caplog.text)
            assert not versions
            assert publish_policy(remote) == 2
            wait_for(lambda: versions)
    assert set(versions) == {2}

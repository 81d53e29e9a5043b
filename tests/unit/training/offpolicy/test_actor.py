"""The actor: the same episodes for the same seed, name and number; other ones for others; and it survives its world."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from understudy.core import NO_VERSION, Source
from understudy.envs import IsolatedWorld, ToyTable, WorldFactory
from understudy.envs.workers.outcomes import WorkerDied
from understudy.replay import Reader, Store
from understudy.service import Server, ServerConfig
from understudy.training.data.run_episode import EpisodeResult
from understudy.training.offpolicy.actor import MAX_ATTEMPTS, Actor, run_actor
from understudy.training.offpolicy.rlpd import RLPDConfig
from understudy.training.runs.health import Health

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

            def waits(health: Health = health) -> bool:
                return bool(health.now()["doing"] == "waiting for the learner")

            run_actor(
                config,
                server.address,
                name="a",
                health=health,
                watch=watch,
                num_actors=lambda n=num_actors: n,  # type: ignore[misc]
                stop=waits,
            )
            lived.append(sum(steps))
            with Reader(store.path) as reader:
                assert sum(record.num_steps for record in reader.episodes()) == sum(steps)  # delivered at the end
    assert 700 < lived[0] <= 800
    assert 175 < lived[1] <= 275

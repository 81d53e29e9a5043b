"""Rollout and record: what is in the store is what was executed, by whom, and what the policy had wanted."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.worlds import CountingWorld

from understudy.core import NO_VERSION, EpisodeError, Source
from understudy.envs.takeover import AlwaysScript, Reading, Takeover
from understudy.replay import DEMO, Reader, Sampler, Store, verify
from understudy.service import Server, ServerConfig
from understudy.training import RecordConfig, open_target, record, run_episode

NUM_EPISODES = 1000


class RandomBursts:
    """A person who takes over in bursts, as the dice say, and remembers what was done."""

    source = Source.HUMAN

    def __init__(self, rng: random.Random):
        self._rng = rng
        self._left = 0
        self.said: list[float | None] = []

    def begin(self) -> None:
        self.said = []

    def read(self) -> Reading:
        if self._left == 0 and self._rng.random() < 0.1:
            self._left = self._rng.randrange(1, 8)
        if self._left == 0:
            self.said.append(None)
            return Reading()
        self._left -= 1
        action = np.float32([self._rng.uniform(-1, 1)])
        self.said.append(float(action[0]))
        return Reading(action=action, reason="dice")

    def close(self) -> None:
        """Nothing to let go of."""


def test_a_thousand_episodes_with_takeovers_are_recorded_exactly(tmp_path: Path) -> None:
    rng = random.Random(1)
    device = RandomBursts(rng)
    takeover = Takeover(device, operator="ada")
    lived: list[dict[str, Any]] = []
    with Store.open(tmp_path / "store") as store:
        writer = store.writer("actor", CountingWorld().step_spec, commit_steps=500, flush_each_episode=False)
        for number in range(NUM_EPISODES):
            world = CountingWorld(max_steps=rng.randrange(1, 30))
            wanted: list[float] = []

            def act(observation: Any, wanted: list[float] = wanted, number: int = number) -> tuple[Any, int]:
                action = np.float32([rng.uniform(-1, 1)])
                wanted.append(float(action[0]))
                return action, number

            rolled = run_episode(world, writer, act=act, takeover=takeover, seed=number)
            lived.append({"said": list(device.said), "wanted": wanted, "executed": world.executed})
            assert rolled.num_human == sum(x is not None for x in device.said)
        writer.flush()
    with Reader(tmp_path / "store") as reader:
        records = list(reader.episodes())
        assert len(records) == NUM_EPISODES
        for record_, life in zip(records, lived, strict=True):
            episode = reader.read(record_.id)
            human = [x is not None for x in life["said"]]
            assert (episode.source == np.where(human, Source.HUMAN, Source.POLICY)).all()
            assert episode.action[:, 0].tolist() == life["executed"]
            assert episode.has_proposal.tolist() == human
            assert episode.proposal[human, 0].tolist() == [w for w, h in zip(life["wanted"], human, strict=True) if h]
            assert [x for x in life["said"] if x is not None] == episode.action[human, 0].tolist()
            assert set(episode.policy_version.tolist()) == {record_.info.seed}
            assert record_.info.kind == ("correction" if any(human) else "practice")
            assert record_.info.operator == "ada"
            bursts = sum(h and not before for h, before in zip(human, [False, *human], strict=False))
            assert record_.info.labels.get("intervention_count", "0") == str(bursts)
            assert record_.info.labels.get("intervention_steps", "0") == str(sum(human))
    assert verify(tmp_path / "store").problems == []


def test_a_world_that_breaks_leaves_a_cut_episode_with_what_was_lived(tmp_path: Path) -> None:
    world = CountingWorld()
    world.fails_at = 4
    with Store.open(tmp_path / "store") as store:
        writer = store.writer("actor", world.step_spec)
        with pytest.raises(RuntimeError, match="the simulator broke"):
            run_episode(world, writer, act=lambda _: (np.float32([0]), 3))
        world.fails_at = 0
        with pytest.raises(RuntimeError):
            run_episode(world, writer, act=lambda _: (np.float32([0]), 3))
        world.fails_at = None
        run_episode(world, writer, act=lambda _: (np.float32([0]), 3))
    with Reader(tmp_path / "store") as reader:
        assert [(r.state, r.num_steps) for r in reader.episodes()] == [("cut", 4), ("ended", 10)]
        assert reader.read(1).observation["step"].tolist() == [0, 1, 2, 3, 4]


def test_somebody_must_act(tmp_path: Path) -> None:
    with Store.open(tmp_path / "store") as store, pytest.raises(EpisodeError, match="somebody must act"):
        run_episode(CountingWorld(), store.writer("actor", CountingWorld().step_spec))


# ---- record


def expert(succeeds: Any) -> Takeover:
    """An expert whose every episode succeeds, or not, as a list says."""
    plan = iter(succeeds)

    class Device(AlwaysScript):
        def begin(self) -> None:
            self._good = next(plan)

        def read(self) -> Reading:
            return Reading(action=np.float32([1.0 if self._good else 0.0]))

    return Takeover(Device(lambda: None), operator="bob")


def test_recording_goes_on_until_enough_have_succeeded(tmp_path: Path) -> None:
    config = RecordConfig(task="count", successes=3, max_episodes=10)
    seen = []
    with open_target(str(tmp_path / "store")) as target:
        report = record(CountingWorld(), target, expert([1, 0, 1, 0, 1]), config, lambda r, _: seen.append(r))
    assert (report.num_successes, report.num_episodes, report.num_steps) == (3, 5, 50)
    assert seen[-1] == report
    with Reader(tmp_path / "store") as reader:
        assert [r.info.success for r in reader.episodes()] == [True, False, True, False, True]
        assert {r.info.kind for r in reader.episodes()} == {"demonstration"}
        sampler = Sampler(reader, DEMO, batch_size=200)
        assert sampler.follow() == 30  # the failures are kept, and are not in the view
        assert set(sampler.sample().source.tolist()) == {Source.SCRIPT}
        assert set(sampler.sample().policy_version.tolist()) == {NO_VERSION}
        sampler.close()


@pytest.mark.parametrize("remote", [False, True], ids=["here", "over the network"])
def test_an_interrupted_recording_goes_on_with_other_starts(remote: bool, tmp_path: Path) -> None:
    config = RecordConfig(task="count", successes=3, max_episodes=10)

    class Interrupted(Exception):
        pass

    def interrupt(report: Any, _: Any) -> None:
        if report.num_successes == 2:
            raise Interrupted

    def run(where: str) -> Any:
        with open_target(where, spool=tmp_path / "spool" if remote else None) as target, pytest.raises(Interrupted):
            record(CountingWorld(), target, expert([1] * 9), config, interrupt)
        with open_target(where, spool=tmp_path / "spool" if remote else None) as target:
            return record(CountingWorld(), target, expert([1] * 9), config)

    if remote:
        with Store.open(tmp_path / "store") as store, Server(store, ServerConfig(port=0)) as server:
            report = run(server.address)
    else:
        report = run(str(tmp_path / "store"))
    assert (report.num_successes, report.num_episodes, report.num_steps) == (3, 3, 10)
    with Reader(tmp_path / "store") as reader:
        assert [r.info.seed for r in reader.episodes()] == [0, 1, 2]


def test_a_task_that_cannot_be_done_comes_to_an_end(tmp_path: Path) -> None:
    config = RecordConfig(task="count", successes=3, max_episodes=4)
    with open_target(str(tmp_path / "store")) as target:
        report = record(CountingWorld(), target, expert([0] * 9), config)
    assert (report.num_successes, report.num_episodes) == (0, 4)

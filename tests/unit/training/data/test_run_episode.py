"""Rollout and record: what is in the store is what was executed, by whom, and what the policy had wanted."""

from __future__ import annotations

import os
import random
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.worlds import CountingWorld, SensingWorld

from understudy.cli import main
from understudy.core import NO_VERSION, EpisodeError, Source, UnderstudyError
from understudy.core import tree as trees
from understudy.core.times import counts_of
from understudy.envs import IsolatedWorld, RewardedWorld, WorldFactory
from understudy.envs.pace import Pace
from understudy.envs.teleop.takeover import AlwaysScript, Reading, Takeover
from understudy.envs.workers.outcomes import WorkerDied
from understudy.replay import DEMO, Reader, Sampler, Store, verify
from understudy.service import Server, ServerConfig
from understudy.training import RecordConfig, open_target, run_episode
from understudy.training.data.record import record

NUM_EPISODES = 1000
HERE = {"PYTHONPATH": str(Path(__file__).resolve().parents[4])}
COUNTING = WorldFactory(factory="tests.worlds:CountingWorld", env=HERE)
SENSING = WorldFactory(factory="tests.worlds:SensingWorld", env=HERE)


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
    with Store.open(tmp_path / "store") as store, pytest.raises(EpisodeError, match="give a policy or a takeover"):
        run_episode(CountingWorld(), store.writer("actor", CountingWorld().step_spec))


class OperatorInput:
    """A person of whom each reading is written down beforehand; afterwards the hands rest."""

    source = Source.HUMAN

    def __init__(self, *readings: Reading):
        self._readings = list(readings)

    def begin(self) -> None:
        """Nothing to remember."""

    def read(self) -> Reading:
        return self._readings.pop(0) if self._readings else Reading()

    def close(self) -> None:
        """Nothing to let go of."""


def push(value: float = 0.25, **said: Any) -> Reading:
    return Reading(action=np.float32([value]), **said)


@pytest.mark.parametrize("verdict", [True, False])
def test_a_person_has_the_last_word(verdict: bool, tmp_path: Path) -> None:
    world = CountingWorld()
    hands = OperatorInput(push(0.25), Reading(), Reading(verdict=verdict))
    with Store.open(tmp_path / "store") as store:
        writer = store.writer("actor", world.step_spec)
        rolled = run_episode(world, writer, act=lambda _: (np.float32([-0.5]), 1), takeover=Takeover(hands))
    assert (rolled.num_steps, rolled.success) == (3, verdict)
    with Reader(tmp_path / "store") as reader:
        assert next(iter(reader.episodes())).info.success is verdict
        episode = reader.read(1)
        assert episode.terminated.tolist() == [False, False, True]
        assert episode.reward.tolist() == [1.0, 2.0, float(verdict)]


def test_without_a_policy_the_first_act_begins(tmp_path: Path) -> None:
    world = CountingWorld(max_steps=3)
    hands = OperatorInput(Reading(), Reading(), push(0.25), push(0.0), push(0.5))
    shown: list[dict[str, Any]] = []
    with Store.open(tmp_path / "store") as store:
        writer = store.writer("actor", world.step_spec)
        run_episode(
            world,
            writer,
            takeover=Takeover(hands),
            kind="demonstration",
            show=lambda observation, seen: shown.append({"at": int(observation["step"]), **seen}),
        )
    assert world.executed == [0.25, 0.0, 0.5]
    with Reader(tmp_path / "store") as reader:
        assert set(reader.read(1).source.tolist()) == {Source.HUMAN}
    # Twice while the hands rested, and after each step; what is said fits what is seen.
    assert [s["at"] for s in shown] == [s["step"] for s in shown] == [0, 0, 0, 1, 2, 3]
    assert [s["source"] for s in shown] == [None, None, None, "human", "human", "human"]
    assert shown[0]["instruction"] == "count to the end"
    assert [s.get("reward") for s in shown[3:]] == [1.0, 2.0, 3.0]


def test_a_pace_is_kept(tmp_path: Path) -> None:
    world = CountingWorld(max_steps=6)
    pace = Pace(50)
    with Store.open(tmp_path / "store") as store:
        writer = store.writer("actor", world.step_spec)
        began = time.monotonic()
        run_episode(world, writer, act=lambda _: (np.float32([0]), 1), pace=pace)
        assert time.monotonic() - began >= 5 / 50  # between six steps
    assert pace.report.num_ticks == 5
    with Reader(tmp_path / "store") as reader:
        assert reader.record(1).info.labels["fps"] == "50"  # what an export needs to know


def test_late_steps_are_counted_episode_by_episode(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pace, counted = Pace(10), []

    def act(_: Any) -> Any:
        if len(counted) == 1 and pace.num_missed == counted[0]:
            time.sleep(0.15)  # one step of the second episode is too slow
        return np.float32([0]), 1

    world = CountingWorld(max_steps=3)
    with Store.open(tmp_path / "store") as store:
        writer = store.writer("actor", world.step_spec)
        for _ in range(2):
            run_episode(world, writer, act=act, pace=pace)
            counted.append(pace.num_missed)
    assert counted[1] > counted[0]
    with Reader(tmp_path / "store") as reader:
        found = [int(record.info.labels["late_steps"]) for record in reader.episodes()]
    assert found == [counted[0], counted[1] - counted[0]]
    assert main(["info", str(tmp_path / "store")]) == 0
    assert f"{counted[1]} steps were late" in " ".join(capsys.readouterr().out.split())


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


@pytest.mark.parametrize("isolated", [False, True])
def test_the_times_of_a_worlds_sensors_are_recorded(tmp_path: Path, isolated: bool) -> None:
    before = time.time_ns()
    world = IsolatedWorld(SENSING) if isolated else SensingWorld()
    config = RecordConfig(task="sense", successes=2, max_episodes=2)
    with RewardedWorld(world, reward=None, success=None) as wrapped, open_target(str(tmp_path / "store")) as target:
        record(wrapped, target, expert([1] * 10), config)
    with Reader(tmp_path / "store") as reader:
        for episode in (reader.read(record.id) for record in reader.episodes()):
            counts = counts_of(episode.info.labels)
            assert counts["observation/camera"].received >= 4
            flat = trees.flatten(episode.extras)
            camera, tick = flat["time/observation/camera"], flat["time/tick"]
            assert before < camera[0]
            assert np.all(np.diff(camera) > 0)
            assert np.all((tick >= camera) & (tick <= time.time_ns()))
            joints, samples = trees.flatten(episode.observation)["joints"], flat["samples/observation/joints"]
            assert [len(row) > 1 for row in samples[1:]] == [True] * 4
            assert [row[-1].tolist() for row in samples[1:]] == joints[1:5].tolist()  # of the row that has them


class LateDevice(AlwaysScript):
    """An operator who looks at twenty pictures before the first input."""

    def __init__(self) -> None:
        super().__init__(lambda: None)
        self.shown: list[tuple[int, int]] = []  # pixel, and time

    def show(self, observation: Any, _: Any) -> None:
        self.shown.append((int(observation["camera"].flat[0]), time.time_ns()))

    def read(self) -> Reading:
        return Reading(action=None if len(self.shown) < 20 else np.float32([1.0]))


@pytest.mark.parametrize("isolated", [False, True])
def test_an_operator_begins_with_what_is_seen_now(tmp_path: Path, isolated: bool) -> None:
    device = LateDevice()
    world = IsolatedWorld(SENSING) if isolated else SensingWorld()
    with RewardedWorld(world, reward=None, success=None) as wrapped, Store.open(tmp_path / "store") as store:
        writer = store.writer("arm", wrapped.step_spec)
        run_episode(wrapped, writer, takeover=Takeover(device), show=device.show)
    assert len({pixel for pixel, _ in device.shown[:20]}) > 10  # the picture moves
    with Reader(tmp_path / "store") as reader:
        episode = reader.read(1)
    assert int(episode.observation["camera"][0].flat[0]) == device.shown[19][0]
    assert device.shown[18][1] < episode.extras["time"]["tick"][0] < device.shown[19][1]
    samples = np.concatenate(episode.extras["samples_time"]["observation"]["joints"])
    assert samples.min() > device.shown[18][1]  # those of the wait are not in the episode


@pytest.mark.parametrize("isolated", [False, True])
def test_a_world_that_forgets_the_extras_of_its_spec_is_refused(tmp_path: Path, isolated: bool) -> None:
    forgets = replace(SENSING, options={"forgets_extras": True})
    config = RecordConfig(task="sense", successes=1, max_episodes=1)
    with (
        IsolatedWorld(forgets) if isolated else SensingWorld(forgets_extras=True) as world,
        open_target(str(tmp_path / "store")) as target,
        pytest.raises(UnderstudyError, match="extras/monotonic"),
    ):
        record(world, target, expert([1] * 10), config)


def test_a_simulator_that_dies_costs_its_episode_and_no_more(tmp_path: Path) -> None:
    config = RecordConfig(task="count", successes=4, max_episodes=10)
    shown: list[tuple[int, int]] = []
    with IsolatedWorld(COUNTING) as world, open_target(str(tmp_path / "store")) as target:

        def kill(report: Any, _: Any) -> None:
            if report.num_successes in (1, 2) and world.worker.pid:
                os.kill(world.worker.pid, signal.SIGKILL)

        def show(_: Any, seen: Any) -> None:
            shown.append((seen["episode"], seen["successes"]))
            if seen["episode"] == 2 and seen["step"] == 5 and world.worker.pid:
                os.kill(world.worker.pid, signal.SIGKILL)

        report = record(world, target, expert([1] * 20), config, kill, show=show)
    assert report.num_successes == 4
    assert report.num_broken == 1  # a death between two episodes costs none
    assert shown[0] == (1, 0)
    assert shown[-1] == (5, 3)
    with Reader(tmp_path / "store") as reader:
        assert [(r.state, r.num_steps) for r in reader.episodes()] == [
            ("ended", 10),
            ("cut", 5),
            ("ended", 10),
            ("ended", 10),
            ("ended", 10),
        ]
    assert verify(tmp_path / "store").problems == []


def test_a_simulator_beyond_help_ends_the_recording(tmp_path: Path) -> None:
    config = RecordConfig(task="count", successes=4, max_episodes=10)
    with IsolatedWorld(COUNTING) as world, open_target(str(tmp_path / "store")) as target:

        def show(_: Any, seen: Any) -> None:
            if seen["step"] == 2 and world.worker.pid:
                os.kill(world.worker.pid, signal.SIGKILL)

        with pytest.raises(WorkerDied, match="SIGKILL"):
            record(world, target, expert([1] * 20), config, show=show)
    with Reader(tmp_path / "store") as reader:
        assert [r.state for r in reader.episodes()] == ["cut"] * 3

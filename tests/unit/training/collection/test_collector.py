"""The collector: every ticket is lived, and neither workers nor their number, pace or death change what comes of it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.processes import children
from tests.unit.envs.broken_worlds import source
from tests.unit.training.collection.faulty_worlds import faulty
from tests.unit.training.collection.scripted import Scripted, make_tickets

from understudy.envs import Limits, SuiteError, WorkerFailure, WorldError
from understudy.policies import Acted, PolicyError, Sampling
from understudy.training.collection.collector import Collector, choose
from understudy.training.collection.rollout import Rollout
from understudy.training.runs.config import ConfigError

WORLD = "toy?cameras=false"
NAMES = ("pick_red", "press_button", "touch_purple")
QUICK = Limits(step_s=0.3, stack_s=0.3)  # for each action of a block


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    before = children()
    with Collector(WORLD, num_parallel_envs=2) as collector:
        yield collector
    assert children() == before


@pytest.fixture(scope="module")
def wanted(collector: Collector) -> list[Rollout]:
    """What the tickets of most tests come to when nothing goes wrong."""
    return collector.collect(tickets(), policy(), Sampling())


def tickets() -> tuple[Any, ...]:
    return make_tickets(6, *NAMES, group_by="task")  # each has a world of its own chance


def policy(**options: Any) -> Scripted:
    return Scripted(noise=0.3, good=0.5, **options)


def same(found: Sequence[Rollout], wanted: Sequence[Rollout]) -> bool:
    return len(found) == len(wanted) and all(a.equals(b) for a, b in zip(found, wanted, strict=True))


# --- what a ticket comes to ---


def test_every_ticket_is_lived_in_order_by_workers_that_stay(collector: Collector, wanted: list[Rollout]) -> None:
    pids = collector.pids
    order: list[Rollout] = []
    found = collector.collect(tickets(), policy(), Sampling(), on_result=order.append)
    assert [rollout.ticket for rollout in found] == list(tickets())
    assert same(found, wanted)
    assert collector.pids == pids
    assert sorted(order, key=lambda rollout: rollout.ticket.number) == found
    assert {rollout.attempts for rollout in found} == {1}
    assert 0 < sum(rollout.success for rollout in found) < len(found)  # else the other tests say little


def test_an_episode_says_where_it_is_from(wanted: list[Rollout]) -> None:
    ticket, episode = wanted[5].ticket, wanted[5].episode
    assert episode is not None
    info = episode.info
    assert (info.task, info.init_state, info.seed) == (ticket.task, ticket.start, ticket.world_seed)
    assert (info.group, info.split, info.kind) == ("1", "train", "practice")
    assert info.instruction == "press the button"
    assert info.labels == {"ticket": "5", "iteration": "0", "policy_seed": str(ticket.seed)}
    assert info.success is wanted[5].success
    assert (episode.policy_version == 7).all()


@pytest.mark.parametrize(
    "options",
    [
        {"num_parallel_envs": 1},
        {"num_parallel_envs": 5},
        {"num_parallel_envs": 3, "max_act_rows": 1},
        {"num_parallel_envs": 2, "task_affinity": 0},
    ],
)
def test_neither_the_number_of_workers_nor_of_rows_changes_anything(
    options: dict[str, Any], wanted: list[Rollout]
) -> None:
    with Collector(WORLD, **options) as other:
        asked = policy()
        assert same(other.collect(tickets(), asked, Sampling()), wanted)
        assert max(asked.num_rows) <= options.get("max_act_rows", options["num_parallel_envs"])


def test_part_of_the_tickets_comes_to_the_same(collector: Collector, wanted: list[Rollout]) -> None:
    some = tickets()[3:20:4]
    found = collector.collect(some, policy(), Sampling())
    assert same(found, [wanted[ticket.number] for ticket in some])


def test_another_seed_comes_to_something_else(collector: Collector, wanted: list[Rollout]) -> None:
    changed = [replace(ticket, seed=ticket.seed + 1) for ticket in tickets()[:4]]
    tokens = [
        rollout.episode.extras["replay"]["tokens"]
        for rollout in collector.collect(changed, policy(), Sampling())
        if rollout.episode
    ]
    before = [rollout.episode.extras["replay"]["tokens"] for rollout in wanted[:4] if rollout.episode]
    assert not any(np.array_equal(a[:1], b[:1]) for a, b in zip(tokens, before, strict=True))


def test_the_policy_is_told_how_to_draw(collector: Collector) -> None:
    asked = policy()
    found = collector.collect(tickets()[:2], asked, Sampling(temperature=2.0, greedy=True))
    assert set(asked.samplings) == {Sampling(temperature=2.0, greedy=True)}
    assert found[0].episode is not None
    assert found[0].episode.extras["log_prob"].max() <= -2.0


# --- what goes wrong ---


def test_crashes_hangs_and_delays_change_nothing(tmp_path: Path, wanted: list[Rollout]) -> None:
    world = faulty(place=str(tmp_path), share=0.4, slow_s=0.004)
    with Collector(world, num_parallel_envs=3, limits=QUICK, max_attempts=20) as other:
        found = other.collect(tickets(), policy(), Sampling())
        assert other.num_failures >= len(list(tmp_path.iterdir())) > 4  # a busy machine may be taken for a hang
    assert same(found, wanted)
    assert sum(rollout.attempts - 1 for rollout in found) >= len(list(tmp_path.iterdir()))


def test_workers_killed_from_outside_change_nothing(wanted: list[Rollout]) -> None:
    rng = np.random.default_rng(0)

    def kill(rollout: Rollout) -> None:
        if rollout.ticket.number % 3 == 0 and collector.pids:  # type: ignore[attr-defined]
            with suppress(ProcessLookupError):
                os.kill(rng.choice(collector.pids), signal.SIGKILL)  # type: ignore[attr-defined]

    with Collector(WORLD, num_parallel_envs=2, max_attempts=50) as collector:
        assert same(collector.collect(tickets(), policy(), Sampling(), on_result=kill), wanted)
        assert collector.num_failures > 2


@pytest.mark.parametrize(("max_attempts", "times"), [(1, 1), (3, 3)])
def test_a_ticket_that_always_fails_is_an_outcome(
    tmp_path: Path, max_attempts: int, times: int, wanted: list[Rollout]
) -> None:
    world = faulty(place=str(tmp_path), share=0.3, times=times, faults="kill")
    some = tickets()[:12]
    with Collector(world, num_parallel_envs=2, max_attempts=max_attempts) as other:
        found = other.collect(some, policy(), Sampling())
    lost = [rollout for rollout in found if rollout.failed]
    assert 1 < len(lost) < len(found)
    assert len(list(tmp_path.iterdir())) == len(lost) * times
    for rollout in lost:
        assert rollout.attempts == max_attempts
        assert rollout.failure is not None
        assert "the process was killed by SIGKILL" in rollout.failure
        assert (rollout.success, rollout.num_rows, rollout.num_steps, rollout.total_reward) == (False, 0, 0, 0.0)
    assert [rollout.ticket for rollout in found] == list(some)
    kept = [rollout.ticket.number for rollout in found if not rollout.failed]
    assert same([found[number] for number in kept], [wanted[number] for number in kept])


def test_one_more_attempt_would_have_saved_it(tmp_path: Path, wanted: list[Rollout]) -> None:
    world = faulty(place=str(tmp_path), share=0.3, times=2, faults="exit")
    with Collector(world, num_parallel_envs=2, max_attempts=3) as other:
        found = other.collect(tickets()[:8], policy(), Sampling())
    assert same(found, wanted[:8])
    assert {rollout.attempts for rollout in found} == {1, 3}


@pytest.mark.parametrize("batch_wait_s", [0.0, 0.02])
def test_nobody_waits_for_the_slowest(batch_wait_s: float, tmp_path: Path) -> None:
    """One episode goes on only when all others are over."""
    over: list[int] = []

    def go_on(rollout: Rollout) -> None:
        over.append(rollout.ticket.number)
        if len(over) == 7:
            (tmp_path / "go").touch()

    world = faulty(place=str(tmp_path), share=1.0, faults="wait")
    with Collector(world, num_parallel_envs=2, batch_wait_s=batch_wait_s) as other:
        found = other.collect(make_tickets(2, "press_button", group_by="task"), Scripted(), Sampling(), on_result=go_on)
    assert over[-1] == 0
    assert sorted(over) == list(range(8))
    assert all(rollout.success for rollout in found)


def test_the_policy_waits_for_all_observations_that_may_come_in_time(wanted: list[Rollout]) -> None:
    """Three workers that take different times step together: a call for each block of the longest episode."""
    world = faulty(slow_s=0.01)
    with Collector(world, num_parallel_envs=3, batch_wait_s=60.0) as other:
        asked = policy()
        found = other.collect(tickets()[:3], asked, Sampling())
    assert same(found, wanted[:3])
    lengths = [len(rollout.episode) for rollout in found if rollout.episode is not None]
    assert asked.num_rows == [sum(length > block for length in lengths) for block in range(max(lengths))]


def test_a_world_that_cannot_be_built_is_said_at_once() -> None:
    before = children()
    with pytest.raises(WorkerFailure, match="start raised RuntimeError: no such joint"):
        Collector(source(at_start="raise"), num_parallel_envs=2)
    assert children() == before


# --- options ---


def test_episodes_can_be_ended_early(wanted: list[Rollout]) -> None:
    with Collector(WORLD, num_parallel_envs=2, max_steps=7) as other:
        found = other.collect(tickets()[:8], policy(has_value=True), Sampling())
    assert {rollout.num_steps for rollout in found} == {7}
    for rollout, longer in zip(found, wanted, strict=False):
        assert rollout.episode is not None
        assert longer.episode is not None
        assert rollout.truncated
        assert not rollout.success
        assert rollout.episode.extras["executed"].tolist() == [[True] * 5, [True] * 2 + [False] * 3]
        tokens = rollout.episode.extras["replay"]["tokens"]
        assert np.array_equal(tokens, longer.episode.extras["replay"]["tokens"][:2])


class Loud(Scripted):
    """Wants more than it may, in the third step of each block."""

    def act(self, *arguments: Any, **named: Any) -> Acted:
        acted = super().act(*arguments, **named)
        acted.action[:, 2, 0] = 1.5
        return acted


def test_actions_out_of_bounds_raise_or_are_clipped(collector: Collector) -> None:
    some = tickets()[:2]
    with pytest.raises(PolicyError, match=r"policy/action\[2, 0\]: expected a value from -1 to 1, got 1.5; clip it"):
        collector.collect(some, Loud(), Sampling())
    with Collector(WORLD, num_parallel_envs=1, clip_actions=True, max_steps=7) as other:
        rollouts = other.collect(some, Loud(), Sampling())
        quiet = other.collect(some, Scripted(), Sampling())
    for rollout in rollouts:
        assert rollout.episode is not None
        assert (rollout.episode.action[:, 2, 0] == 1.0).all()
        assert rollout.num_clipped == 1  # the one in the second block was not executed
        assert rollout.episode.info.labels["clipped_steps"] == "1"
    assert [rollout.num_clipped for rollout in quiet] == [0, 0]


def test_a_worker_takes_what_it_has_loaded() -> None:
    assert choose(["a", "b", "c"], loaded=["c", "b"], others=["a"]) == 1
    assert choose(["a", "b", "a"], loaded=[], others=["a"]) == 1
    assert choose(["a", "a"], loaded=["z"], others=["a"]) == 0


@pytest.mark.parametrize(("task_affinity", "num_loads"), [(0, 30), (1, 9), (5, 5)])
def test_affinity_loads_fewer_tasks(task_affinity: int, num_loads: int) -> None:
    """One worker, five tasks in turn, twice: each is loaded for each episode; each time but for the last; or once."""
    names = ["pick_red", "pick_blue", "push_blue", "press_button", "touch_purple"]
    plan_of_many = make_tickets(15, *names, n_samples=1, data_batch_size=15)
    with Collector(WORLD, num_parallel_envs=1, task_affinity=task_affinity) as other:
        found = other.collect(plan_of_many, policy(), Sampling())
        other.collect(plan_of_many, policy(), Sampling())
        assert other.num_loads == num_loads
    assert [rollout.ticket for rollout in found] == list(plan_of_many)


def test_what_was_cut_off_is_judged_and_nothing_is_drawn(collector: Collector, wanted: list[Rollout]) -> None:
    asked = policy(has_value=True)
    found = collector.collect(tickets(), asked, Sampling(temperature=2.0))
    assert {rollout.truncated for rollout in found} == {True, False}
    assert set(asked.samplings) == {Sampling(temperature=2.0), Sampling(temperature=2.0, greedy=True)}
    for rollout, before in zip(found, wanted, strict=True):
        episode = rollout.episode
        assert episode is not None
        assert before.episode is not None
        assert np.array_equal(episode.extras["value"], episode.observation["state"][:-1, 2])
        assert not episode.extras["next_value"][:-1].any()
        last = episode.observation["state"][-1, 2] if rollout.truncated else 0.0
        assert episode.extras["next_value"][-1] == last
        assert np.array_equal(episode.extras["replay"]["tokens"], before.episode.extras["replay"]["tokens"])


# --- what a policy may not answer ---


class Bad(Scripted):
    def __init__(self, **changes: Any):
        super().__init__()
        self.changes = changes

    def act(self, *arguments: Any, **named: Any) -> Acted:
        return replace(super().act(*arguments, **named), **{name: made(self) for name, made in self.changes.items()})


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("action", np.zeros((1, 5, 3), np.float32), r"policy/action: expected float32 \[5, 4\], got float32 \[5, 3\]"),
        ("action", np.zeros((1, 5, 4)), r"policy/action: expected float32 \[5, 4\], got float64 \[5, 4\]"),
        (
            "action",
            np.zeros((3, 5, 4), np.float32),
            r"policy/action: expected 1 rows, one for each observation, got float",
        ),
        ("action", np.full((1, 5, 4), np.nan, np.float32), r"policy/action\[0, 0\]: expected a value from -1 to 1"),
        ("log_prob", np.full((1, 5, 4), np.nan, np.float32), "policy/log_prob: expected finite numbers, got nan"),
        ("log_prob", np.full((1, 5, 4), -np.inf, np.float32), "policy/log_prob: expected finite numbers, got -inf"),
        ("log_prob", np.zeros((1, 5), np.float32), r"policy/log_prob: expected float32 \[5, 4\], got float32 \[5\]"),
        ("replay", {}, r"policy/replay/tokens: expected int32 \[5, 4\], got nothing"),
        ("value", np.zeros(1, np.float32), r"policy/value: expected None, got float32 \[1\]; has_value says"),
    ],
)
def test_a_bad_answer_raises_at_once(
    collector: Collector, wanted: list[Rollout], name: str, value: Any, message: str
) -> None:
    with pytest.raises(PolicyError, match=message):
        collector.collect(tickets()[:1], Bad(**{name: lambda _: value}), Sampling())
    assert same(collector.collect(tickets()[:3], policy(), Sampling()), wanted[:3])  # and it goes on as before


def test_a_missing_value_raises_at_once(collector: Collector) -> None:
    bad = Bad(value=lambda _: None)
    bad.has_value = True
    with pytest.raises(PolicyError, match="policy/value: expected a value for each row, got None"):
        collector.collect(tickets()[:1], bad, Sampling())


def test_a_stream_that_nobody_hears_out_leaves_nothing_behind(collector: Collector, wanted: list[Rollout]) -> None:
    stream = collector.stream(tickets(), policy(), Sampling())
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert same(collector.collect(tickets()[:6], policy(), Sampling()), wanted[:6])


def test_tickets_of_another_world_are_refused_before_any_is_lived(collector: Collector) -> None:
    with pytest.raises(SuiteError, match="has no task 'pick_read'; did you mean 'pick_red'"):
        collector.collect([replace(tickets()[0], task="pick_read")], policy(), Sampling())
    with pytest.raises(SuiteError, match="has the starts 0 to 499, got int 500"):
        collector.collect([replace(tickets()[0], start=500)], policy(), Sampling())
    with pytest.raises(ConfigError, match="tickets: expected different numbers"):
        collector.collect(tickets()[:1] * 2, policy(), Sampling())


def test_blocks_that_are_too_long_are_refused() -> None:
    with (
        Collector(WORLD, num_parallel_envs=1, limits=Limits(block_steps=4)) as other,
        pytest.raises(WorldError, match="actions: expected 1 to 4, got 5"),
    ):
        other.collect(tickets()[:1], policy(), Sampling())


def test_the_tasks_are_those_of_the_name() -> None:
    with Collector("toy:press_button?cameras=false", num_parallel_envs=1) as other:
        assert [task.name for task in other.tasks] == ["press_button"]
        assert len(other.suite.tasks) == 10
        assert "numpy" in other.versions


@pytest.mark.parametrize(
    "options",
    [
        {"num_parallel_envs": 0},
        {"max_attempts": 0},
        {"max_steps": 0},
        {"max_act_rows": 0},
        {"task_affinity": -1},
        {"batch_wait_s": -1},
    ],
)
def test_nonsense_is_refused(options: dict[str, int]) -> None:
    (name, value) = next(iter(options.items()))
    with pytest.raises(ConfigError, match=f"{name}: expected {value + 1} or more, got {value}"):
        Collector(WORLD, **{"num_parallel_envs": 1, **options})  # type: ignore[arg-type]

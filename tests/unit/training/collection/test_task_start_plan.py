"""The plan: rings over tasks and starts, and tickets that nothing but its state decides."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from tests.unit.training.collection.scripted import make_plan

from understudy.training.collection.task_start_plan import Plan, PlanConfig, PlannedTask, Ticket
from understudy.training.runs.config import ConfigError

SMALL = {"n_samples": 2, "data_batch_size": 8}  # four groups


def starts_of(tickets: tuple[Ticket, ...]) -> list[int]:
    """The first start of each group."""
    return [ticket.start for ticket in tickets if ticket.slot == 0]


def tasks_of(tickets: tuple[Ticket, ...]) -> str:
    """The task of each group; they have names of one letter."""
    return "".join(ticket.task for ticket in tickets if ticket.slot == 0)


def iterations(plan: Plan, count: int, num_groups: int) -> list[tuple[Ticket, ...]]:
    found = []
    for _ in range(count):
        plan.next_iteration()
        found.append(plan.wave(num_groups))
    return found


def test_a_ring_of_starts_moves_by_what_was_used() -> None:
    plan = make_plan("a", starts=10, tasks_per_iteration=1, **SMALL)
    assert [starts_of(wave) for wave in iterations(plan, 3, 4)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 0, 1]]
    assert starts_of(plan.wave(2)) == [2, 3]  # a second wave goes on where the first ended


def test_starts_are_used_in_the_order_they_are_given_in() -> None:
    plan = Plan(PlanConfig(**SMALL), [PlannedTask(name="a", starts=(7, 3, 5))])
    assert [starts_of(wave) for wave in iterations(plan, 2, 4)] == [[7, 3, 5, 7], [3, 5, 7, 3]]


@pytest.mark.parametrize(
    ("tasks_per_iteration", "wanted"),
    [
        (1, ["aaaa", "bbbb", "cccc"]),
        (2, ["abab", "cdcd", "eaea"]),
        (3, ["abca", "dead", "bcdb"]),
        (None, ["abcd", "eabc", "deab"]),
        (9, ["abcd", "eabc", "deab"]),
    ],
)
def test_a_cursor_goes_round_the_tasks(tasks_per_iteration: int | None, wanted: list[str]) -> None:
    plan = make_plan(*"abcde", tasks_per_iteration=tasks_per_iteration, **SMALL)
    assert [tasks_of(wave) for wave in iterations(plan, 3, 4)] == wanted


def test_later_waves_are_dealt_to_the_same_tasks_in_turn() -> None:
    plan = make_plan(*"abcde", tasks_per_iteration=3, **SMALL)
    plan.next_iteration()
    assert [tasks_of(plan.wave(size)) for size in (4, 1, 3)] == ["abca", "b", "cab"]
    plan.next_iteration()
    assert tasks_of(plan.wave(4)) == "dead"


def test_no_task_is_passed_over_because_few_groups_were_missing() -> None:
    plan = make_plan(*"abcde", **SMALL)
    assert [tasks_of(wave) for size in (1, 2, 4) for wave in iterations(plan, 1, size)] == ["a", "bc", "deab"]
    plan.next_iteration()  # one that needs no wave
    plan.next_iteration()
    assert tasks_of(plan.wave(1)) == "c"


def test_a_group_shares_its_start_or_its_task() -> None:
    by_start = make_plan("a", group_by="start", **SMALL)
    by_start.next_iteration()
    first, second = (by_start.wave(1) for _ in range(2))
    assert [ticket.start for ticket in first + second] == [0, 0, 1, 1]
    assert len({ticket.world_seed for ticket in first}) == 1
    assert len({ticket.world_seed for ticket in first + second}) == 2
    by_task = make_plan("a", starts=3, group_by="task", **SMALL)
    by_task.next_iteration()
    tickets = by_task.wave(3)
    assert [ticket.start for ticket in tickets] == [0, 1, 2, 0, 1, 2]
    assert [ticket.world_seed for ticket in tickets] == [ticket.seed for ticket in tickets]
    for found in (first + second, tickets):
        assert len({ticket.seed for ticket in found}) == len(found)
        assert [ticket.number for ticket in found] == list(range(len(found)))
        assert [ticket.group for ticket in found] == [number // 2 for number in range(len(found))]
        assert [ticket.slot for ticket in found] == [number % 2 for number in range(len(found))]


def test_seeds_come_from_the_plans_seed_and_the_tickets_number() -> None:
    one, other = make_plan("a", "b", **SMALL), make_plan("c", seed=0, n_samples=4, data_batch_size=4)
    seeds = [[ticket.seed for ticket in iterations(plan, 1, 2)[0]] for plan in (one, other)]
    assert seeds[0] == seeds[1][:4]
    changed = [ticket.seed for ticket in iterations(make_plan("a", seed=1, **SMALL), 1, 2)[0]]
    assert not set(changed) & set(seeds[0])
    assert seeds[0][0] == 7896617691693857887  # the same for ever


def test_solved_starts_are_passed_over_for_a_while() -> None:
    plan = make_plan("a", starts=4, tasks_per_iteration=1, skip_solved_for=2, **SMALL)
    plan.next_iteration()
    assert starts_of(plan.wave(4)) == [0, 1, 2, 3]
    plan.solved("a", [1, 2])
    assert [starts_of(wave) for wave in iterations(plan, 2, 4)] == [[0, 3, 0, 3], [0, 3, 0, 3]]
    assert starts_of(iterations(plan, 1, 4)[0]) == [0, 1, 2, 3]
    plan.solved("a", [0, 1, 2, 3])  # all: then it is as if none were
    assert starts_of(iterations(plan, 1, 4)[0]) == [0, 1, 2, 3]
    ignorant = make_plan("a", starts=4, **SMALL)
    ignorant.next_iteration()
    ignorant.solved("a", [0, 1])
    assert starts_of(ignorant.wave(2)) == [0, 1]


def test_a_group_of_one_task_has_different_starts_also_if_most_are_solved() -> None:
    plan = make_plan("a", starts=4, group_by="task", skip_solved_for=1, n_samples=3, data_batch_size=3)
    plan.next_iteration()
    plan.solved("a", [0, 1, 2])
    assert [ticket.start for ticket in plan.wave(1)] == [3, 0, 1]


@pytest.mark.parametrize("num_waves", range(5))
def test_a_restored_plan_goes_on_with_the_same_tickets(num_waves: int) -> None:
    options: dict[str, Any] = {"tasks_per_iteration": 2, "skip_solved_for": 3, **SMALL}
    plan = make_plan(*"abc", starts=5, **options)
    plan.next_iteration()
    for number in range(num_waves):
        plan.wave(3)
        plan.solved("b", [number])
        if number % 2:
            plan.next_iteration()
    saved = json.loads(json.dumps(plan.state()))
    other = make_plan(*"abc", starts=5, **options)
    other.restore(saved)
    assert other.state() == plan.state()
    assert other.wave(4) == plan.wave(4)
    assert iterations(other, 6, 3) == iterations(plan, 6, 3)


def test_a_state_of_another_plan_is_refused_and_changes_nothing() -> None:
    plan = make_plan("a", "b", **SMALL)
    before = plan.state()
    for other, message in (
        (make_plan("a", "b", n_samples=4, data_batch_size=8), "plan/n_samples: the state was saved with 4, this plan"),
        (make_plan("b", "a", **SMALL), r"plan/tasks: the state was saved with \['b', 'a'\]"),
        (make_plan("a", "b", starts=3, **SMALL), "or with other starts; resume with the same world and tasks"),
    ):
        other.next_iteration()
        with pytest.raises(ConfigError, match=message):
            plan.restore(other.state())
    with pytest.raises(ConfigError, match="plan/rings: expected it in the saved state, got nothing"):
        plan.restore({name: value for name, value in before.items() if name != "rings"})
    assert plan.state() == before


def test_nonsense_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"expected a multiple of n_samples \(8\).*got 30; choose 24"):
        PlanConfig(data_batch_size=30)
    with pytest.raises(ConfigError, match="n_samples: expected a whole number from 1, got 0"):
        PlanConfig(n_samples=0)
    with pytest.raises(ConfigError, match="tasks_per_iteration: expected 1 or more, or None, got 0"):
        PlanConfig(tasks_per_iteration=0)
    with pytest.raises(ConfigError, match="group_by: expected 'start' or 'task', got 'seed'"):
        replace(PlanConfig(), group_by="seed")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"tasks: expected different names, at least one, got \[\]"):
        Plan(PlanConfig(), [])
    with pytest.raises(ConfigError, match="starts: expected different ones"):
        PlannedTask(name="a", starts=(1, 1))
    with pytest.raises(ConfigError, match="has 3 starts, and group_by='task' compares 8 different ones"):
        make_plan("a", starts=3, group_by="task")
    with pytest.raises(ConfigError, match="wave: expected a number from 1 within an iteration, got 4"):
        make_plan("a").wave(4)

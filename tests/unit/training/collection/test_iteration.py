"""Iterations: exactly the batch that was asked for, or a report; surplus is kept; it all goes on after a restart."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file
from tests.unit.training.collection.faulty_worlds import faulty
from tests.unit.training.collection.made import by_half, by_rule, failed_rollout, make_rollout
from tests.unit.training.collection.scripted import Scripted, make_plan

from understudy.core import EpisodeError
from understudy.envs import Limits
from understudy.policies import Sampling
from understudy.training.collection.collector import Collector
from understudy.training.collection.group_filter import FilterConfig
from understudy.training.collection.groups import Group
from understudy.training.collection.iteration import CollectedIteration, collect_iteration
from understudy.training.collection.rollout import Rollout
from understudy.training.collection.serialization import (
    deserialize_rollouts,
    restore_collection,
    save_collection,
    serialize_rollouts,
)
from understudy.training.collection.shared_tickets import share
from understudy.training.collection.task_start_plan import Plan, Ticket

FILTERS = FilterConfig()


def good_in_turn(ticket: Ticket) -> bool:
    """Two groups of three are good, the third too hard."""
    return ticket.group % 3 != 2 and by_half(ticket)


def same(one: CollectedIteration, other: CollectedIteration) -> bool:
    mine, theirs = ([r for c in (x.groups, x.carried) for g in c for r in g.rollouts] for x in (one, other))
    return (
        len(mine) == len(theirs)
        and all(a.equals(b) for a, b in zip(mine, theirs, strict=True))
        and one.report == other.report
    )


def numbers(groups: tuple[Group, ...]) -> list[int]:
    return [group.number for group in groups]


@pytest.mark.parametrize("num_tasks", range(1, 10))
@pytest.mark.parametrize("world_size", range(1, 5))
def test_any_number_of_tasks_and_processes_gives_the_same_whole_batch(num_tasks: int, world_size: int) -> None:
    def run(shared: bool) -> list[CollectedIteration]:
        plan = make_plan(*"abcdefghi"[:num_tasks], n_samples=2, data_batch_size=10)
        carried: tuple[Group, ...] = ()
        found = []

        def live(tickets: tuple[Ticket, ...]) -> list[Rollout]:
            parts = [share(tickets, rank, world_size) for rank in range(world_size if shared else 1)]
            if not shared:
                parts = [list(tickets)]
            lived = [rollout for part in parts for rollout in by_rule(good_in_turn)(part)]
            return sorted(lived, key=lambda rollout: rollout.ticket.number)

        for _ in range(4):
            found.append(collect_iteration(plan, live, FILTERS, carried))  # type: ignore[arg-type]
            carried = found[-1].carried
        return found

    for one, other in zip(run(shared=False), run(shared=True), strict=True):
        assert same(one, other)
        assert not one.short
        assert len(one.rollouts) == 10
        tickets = [rollout.ticket for rollout in one.rollouts]
        assert [ticket.slot for ticket in tickets] == [0, 1] * 5
        assert len({ticket.group for ticket in tickets}) == 5


def test_a_wave_asks_for_what_is_missing() -> None:
    seen: list[tuple[Ticket, ...]] = []
    plan = make_plan("a", "b", n_samples=4, data_batch_size=24)
    found = collect_iteration(plan, by_rule(good_in_turn, seen), FILTERS)
    assert [len(tickets) // 4 for tickets in seen] == [6, 2]
    assert numbers(found.groups) == [0, 1, 3, 4, 6, 7]
    assert (found.report.num_waves, found.report.num_kept, found.report.rejected) == (2, 6, {"too hard": 2})
    assert found.carried == ()
    assert [rollout.ticket.number for rollout in found.all_rollouts] == list(range(32))


def test_surplus_is_carried_over_and_used_first() -> None:
    seen: list[tuple[Ticket, ...]] = []
    plan = make_plan("a", "b", n_samples=4, data_batch_size=24, wave_groups=5)
    first = collect_iteration(plan, by_rule(good_in_turn, seen), FILTERS)
    assert [len(tickets) // 4 for tickets in seen] == [6, 5]  # two were missing, and a wave has five at least
    assert numbers(first.groups) == [0, 1, 3, 4, 6, 7]
    assert numbers(first.carried) == [9, 10]
    assert sum(task.carried for task in first.report.tasks.values()) == 2
    second = collect_iteration(plan, by_rule(good_in_turn, seen), FILTERS, first.carried)
    assert numbers(second.groups)[:2] == [9, 10]
    assert second.groups[0].rollouts[0] is first.carried[0].rollouts[0]  # as it was lived, versions and log-probs too
    assert len(seen[2]) // 4 == 5
    assert not second.short


@pytest.mark.parametrize("max_age", [0, 1, 2])
def test_what_is_carried_over_grows_old(max_age: int) -> None:
    """A first wave of nine groups and batches of two: what is not used in time is rejected, and the report says so."""
    plan = make_plan("a", n_samples=2, data_batch_size=4, wave_groups=9)
    filters = FilterConfig(max_age=max_age)
    found = collect_iteration(plan, by_rule(by_half), filters)
    assert found.report.rejected == ({"too old": 7} if max_age == 0 else {})
    seen: list[tuple[Ticket, ...]] = []
    for iteration in range(1, max_age + 2):
        found = collect_iteration(plan, by_rule(by_half, seen), filters, found.carried)
        assert bool(seen) == (iteration > max_age)  # only then a wave was needed
        if iteration == max_age:
            assert found.report.rejected == {"too old": 7 - 2 * max_age}
            assert found.carried == ()


def test_a_group_that_grew_too_old_elsewhere_is_rejected_too() -> None:
    plan = make_plan("a", n_samples=2, data_batch_size=4, wave_groups=5)
    first = collect_iteration(plan, by_rule(by_half), FilterConfig(max_age=9))
    assert len(first.carried) == 3
    for _ in range(2):
        plan.next_iteration()
    found = collect_iteration(plan, by_rule(by_half), FilterConfig(max_age=2), first.carried)
    assert found.report.rejected == {"too old": 3}
    assert not set(numbers(found.groups)) & set(numbers(first.carried))


@pytest.mark.parametrize(("succeeds", "reason"), [(False, "too hard"), (True, "too easy")])
@pytest.mark.parametrize("max_waves", [1, 4])
def test_a_policy_that_is_always_wrong_or_always_right_ends_in_a_report(
    succeeds: bool, reason: str, max_waves: int
) -> None:
    seen: list[tuple[Ticket, ...]] = []
    plan = make_plan("a", "b", n_samples=4, data_batch_size=16, max_waves=max_waves)
    found = collect_iteration(plan, by_rule(lambda _: succeeds, seen), FILTERS)
    assert len(seen) == max_waves
    assert found.short
    assert found.rollouts == []
    assert found.report.rejected == {reason: 4 * max_waves}
    assert str(found.report) == (
        f"iteration 0: 0 of 4 groups after {max_waves} wave{'s' * (max_waves > 1)}, 0 carried over, "
        f"rejected: {4 * max_waves} {reason}; "
        f"{16 * max_waves if succeeds else 0} of {16 * max_waves} episodes succeeded"
    )
    said = json.loads(json.dumps(found.report.to_json()))
    assert said["tasks"]["a"]["rejected"] == {reason: 2 * max_waves}
    assert said["tasks"]["b"]["episodes"] == 8 * max_waves


@pytest.mark.parametrize("good", [0.0, 1.0])
def test_so_do_real_policies(good: float) -> None:
    plan = make_plan("press_button", "touch_purple", n_samples=2, data_batch_size=4, max_waves=2)
    policy = Scripted(good=good)
    with Collector("toy?cameras=false", num_parallel_envs=2, max_steps=10 if good == 0.0 else None) as collector:
        found = collect_iteration(plan, lambda tickets: collector.collect(tickets, policy, Sampling()), FILTERS)
    assert found.short
    assert found.report.rejected == {"too easy" if good else "too hard": 4}


def test_a_short_batch_has_what_there_was() -> None:
    plan = make_plan("a", "b", n_samples=4, data_batch_size=16, max_waves=2)
    found = collect_iteration(plan, by_rule(lambda t: t.task == "a" and by_half(t)), FILTERS)
    assert found.short
    assert {rollout.ticket.task for rollout in found.rollouts} == {"a"}
    assert len(found.rollouts) == 12
    assert (found.report.tasks["a"].kept, found.report.tasks["b"].rejected) == (3, {"too hard": 3})


def test_failed_workers_are_reported_and_their_groups_asked_for_again() -> None:
    def live(tickets: tuple[Ticket, ...]) -> list[Rollout]:
        return [failed_rollout(t) if t.number == 1 else make_rollout(t, by_half(t)) for t in tickets]

    plan = make_plan("a", n_samples=4, data_batch_size=8)
    found = collect_iteration(plan, live, FILTERS)  # type: ignore[arg-type]
    assert not found.short
    assert numbers(found.groups) == [1, 2]
    assert found.report.rejected == {"failed workers": 1}
    assert found.report.failures == ("toy[0]: the process was killed by SIGKILL",)
    assert found.report.tasks["a"].failures == 1
    kept = collect_iteration(
        make_plan("a", n_samples=4, data_batch_size=8),
        live,
        FilterConfig(filter_failed=False),  # type: ignore[arg-type]
    )
    assert numbers(kept.groups) == [0, 1]
    assert kept.rollouts[1].failed


def test_solved_starts_are_not_asked_for_again() -> None:
    def starts(skip_solved_for: int) -> list[list[int]]:
        seen: list[tuple[Ticket, ...]] = []
        plan = make_plan(
            "a", starts=4, n_samples=2, data_batch_size=4, max_waves=1, wave_groups=4, skip_solved_for=skip_solved_for
        )
        for _ in range(3):
            collect_iteration(plan, by_rule(lambda t: t.start < 2 or by_half(t), seen), FilterConfig(max_age=0))
        return [[ticket.start for ticket in tickets if ticket.slot == 0] for tickets in seen]

    assert starts(0) == [[0, 1, 2, 3]] * 3
    assert starts(1) == [[0, 1, 2, 3], [2, 3, 2, 3], [0, 1, 2, 3]]
    assert starts(5) == [[0, 1, 2, 3], [2, 3, 2, 3], [2, 3, 2, 3]]


def test_a_collect_that_forgets_some_is_refused() -> None:
    plan = make_plan("a", n_samples=4, data_batch_size=8)
    with pytest.raises(EpisodeError, match="expected the rollouts of 8 tickets in their order, got 7; return one for"):
        collect_iteration(plan, lambda tickets: by_rule(by_half)(tickets[1:]), FILTERS)
    with pytest.raises(EpisodeError, match="expected the rollouts of 8 tickets in their order, got 8"):
        collect_iteration(plan, lambda tickets: by_rule(by_half)(tickets[::-1]), FILTERS)


def test_it_goes_on_after_a_restart_with_the_same_batches(tmp_path: Path) -> None:
    def new_plan() -> Plan:
        return make_plan(*"abc", n_samples=4, data_batch_size=24, wave_groups=10, skip_solved_for=2)

    plan = new_plan()
    found = collect_iteration(plan, by_rule(good_in_turn), FILTERS)
    assert found.carried
    collected = found.all_rollouts[:3]
    facts, arrays = save_collection(plan.state(), found.carried, collected)
    save_file(arrays, tmp_path / "arrays.safetensors")
    text = json.dumps(facts)
    wanted = []
    for _ in range(3):
        found = collect_iteration(plan, by_rule(good_in_turn), FILTERS, found.carried)
        wanted.append(found)
    other = new_plan()
    carried, again = restore_collection(other, json.loads(text), load_file(tmp_path / "arrays.safetensors"))
    assert [one.equals(other) for one, other in zip(collected, again, strict=True)] == [True] * 3
    for before in wanted:
        after = collect_iteration(other, by_rule(good_in_turn), FILTERS, carried)
        assert same(before, after)
        carried = after.carried


def test_rollouts_are_packed_bit_for_bit() -> None:
    tickets = make_plan("a", n_samples=4, data_batch_size=12)
    tickets.next_iteration()
    rollouts = [failed_rollout(t) if t.slot == 2 else make_rollout(t, by_half(t)) for t in tickets.wave(3)]
    facts, arrays = serialize_rollouts(rollouts)
    back = deserialize_rollouts(json.loads(json.dumps(facts)), arrays)
    assert len(back) == 12
    for one, other in zip(rollouts, back, strict=True):
        assert one.equals(other)
        assert (one.failure, one.attempts) == (other.failure, other.attempts)
    assert deserialize_rollouts(*serialize_rollouts([])) == []


def test_a_plan_with_real_workers_that_fail_comes_to_the_same_batches(tmp_path: Path) -> None:
    policy = Scripted(noise=0.3, good=0.45)

    def run(share: float, num_parallel_envs: int, place: Path) -> list[CollectedIteration]:
        place.mkdir()
        plan = make_plan("pick_red", "press_button", "touch_purple", n_samples=4, data_batch_size=12, wave_groups=4)
        world = faulty(place=str(place), share=share, slow_s=0.002 * share)
        found: list[CollectedIteration] = []
        limits = Limits(step_s=0.3, stack_s=0.3) if share else Limits()  # a calm one may be slow
        with Collector(world, num_parallel_envs=num_parallel_envs, limits=limits, max_attempts=20) as collector:
            for _ in range(2):
                carried = found[-1].carried if found else ()
                found.append(
                    collect_iteration(plan, lambda t: collector.collect(t, policy, Sampling()), FILTERS, carried)
                )
            assert (collector.num_failures > 0) == (share > 0)
        return found

    calm, wild = run(0.0, 1, tmp_path / "calm"), run(0.5, 3, tmp_path / "wild")
    assert any(found.report.rejected for found in calm)
    for one, other in zip(calm, wild, strict=True):
        assert same(one, other)
        assert len(one.rollouts) == 12

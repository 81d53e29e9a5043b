"""Groups: each filter drops what it says, and nothing when it is off."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.unit.training.collection.made import failed_rollout, make_rollout
from tests.unit.training.collection.scripted import make_tickets

from understudy.core import EpisodeError
from understudy.training.collection.group_filter import FilterConfig, rejection_reason
from understudy.training.collection.groups import Group, group_rollouts
from understudy.training.collection.rollout import Rollout
from understudy.training.runs.config import ConfigError

TICKETS = make_tickets(1, "a", n_samples=10)
OPEN = FilterConfig(filter_accuracy=False, filter_failed=False)


def group(successes: int, **changes: Rollout) -> Group:
    rollouts = [make_rollout(ticket, ticket.slot < successes) for ticket in TICKETS]
    for name, rollout in changes.items():
        rollouts[int(name[1:])] = rollout
    return Group(rollouts=tuple(rollouts))


@pytest.mark.parametrize(
    ("successes", "options", "wanted"),
    [
        (0, {}, "too hard"),
        (1, {}, None),
        (5, {}, None),
        (9, {}, None),
        (10, {}, "too easy"),
        (2, {"accuracy_lower_bound": 0.3}, "too hard"),
        (3, {"accuracy_lower_bound": 0.3}, None),
        (9, {"accuracy_upper_bound": 0.8}, "too easy"),
        (8, {"accuracy_upper_bound": 0.8}, None),
        (0, {"filter_accuracy": False}, None),
        (10, {"filter_accuracy": False}, None),
    ],
)
def test_groups_that_teach_nothing_are_dropped(successes: int, options: dict[str, Any], wanted: str | None) -> None:
    assert rejection_reason(group(successes), FilterConfig(**options)) == wanted


def test_groups_with_a_ticket_that_failed_are_dropped() -> None:
    some = group(5, _9=failed_rollout(TICKETS[9]))
    assert rejection_reason(some, FilterConfig()) == "failed workers"
    assert rejection_reason(some, FilterConfig(filter_failed=False)) is None
    lost = Group(rollouts=tuple(failed_rollout(ticket) for ticket in TICKETS))
    assert (
        rejection_reason(lost, FilterConfig(filter_failed=False)) == "too hard"
    )  # it counts as an episode without success
    assert lost.num_successes == 0


def test_groups_that_were_cut_off_all_are_dropped() -> None:
    cut = [make_rollout(ticket, ticket.slot < 5, truncated=True) for ticket in TICKETS]
    strict = replace(OPEN, filter_truncated=True)
    assert rejection_reason(Group(rollouts=tuple(cut)), strict) == "truncated"
    assert rejection_reason(Group(rollouts=(*cut[:9], make_rollout(TICKETS[9], success=False))), strict) is None
    assert rejection_reason(Group(rollouts=(*cut[:9], failed_rollout(TICKETS[9]))), strict) is None
    assert rejection_reason(Group(rollouts=tuple(cut)), OPEN) is None


def test_groups_with_clipped_actions_are_dropped() -> None:
    some = group(5, _3=make_rollout(TICKETS[3], success=True, clipped=2))
    assert rejection_reason(some, replace(OPEN, filter_format=True)) == "out of bounds"
    assert rejection_reason(some, OPEN) is None
    assert rejection_reason(group(5), replace(OPEN, filter_format=True)) is None


def test_a_group_is_whole_or_refused() -> None:
    tickets = make_tickets(3, "a", "b", n_samples=2)
    rollouts = [make_rollout(ticket, success=True) for ticket in tickets]
    found = group_rollouts(rollouts, 2)
    assert [(one.number, one.task, one.starts, one.solved) for one in found] == [
        (0, "a", (0,), True),
        (1, "b", (0,), True),
        (2, "a", (1,), True),
    ]
    with pytest.raises(
        EpisodeError, match=r"group 2: expected all 2 rollouts in the order of their tickets, got \[0\]"
    ):
        group_rollouts(rollouts[:5], 2)


def test_nonsense_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"expected 0 to 1, in order, got 0.9, 0.1"):
        FilterConfig(accuracy_lower_bound=0.9, accuracy_upper_bound=0.1)
    with pytest.raises(ConfigError, match=r"have no effect without filter_accuracy, got 0\.3, 0\.9; leave them out"):
        FilterConfig(filter_accuracy=False, accuracy_lower_bound=0.3)
    with pytest.raises(ConfigError, match="max_age: expected 0 or more iterations, got -1"):
        FilterConfig(max_age=-1)

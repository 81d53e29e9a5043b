"""Groups: episodes that are compared with each other, and the filters that say which of them teach something."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from understudy.core import EpisodeError
from understudy.training.collection.rollout import Rollout
from understudy.training.runs.config import ConfigError

# Why a group is dropped.
Reason: TypeAlias = Literal["failed workers", "out of bounds", "truncated", "too hard", "too easy", "too old"]


@dataclass(frozen=True, kw_only=True)
class FilterConfig:
    """Which groups are dropped. What is dropped is lived and counted, and others are asked for in its place."""

    filter_accuracy: bool = True  # drop groups that nearly always, or nearly never, succeed
    accuracy_lower_bound: float = 0.1  # share of successes from which a group is kept
    accuracy_upper_bound: float = 0.9  # and up to which
    filter_failed: bool = True  # drop groups with a ticket that failed for good; else it counts as no success
    filter_truncated: bool = False  # drop groups whose episodes were all cut off by the time limit
    filter_format: bool = False  # drop groups with an episode whose actions left their bounds and were clipped
    max_age: int = 2  # iterations for which a surplus group is carried over; 0: not at all

    def __post_init__(self) -> None:
        low, high = self.accuracy_lower_bound, self.accuracy_upper_bound
        if not 0.0 <= low <= high <= 1.0:
            raise ConfigError(
                f"accuracy_lower_bound, accuracy_upper_bound: expected 0 to 1, in order, got {low}, {high}"
            )
        if self.max_age < 0:
            raise ConfigError(f"max_age: expected 0 or more iterations, got {self.max_age}")


@dataclass(frozen=True, kw_only=True, eq=False)
class Group:
    """All K rollouts of a group, in the order of their tickets: it is whole, or it is not there."""

    rollouts: tuple[Rollout, ...]

    @property
    def number(self) -> int:
        return self.rollouts[0].ticket.group

    @property
    def task(self) -> str:
        return self.rollouts[0].ticket.task

    @property
    def iteration(self) -> int:
        """In which it was asked for."""
        return self.rollouts[0].ticket.iteration

    @property
    def starts(self) -> tuple[int, ...]:
        """Different ones."""
        return tuple(dict.fromkeys(rollout.ticket.start for rollout in self.rollouts))

    @property
    def num_successes(self) -> int:
        return sum(rollout.success for rollout in self.rollouts)

    @property
    def solved(self) -> bool:
        return self.num_successes == len(self.rollouts)


def in_groups(rollouts: Sequence[Rollout], n_samples: int) -> list[Group]:
    """The groups of a whole wave, in the order of its tickets."""
    found: dict[int, list[Rollout]] = {}
    for rollout in rollouts:
        found.setdefault(rollout.ticket.group, []).append(rollout)
    for number, some in found.items():
        if [rollout.ticket.slot for rollout in some] != list(range(n_samples)):
            raise EpisodeError(
                f"group {number}: expected all {n_samples} rollouts in the order of their tickets, got "
                f"{[rollout.ticket.slot for rollout in some]}; collect whole waves"
            )
    return [Group(rollouts=tuple(some)) for some in found.values()]


def judge(group: Group, filters: FilterConfig) -> Reason | None:
    """Why a group is dropped, the first reason that holds; None if it is kept."""
    share = group.num_successes / len(group.rollouts)
    if filters.filter_failed and any(rollout.failed for rollout in group.rollouts):
        return "failed workers"
    if filters.filter_format and any(rollout.num_clipped for rollout in group.rollouts):
        return "out of bounds"
    if filters.filter_truncated and all(rollout.truncated for rollout in group.rollouts):
        return "truncated"
    if filters.filter_accuracy and share < filters.accuracy_lower_bound:
        return "too hard"
    if filters.filter_accuracy and share > filters.accuracy_upper_bound:
        return "too easy"
    return None

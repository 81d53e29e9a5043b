"""Group filter: which groups are rejected, and why. A group of one outcome, for example, has nothing to teach."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from understudy.training.collection.groups import Group
from understudy.training.runs.config import ConfigError

# Why a group is rejected.
RejectionReason: TypeAlias = Literal["failed workers", "out of bounds", "truncated", "too hard", "too easy", "too old"]


@dataclass(frozen=True, kw_only=True)
class FilterConfig:
    """Which groups are rejected. Rejected groups are stored and counted, and others are requested instead."""

    filter_accuracy: bool = True
    """Whether groups are rejected whose success rate is outside of the two accuracy bounds."""
    accuracy_lower_bound: float = 0.1
    """Lowest success rate (0 to 1) of a group that is kept."""
    accuracy_upper_bound: float = 0.9
    """Highest success rate (0 to 1) of a group that is kept."""
    filter_failed: bool = True
    """Whether groups with an episode whose worker failed for good are rejected; if not, it counts as a failure."""
    filter_truncated: bool = False
    """Reject groups whose episodes were all truncated by the time limit."""
    filter_format: bool = False
    """Reject groups with an episode whose actions were outside of their bounds and were clipped."""
    max_age: int = 2
    """Number of iterations for which a surplus group is kept for later; 0 keeps none."""

    def __post_init__(self) -> None:
        low, high = self.accuracy_lower_bound, self.accuracy_upper_bound
        if not 0.0 <= low <= high <= 1.0:
            raise ConfigError(
                f"accuracy_lower_bound, accuracy_upper_bound: expected 0 to 1, in order, got {low}, {high}"
            )
        bounds = (FilterConfig.accuracy_lower_bound, FilterConfig.accuracy_upper_bound)
        if not self.filter_accuracy and (low, high) != bounds:
            raise ConfigError(
                f"accuracy_lower_bound, accuracy_upper_bound: have no effect without filter_accuracy, got {low}, "
                f"{high}; leave them out, or turn filter_accuracy on"
            )
        if self.max_age < 0:
            raise ConfigError(f"max_age: expected 0 or more iterations, got {self.max_age}")


def rejection_reason(group: Group, filters: FilterConfig) -> RejectionReason | None:
    """The first reason to reject a group; None if it is kept."""
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

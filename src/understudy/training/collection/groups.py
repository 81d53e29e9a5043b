"""Groups: the episodes that are compared with each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from understudy.core import EpisodeError
from understudy.training.collection.rollout import Rollout


@dataclass(frozen=True, kw_only=True, eq=False)
class Group:
    """All K rollouts of a group, in the order of their tickets. A group is never incomplete."""

    rollouts: tuple[Rollout, ...]

    @property
    def number(self) -> int:
        return self.rollouts[0].ticket.group

    @property
    def task(self) -> str:
        return self.rollouts[0].ticket.task

    @property
    def iteration(self) -> int:
        """The iteration that requested it."""
        return self.rollouts[0].ticket.iteration

    @property
    def starts(self) -> tuple[int, ...]:
        """Its different start states."""
        return tuple(dict.fromkeys(rollout.ticket.start for rollout in self.rollouts))

    @property
    def num_successes(self) -> int:
        return sum(rollout.success for rollout in self.rollouts)

    @property
    def solved(self) -> bool:
        """Whether every episode succeeded."""
        return self.num_successes == len(self.rollouts)


def group_rollouts(rollouts: Sequence[Rollout], n_samples: int) -> list[Group]:
    """The groups of a complete wave, in the order of its tickets."""
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

"""Rollout: what came of a ticket. An episode, or the reason why there is none."""

from __future__ import annotations

from dataclasses import dataclass

from understudy.core import Episode
from understudy.training.collection.ticket_plan import Ticket

CLIPPED = "clipped_steps"  # the label of an episode in which actions were brought back into their bounds


@dataclass(frozen=True, kw_only=True, eq=False)
class Rollout:
    """A ticket that was lived, or that failed for good: then it has no rows and counts as an episode without success,
    and `failure` says what happened to the last of its workers."""

    ticket: Ticket
    episode: Episode | None  # of block rows, see rows.block_spec
    failure: str | None  # None if there is an episode
    attempts: int  # how often it was begun; chance decides this, so nothing that is learned from may depend on it

    @property
    def failed(self) -> bool:
        return self.episode is None

    @property
    def success(self) -> bool:
        return self.episode is not None and bool(self.episode.info.success)

    @property
    def truncated(self) -> bool:
        """Whether a time limit ended it."""
        return self.episode is not None and bool(self.episode.truncated[-1])

    @property
    def version(self) -> int:
        """The oldest of the policies that chose in it."""
        return 0 if self.episode is None else int(self.episode.policy_version[: len(self.episode)].min())

    @property
    def num_rows(self) -> int:
        """Blocks."""
        return 0 if self.episode is None else len(self.episode)

    @property
    def num_steps(self) -> int:
        """Actions that were executed."""
        return 0 if self.episode is None else int(self.episode.extras["executed"].sum())

    @property
    def total_reward(self) -> float:
        return 0.0 if self.episode is None else float(self.episode.reward.sum(dtype=float))

    @property
    def num_clipped(self) -> int:
        """Executed actions of which a number had left its bounds."""
        return 0 if self.episode is None else int(self.episode.info.labels.get(CLIPPED, "0"))

    def equals(self, other: Rollout) -> bool:
        """Whether the same ticket came to the same bits, however often it was begun."""
        if self.episode is None or other.episode is None:
            return self.ticket == other.ticket and self.episode is other.episode
        return self.ticket == other.ticket and self.episode.equals(other.episode)

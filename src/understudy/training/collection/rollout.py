"""Rollout: the result of a ticket. An episode, or the reason why there is none."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from understudy.core import Episode
from understudy.training.collection.task_start_plan import Ticket

CLIPPED = "clipped_steps"  # the label of an episode in which actions were clipped to their bounds


@dataclass(frozen=True, kw_only=True, eq=False)
class Rollout:
    """The result of a ticket. A ticket that failed for good has no rows and counts as an episode without success, and
    `failure` says what happened to its last worker."""

    ticket: Ticket
    episode: Episode | None  # of block rows, see block_rows.block_spec
    failure: str | None  # None if there is an episode
    attempts: int  # number of attempts; depends on chance, so nothing that is learned from may depend on it

    @property
    def failed(self) -> bool:
        return self.episode is None

    @property
    def success(self) -> bool:
        return self.episode is not None and bool(self.episode.info.success)

    @property
    def truncated(self) -> bool:
        """Whether a time limit ended the episode."""
        return self.episode is not None and bool(self.episode.truncated[-1])

    @property
    def version(self) -> int:
        """The oldest policy version that chose an action in it."""
        return 0 if self.episode is None else int(self.episode.policy_version[: len(self.episode)].min())

    @property
    def num_rows(self) -> int:
        """Number of blocks."""
        return 0 if self.episode is None else len(self.episode)

    @property
    def num_steps(self) -> int:
        """Number of executed actions."""
        return 0 if self.episode is None else int(np.asarray(self.episode.extras["executed"]).sum())

    @property
    def total_reward(self) -> float:
        return 0.0 if self.episode is None else float(self.episode.reward.sum(dtype=float))

    @property
    def num_clipped(self) -> int:
        """Number of executed actions that were clipped to their bounds."""
        return 0 if self.episode is None else int(self.episode.info.labels.get(CLIPPED, "0"))

    def equals(self, other: Rollout) -> bool:
        """Whether the ticket and all bits of the episode are the same; the number of attempts does not count."""
        if self.episode is None or other.episode is None:
            return self.ticket == other.ticket and self.episode is other.episode
        return self.ticket == other.ticket and self.episode.equals(other.episode)

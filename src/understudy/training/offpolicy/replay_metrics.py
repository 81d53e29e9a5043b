"""Replayed: what a learner was really given since its last report, for a person who wonders what it learns from."""

from __future__ import annotations

from understudy.core import TransitionBatch
from understudy.training.offpolicy.demo_online_batches import Batches


class Replayed:
    """Counts from its making on. All of it is a function of the batches, so a run that goes on says the same again."""

    def __init__(self, batches: Batches, version: int):
        self._batches = batches
        self._version = version  # of the policy that acts now
        self._before = batches.num_drawn.copy()
        self._num_versioned = 0
        self._sum = 0
        self._oldest = version

    def add(self, batch: TransitionBatch) -> None:
        """A batch that was learned from."""
        versions = batch.policy_version[batch.policy_version >= 0]
        if versions.size:
            self._num_versioned += versions.size
            self._sum += int(versions.sum())
            self._oldest = min(self._oldest, int(versions.min()))

    def numbers(self) -> dict[str, float]:
        """Shares, lag and reuse; docs/training.md explains each."""
        batches = self._batches
        there = (len(batches.demo), len(batches.online))
        demo, online = (batches.num_drawn - self._before).tolist()
        found = {
            "demo_share_wanted": batches.weights[0] / sum(batches.weights),
            "demo_share": demo / max(demo + online, 1),
            "reuse": batches.num_batches * batches.size / max(sum(there), 1),
        }
        if self._num_versioned:
            found["lag_mean"] = self._version - self._sum / self._num_versioned
            found["lag_max"] = float(self._version - self._oldest)
        return found

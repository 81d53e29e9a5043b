"""ReplayMetrics: what the learner really sampled since its last report: demo share, age of the policy, reuse."""

from __future__ import annotations

from typing import Any

from understudy.core import SequenceBatch, TransitionBatch
from understudy.replay import DEMO, Mixture


class ReplayMetrics:
    """Counts since it was made. It depends only on the batches, so a resumed run reports the same numbers."""

    def __init__(self, mixture: Mixture[Any], policy_version: int):
        """`policy_version` is that of the policy that acts now."""
        self._mixture = mixture
        self._version = policy_version
        self._drawn_before = dict(mixture.num_drawn)
        self._num_versioned = 0
        self._version_sum = 0
        self._oldest = policy_version

    def add(self, batch: TransitionBatch | SequenceBatch) -> None:
        """Count a batch that was learned from."""
        versions = batch.policy_version[(batch.policy_version >= 0) & (batch.weight > 0)]
        if versions.size:
            self._num_versioned += versions.size
            self._version_sum += int(versions.sum())
            self._oldest = min(self._oldest, int(versions.min()))

    def values(self) -> dict[str, float]:
        """Shares, lag and reuse; docs/training.md explains each."""
        mixture = self._mixture
        drawn = {name: count - self._drawn_before[name] for name, count in mixture.num_drawn.items()}
        found = {
            "demo_share_wanted": mixture.weights[DEMO.name] / sum(mixture.weights.values()),
            "demo_share": drawn[DEMO.name] / max(sum(drawn.values()), 1),
            "reuse": mixture.num_batches * mixture.batch_size / max(len(mixture), 1),
        }
        if self._num_versioned:
            found["lag_mean"] = self._version - self._version_sum / self._num_versioned
            found["lag_max"] = float(self._version - self._oldest)
        return found

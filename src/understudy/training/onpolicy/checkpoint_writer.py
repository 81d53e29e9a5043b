"""Checkpoint writer: writes the checkpoints and policies of an on-policy run while the run collects and learns on.

Between two iterations, or where it was stopped, the run takes a snapshot in host memory: the tensors are copied (each
rank copies what it will write), facts are copied too, and rollouts never change. A thread of each rank then writes
(`runs/background_write.py`), and makes no collective call, since the ranks train meanwhile
(`distributed/sharded_checkpoint.py`).

What is durable before what, on the first rank:

1. The run commits the episodes to the stores and syncs the metrics, and then takes the snapshot, which counts both. So
   a checkpoint counts nothing that a power cut could take away. What is recorded later is rolled back on resume.
2. The thread writes the policy of this iteration, if it is kept for good. A run that is killed before 4 resumes before
   this iteration, and keeps it again.
3. The thread writes its shard, waits for those of the other ranks, and writes arrays and facts. All of it is synced
   while the checkpoint has no valid name.
4. The checkpoint gets its name, which is synced. From here on a killed run resumes from it.
5. Older checkpoints are removed: there always is a complete one.
6. The newest policy replaces the one before, so it is never newer than the checkpoint.

One write is under way at a time: the next snapshot waits for it, so there is at most one in memory. Whoever says that
something was saved calls `wait` first: the end of a run, and a run that was stopped. A write that fails ends the run
after the iteration in progress at the latest. Killed at any moment, a run resumes from the last checkpoint with a name,
to the same bits; while a write is under way that is the one before, so more may be run again than the last iterations.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from understudy.processes.stop import QuitAtOnce
from understudy.training.distributed.ranks import Ranks
from understudy.training.onpolicy.policy_files import keep_policy, save_policy
from understudy.training.onpolicy.trainable_policy import TrainablePolicy
from understudy.training.runs.background_write import BackgroundWrite
from understudy.training.runs.checkpoint import CheckpointError, begin_checkpoint, finish_checkpoint, unfinished
from understudy.training.runs.run import Run

if TYPE_CHECKING:
    from understudy.training.distributed.sharded_checkpoint import StagedShards

Array = np.ndarray[Any, Any]

SHARDS = "shards"  # directory in a checkpoint: the weights and optimizer state of each rank
LEFT_S = 10.0  # that the first rank of a run that failed waits for the shards of the others


@dataclass(frozen=True, kw_only=True, eq=False)
class PolicySnapshot:
    """The policy at one moment, on the first rank."""

    policy: TrainablePolicy  # its version is that of this moment; the network of its model is not
    weights: Mapping[str, Array]  # of the network, all that will be written
    adapted: bool
    iteration: int
    last: bool  # of the run
    keep: bool  # for good


@dataclass(frozen=True, kw_only=True, eq=False)
class CheckpointSnapshot:
    """A checkpoint at one moment; arrays and facts are those of the first rank."""

    number: int
    num_steps: int  # of the environment, that it counts
    shards: StagedShards
    arrays: Mapping[str, Array]
    facts: Mapping[str, Any]


class CheckpointWriter:
    """Writes what one rank has to write. All methods are called by the thread of the run."""

    def __init__(self, run: Run, ranks: Ranks, *, keep: int):
        """`keep` checkpoints are kept."""
        self.saved_steps = 0  # that the newest checkpoint with a name counts
        self._run, self._ranks, self._keep = run, ranks, keep
        self._writes = BackgroundWrite("checkpoint", lambda: ranks.progress("saving a checkpoint"))
        self._give_up_s = float("inf")  # when the first rank stops waiting for the shards of others

    @property
    def waited_s(self) -> float:
        """Seconds that the run has waited for writes, in all."""
        return self._writes.waited_s

    def begin(self, number: int) -> Path:
        """The directory for the shards of the next checkpoint, after the write before has ended."""
        self.wait()
        checkpoints = self._run.checkpoints
        return (begin_checkpoint if self._ranks.first else unfinished)(checkpoints, number) / SHARDS

    def start(self, checkpoint: CheckpointSnapshot | None, policy: PolicySnapshot | None) -> None:
        """Write this in the background, after the write before; `policy` is given on the first rank."""
        self._writes.start(lambda: self._write(checkpoint, policy))

    def check(self) -> None:
        """Raise if a write has failed."""
        self._writes.check()

    def wait(self) -> None:
        """Wait until this rank has written all that was begun; on the first rank, all ranks have. Raises if not."""
        self._writes.wait()

    def end(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Let the write under way come to its end, whatever ends the run, unless it is to quit at once."""
        if error is not None:
            self._give_up_s = time.monotonic() + LEFT_S
        try:
            if not isinstance(error, QuitAtOnce):
                self.wait()
        except CheckpointError as failure:
            if error is None:
                raise
            if not isinstance(error, CheckpointError):
                error.add_note(str(failure))
        finally:
            if self._writes.under_way:
                self._run.keep_locked()

    def _write(self, checkpoint: CheckpointSnapshot | None, policy: PolicySnapshot | None) -> None:
        """In the thread; the docstring of this module explains the order."""
        if policy is not None and policy.keep:
            keep_policy(policy.policy, self._run, policy.weights, adapted=policy.adapted, iteration=policy.iteration)
        if checkpoint is None:
            return
        checkpoint.shards.write(lambda: time.monotonic() > self._give_up_s)
        if self._ranks.first:
            new = unfinished(self._run.checkpoints, checkpoint.number)
            finish_checkpoint(new, checkpoint.number, checkpoint.arrays, checkpoint.facts, keep=self._keep)
            self.saved_steps = checkpoint.num_steps
        if policy is not None:
            save_policy(policy.policy, self._run, policy.weights, adapted=policy.adapted, last=policy.last)

"""What is asked of a worker, and each way in which that can end: an answer, or a typed failure. Never a hang.

| outcome | when |
|---|---|
| Observed | the answer to Reset and Observe |
| Stepped | the answer to Steps |
| ExpertAction | the answer to AskExpert |
| WorkerRaised | the world raised; the traceback is in it |
| WorkerHung | no answer in time; the stack of the worker is in it |
| WorkerDied | the process ended; its exit code or signal and its last words are in it |
| WorkerGarbage | an answer that makes no sense: not a message, a wrong shape, a reward that is no number |
| WorkerTooLarge | it takes more memory than it may |

After a failure there is no episode: the process and all that it started are dead, and the next Reset goes to a new one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from understudy.core import Tree
from understudy.envs.world import ExpertAction
from understudy.processes.failures import ProcessDied, ProcessFailure, ProcessGarbage, ProcessHung, ProcessRaised

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, kw_only=True)
class Reset:
    """Begin an episode; as World.reset."""

    seed: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    look: bool = True


@dataclass(frozen=True, kw_only=True, eq=False)
class Steps:
    """Do these actions in one round trip, up to the end of the episode, and look once after the last."""

    actions: Sequence[Tree]
    look: bool = True


@dataclass(frozen=True, kw_only=True)
class Observe:
    """Look, and do nothing."""


@dataclass(frozen=True, kw_only=True)
class AskExpert:
    """Ask the world's scripted expert; as World.expert_action, with the seed of a generator in its place."""

    noise: float = 0.0
    seed: int = 0


Command: TypeAlias = Reset | Steps | Observe | AskExpert


@dataclass(frozen=True, kw_only=True, eq=False)
class Observed:
    """What is seen; the arrays are the caller's own."""

    observation: Tree  # None if it was not asked for
    info: dict[str, Any]  # of the reset; empty after Observe


@dataclass(frozen=True, kw_only=True, eq=False)
class Stepped:
    """What came of n actions, n being smaller than asked for if the episode ended; the arrays are the caller's own."""

    observation: Tree  # after the last; None if it was not asked for
    reward: Array  # [n, ...] float64, as the world gave it
    terminated: Array  # [n] bool
    truncated: Array  # [n] bool
    success: Array  # [n] bool
    info: dict[str, Any]  # of the last

    def __len__(self) -> int:
        return len(self.terminated)

    @property
    def last(self) -> bool:
        """Whether the episode has ended."""
        return bool(self.terminated[-1] or self.truncated[-1])


class WorkerFailure(ProcessFailure):
    """Base of the ways in which a worker fails.

    It was doing "start", "reset", "step", "observe", "expert_action" or "nothing".
    """

    holds = "world"


class WorkerRaised(ProcessRaised, WorkerFailure):
    """The world, or its construction, raised; `evidence` is the traceback."""


class WorkerHung(ProcessHung, WorkerFailure):
    """There was no answer in time; `evidence` is the stack at that moment."""


class WorkerDied(ProcessDied, WorkerFailure):
    """The process ended by itself or was killed by someone else; `evidence` is the end of its log."""


class WorkerGarbage(ProcessGarbage, WorkerFailure):
    """The answer makes no sense; `evidence` is the end of the log."""


class WorkerTooLarge(WorkerFailure):
    """The process takes more memory than it may."""

    def __init__(self, *, name: str, doing: str, rss_bytes: int, limit_bytes: int):
        super().__init__(
            f"expected up to {limit_bytes / 2**20:.0f} MiB of memory, got {rss_bytes / 2**20:.0f} during {doing}; "
            f"raise max_rss_bytes, or look for a leak",
            name=name,
            doing=doing,
        )
        self.rss_bytes = rss_bytes
        self.limit_bytes = limit_bytes


Answer: TypeAlias = Observed | Stepped | ExpertAction
Outcome: TypeAlias = Answer | WorkerFailure

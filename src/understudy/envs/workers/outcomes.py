"""Commands to a worker and their outcomes: every command ends in an answer or a typed failure, never in a hang.

| outcome | when |
|---|---|
| Observed | the answer to Reset and Observe |
| Stepped | the answer to Steps |
| ExpertAction | the answer to AskExpert |
| WorkerRaised | the world raised an exception; it holds the traceback |
| WorkerHung | no answer in time; it holds the worker's stack |
| WorkerDied | the process ended; it holds the exit code or signal and the end of the log |
| WorkerGarbage | an invalid answer: not a message, a wrong shape, a reward that is not a number |
| WorkerTooLarge | the process uses more memory than its limit |

A failure ends the episode: the process and its children are killed, and the next Reset goes to a new process.
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
    """Begin an episode, like World.reset."""

    seed: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    observe: bool = True


@dataclass(frozen=True, kw_only=True, eq=False)
class Steps:
    """Execute these actions in one round trip, up to the end of the episode, and observe once after the last."""

    actions: Sequence[Tree]
    observe: bool = True


@dataclass(frozen=True, kw_only=True)
class Observe:
    """Return the current observation without acting; with `refresh`, after World.refresh."""

    refresh: bool = False


@dataclass(frozen=True, kw_only=True)
class AskExpert:
    """Ask the world's scripted expert, like World.expert_action, with a seed in place of the generator."""

    noise: float = 0.0
    seed: int = 0


Command: TypeAlias = Reset | Steps | Observe | AskExpert


@dataclass(frozen=True, kw_only=True, eq=False)
class Observed:
    """An observation, in new arrays."""

    observation: Tree  # None if it was not requested
    info: dict[str, Any]  # of the reset; empty after Observe
    extras: Tree = field(default_factory=dict)  # of the observation
    labels: dict[str, str] = field(default_factory=dict)  # of the episode so far


@dataclass(frozen=True, kw_only=True, eq=False)
class Stepped:
    """The results of n actions, in new arrays; n is smaller than requested if the episode ended."""

    observation: Tree  # after the last action; None if it was not asked for
    reward: Array  # [n, ...] float64, as the world returned it
    terminated: Array  # [n] bool
    truncated: Array  # [n] bool
    success: Array  # [n] bool
    info: dict[str, Any]  # of the last
    extras: Tree = field(default_factory=dict)  # of the observation
    labels: dict[str, str] = field(default_factory=dict)  # of the episode so far

    def __len__(self) -> int:
        return len(self.terminated)

    @property
    def last(self) -> bool:
        """Whether the episode has ended."""
        return bool(self.terminated[-1] or self.truncated[-1])


class WorkerFailure(ProcessFailure):
    """Base class of the failures of a worker.

    `doing` is what the worker was busy with: "start", "reset", "step", "observe", "expert_action" or "nothing".
    """

    holds = "world"


class WorkerRaised(ProcessRaised, WorkerFailure):
    """The world or its factory raised an exception; `evidence` is the traceback."""


class WorkerHung(ProcessHung, WorkerFailure):
    """There was no answer in time; `evidence` is the stack at that moment."""


class WorkerDied(ProcessDied, WorkerFailure):
    """The process ended by itself or was killed from outside; `evidence` is the end of its log."""


class WorkerGarbage(ProcessGarbage, WorkerFailure):
    """The worker sent an invalid answer; `evidence` is the end of its log."""


class WorkerTooLarge(WorkerFailure):
    """The process uses more memory than its limit."""

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

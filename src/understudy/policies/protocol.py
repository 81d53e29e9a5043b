"""Policy: what acts. It says how it chose, so that the choice can be weighed again later, under other weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch

from understudy.core import Tree, UnderstudyError

Array: TypeAlias = np.ndarray[Any, Any]


class PolicyError(UnderstudyError, ValueError):
    """A policy that cannot be made, read or used as asked."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Acted:
    """An action and how it came about. With a batch of observations every array has its leading dimension."""

    action: Tree  # fits the action's Spec
    replay: dict[str, Array]  # what `evaluate` needs to find this very choice again
    log_prob: Array  # float32 []
    value: Array | None  # float32 [], of policies that judge states
    version: int  # of the weights; stamp it on the step


@dataclass(frozen=True, kw_only=True, eq=False)
class Evaluated:
    """What the present weights think of choices made earlier, differentiable."""

    log_prob: torch.Tensor  # [B]
    entropy: torch.Tensor  # [B]
    value: torch.Tensor | None  # [B]


class Policy(Protocol):
    """At unchanged weights `evaluate` equals what `act` recorded; the same `rng` gives the same action.

    acted = policy.act(observation, rng=rng)
    observation, reward, terminated, truncated, info = world.step(acted.action)
    policy.evaluate(observations, replays).log_prob
    """

    @property
    def version(self) -> int: ...

    def act(self, observation: Tree, *, rng: np.random.Generator, deterministic: bool = False) -> Acted:
        """Choose for one observation, or for each of a batch; `deterministic` draws nothing and takes the mode."""
        ...

    def evaluate(self, observation: Tree, replay: Mapping[str, Any]) -> Evaluated:
        """Weigh a batch of earlier choices again; `observation` and `replay` have a leading dimension."""
        ...

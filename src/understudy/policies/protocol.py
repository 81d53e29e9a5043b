"""Policy: what acts. It says how it chose, so that the choice can be weighed again later, under other weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np

from understudy.core import Spec, Tree, UnderstudyError

if TYPE_CHECKING:
    import torch

Array: TypeAlias = np.ndarray[Any, Any]


class PolicyError(UnderstudyError, ValueError):
    """A policy that cannot be made, read or used as asked."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Acted:
    """An action and how it came about. With a batch of observations every array has its leading dimension."""

    action: Tree  # fits the action's Spec
    replay: dict[str, Array]  # what `evaluate` needs to find this very choice again
    log_prob: Array  # float32 []; of a block [H, D]
    value: Array | None  # float32 [], of policies that judge states
    version: int  # of the weights; stamp it on the step


@dataclass(frozen=True, kw_only=True, eq=False)
class Evaluated:
    """What the present weights think of choices made earlier, differentiable."""

    log_prob: torch.Tensor  # [B]; of blocks [B, H, D]
    entropy: torch.Tensor  # [B]; of blocks [B, H, D]
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


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How a choice is drawn from what a network says. What was drawn with one must be evaluated with the same."""

    temperature: float = 1.0  # logits are divided by it
    greedy: bool = False  # the most likely, nothing drawn; log-probs are still those of the temperature

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise PolicyError(f"temperature: expected more than 0, got {self.temperature}; greedy draws nothing")


class BlockPolicy(Protocol):
    """A policy that is told its task in words and decides on a block of H actions at once.

    Row i of a batch is drawn with `rngs[i]` and nothing else, and comes to the same bits whatever the other rows are
    and however many: who else is asked at the same moment changes no episode. D is how many log-probs an action has:
    one for each of its numbers where they are tokens, else 1.
    """

    @property
    def version(self) -> int: ...

    @property
    def block_steps(self) -> int:
        """H."""
        ...

    @property
    def log_prob_size(self) -> int:
        """D."""
        ...

    @property
    def replay_spec(self) -> Spec:
        """What `Acted.replay` holds for one row, such as {"tokens": int32 [H, D]}."""
        ...

    @property
    def has_value(self) -> bool:
        """Whether it judges states."""
        ...

    def act(
        self, observation: Tree, instructions: Sequence[str], *, rngs: Sequence[np.random.Generator], sampling: Sampling
    ) -> Acted:
        """Choose for each row of a batch: action [B, H, ...], replay [B, ...], log_prob [B, H, D], value [B]."""
        ...

    def evaluate(
        self, observation: Tree, instructions: Sequence[str], replay: Mapping[str, Any], *, sampling: Sampling
    ) -> Evaluated:
        """Weigh a batch of earlier choices again, differentiably."""
        ...

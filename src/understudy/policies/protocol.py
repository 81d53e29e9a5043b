"""Policy: what chooses actions. It records how it chose, so that other weights can evaluate the choice later.

Importing this module does not import torch.
"""

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
    """A policy cannot be built, read or used as asked."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Acted:
    """An action and how it was chosen. For a batch of observations every array has a leading dimension."""

    action: Tree  # fits the action's Spec
    replay: dict[str, Array]  # what `evaluate` needs to recompute this choice
    log_prob: Array  # float32 []; of a block [H, D]
    value: Array | None  # float32 [], of policies with a value head
    version: int  # of the weights; it is stored with the step


@dataclass(frozen=True, kw_only=True, eq=False)
class Evaluated:
    """Log-probs, entropies and values of earlier choices under the present weights, differentiable."""

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
        """Choose for one observation or for each of a batch; `deterministic` takes the mode and draws no numbers."""
        ...

    def evaluate(self, observation: Tree, replay: Mapping[str, Any]) -> Evaluated:
        """Recompute a batch of earlier choices; `observation` and `replay` have a leading dimension."""
        ...


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How a choice is drawn from a network's logits. A choice must be evaluated with the Sampling it was drawn with."""

    temperature: float = 1.0
    """Logits are divided by this number, without unit; a flow policy multiplies the noise that it draws by it."""
    greedy: bool = False
    """Whether the most likely value is taken and nothing is drawn. Log-probs are still those of the temperature."""

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise PolicyError(f"temperature: expected more than 0, got {self.temperature}; greedy draws nothing")


class BlockPolicy(Protocol):
    """A policy that follows an instruction in words and decides on a block of H actions at once.

    Row i of a batch is drawn with `rngs[i]` and nothing else, and its bits do not depend on the other rows or on their
    number: batching requests changes no episode. D is the number of log-probs of an action: one for each of its
    numbers where they are tokens, one for each denoising step that adds noise, else 1.
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
        """Whether it has a value head."""
        ...

    def act(
        self, observation: Tree, instructions: Sequence[str], *, rngs: Sequence[np.random.Generator], sampling: Sampling
    ) -> Acted:
        """Choose for each row of a batch: action [B, H, ...], replay [B, ...], log_prob [B, H, D], value [B]."""
        ...

    def evaluate(
        self, observation: Tree, instructions: Sequence[str], replay: Mapping[str, Any], *, sampling: Sampling
    ) -> Evaluated:
        """Recompute a batch of earlier choices, differentiably."""
        ...


class LoadedPolicy(BlockPolicy, Protocol):
    """A block policy of a policy file or a checkpoint."""

    def parameters(self) -> Tree:
        """Its weights, or digests of the files that have them; a score keeps their fingerprint."""
        ...


class NoisePolicy(BlockPolicy, Protocol):
    """A block policy that makes each block of noise, which a caller may choose."""

    @property
    def noise_shape(self) -> tuple[int, ...]:
        """The shape of the noise of one block; it is drawn from the standard normal distribution."""
        ...

    def act(
        self,
        observation: Tree,
        instructions: Sequence[str],
        *,
        rngs: Sequence[np.random.Generator],
        sampling: Sampling,
        noise: Array | None = None,
    ) -> Acted:
        """Choose, from `noise` [B, *noise_shape] if it is given; greedy, nothing else is drawn."""
        ...


def check_noise(noise: Array, shape: tuple[int, ...]) -> Array:
    """A copy of the noise that `act` is given; refuse another shape, and numbers that are not finite."""
    found = np.array(noise, np.float32)
    if found.shape != shape or not np.isfinite(found).all():
        raise PolicyError(
            f"noise: expected finite numbers {list(shape)}, a row for each instruction, got {list(found.shape)}; "
            f"give each row `noise_shape` numbers"
        )
    return found

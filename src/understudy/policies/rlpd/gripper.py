"""Gripper: one number of the action that takes a few values. The policy chooses the value with the highest Q.

A gripper opens or closes; a normal distribution over its command dithers between the two. So, as in HIL-SERL, the arm's
numbers come from the tanh-normal, and the gripper's from a critic of its own that gives each value a Q.
Importing this module does not import torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from understudy.policies.protocol import Array, PolicyError

if TYPE_CHECKING:
    from torch import Tensor

    from understudy.policies.actions import Actions


@dataclass(frozen=True, kw_only=True)
class Gripper:
    """Which number of the action is the gripper, and which values it takes."""

    element: int = -1
    """Index of the gripper in the flat action; -1 is the last number."""
    values: tuple[float, ...] = (-1.0, 0.0, 1.0)
    """The values that the gripper takes, in the action's own units."""
    epsilon: float = 0.0
    """Probability, from 0 to 1, of a random value instead of the best one."""

    def __post_init__(self) -> None:
        if len(set(self.values)) < 2 or len(set(self.values)) < len(self.values):
            raise PolicyError(f"gripper/values: expected two or more different values, got {self.values}")
        if not 0.0 <= self.epsilon < 1.0:
            raise PolicyError(f"gripper/epsilon: expected a chance from 0 to less than 1, got {self.epsilon}")

    def index(self, actions: Actions) -> int:
        """Its index in the flat action; raises PolicyError if the action has no such number or not these values."""
        if not -actions.size <= self.element < actions.size or actions.size < 2:
            raise PolicyError(
                f"gripper/element: expected one of {actions.size} numbers (of two or more), got {self.element}"
            )
        index = self.element % actions.size
        low, high = actions.low[index], actions.high[index]
        if min(self.values) < low or max(self.values) > high:
            raise PolicyError(f"gripper/values: expected values from {low:g} to {high:g}, got {self.values}")
        return index

    def units(self, actions: Actions) -> Array:
        """The values as numbers from -1 to 1."""
        index = self.index(actions)
        low, high = actions.low[index], actions.high[index]
        return np.array([(2 * value - low - high) / (high - low) for value in self.values], np.float32)

    def choose(self, values_q: Array, rng: np.random.Generator | None) -> Array:  # [B] int64
        """The best of [B, K], or with probability epsilon a random one; without `rng` always the best."""
        best: Array = values_q.argmax(axis=-1)
        if rng is None or self.epsilon == 0.0:
            return best
        strays = rng.random(len(best)) < self.epsilon
        return np.where(strays, rng.integers(len(self.values), size=len(best)), best)

    def log_prob(self, values_q: Tensor, choice: Tensor) -> Tensor:
        """Log-probability [B] of choices [B] under Q [B, K]; minus infinity for what is never chosen."""
        best = (choice == values_q.argmax(dim=-1)).to(values_q.dtype)
        return ((1.0 - self.epsilon) * best + self.epsilon / len(self.values)).log()

    @property
    def entropy(self) -> float:
        """In nats; the same in every state: one value is the best, and the others share epsilon."""
        count = len(self.values)
        chances = [1.0 - self.epsilon + self.epsilon / count] + [self.epsilon / count] * (count - 1)
        return -sum(chance * math.log(chance) for chance in chances if chance > 0)

"""The options of the value model's training. Importing them does not import torch."""

from __future__ import annotations

from dataclasses import dataclass

from understudy.algorithms.algorithm import AlgorithmError


@dataclass(frozen=True, kw_only=True)
class ValueTrainingConfig:
    """The value model of RECAP and its training."""

    updates: int = 600
    """Number of updates of the value model."""
    batch_size: int = 256
    """Number of steps in a batch of the value model."""
    hidden: tuple[int, ...] = (128, 128)
    """Number of units of each hidden layer of the value model."""
    learning_rate: float = 1e-3
    """Learning rate of the value model."""
    weight_decay: float = 0.01
    """Weight decay of the value model, applied to matrices only."""

    def __post_init__(self) -> None:
        for name in ("updates", "batch_size"):
            if getattr(self, name) < 1:
                raise AlgorithmError(f"{name}: expected a number from 1, got {getattr(self, name)}")
        if not self.hidden or min(self.hidden) < 1:
            raise AlgorithmError(f"hidden: expected at least one positive number, got {self.hidden}")
        if not self.learning_rate > 0 or self.weight_decay < 0:
            raise AlgorithmError(
                f"learning_rate, weight_decay: expected more than 0, and 0 or more, got {self.learning_rate} and "
                f"{self.weight_decay}"
            )

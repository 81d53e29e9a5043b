"""The options of supervised fine-tuning. Importing them does not import torch."""

from __future__ import annotations

from dataclasses import dataclass

from understudy.algorithms.algorithm import AlgorithmError


@dataclass(frozen=True, kw_only=True)
class SFTUpdateConfig:
    """The options of an update of supervised fine-tuning."""

    learning_rate: float = 1e-3
    """Highest learning rate, reached after the warm-up."""
    warmup_updates: int = 20
    """Number of updates over which the learning rate rises from 0."""
    min_lr_ratio: float = 0.0
    """Learning rate at the end of the cosine schedule, as a share of the highest, from 0 to 1."""
    weight_decay: float = 0.01
    """Weight decay of AdamW, applied to matrices only."""
    clip_norm: float | None = 1.0
    """Largest norm of the gradient. None does not clip."""
    sigma: float = 2.0
    """Standard deviation of the target distribution around a demonstrated number, in bins. 0 is the nearest bin."""
    shift_pixels: int = 0
    """Largest random shift of the camera images, in pixels. 0 turns augmentation off."""
    checkpoint_gradients: bool = False
    """Whether activations are recomputed in the backward pass, which takes less memory and more time."""

    advantage_dropout: float = 0.1
    """Share of the blocks of which a policy with advantage is not told whether they are good, from 0 to 1."""

    def __post_init__(self) -> None:
        for name in ("warmup_updates", "weight_decay", "sigma", "shift_pixels"):
            if getattr(self, name) < 0:
                raise AlgorithmError(f"{name}: expected 0 or more, got {getattr(self, name)}")
        if not self.learning_rate > 0 or (self.clip_norm is not None and not self.clip_norm > 0):
            raise AlgorithmError(
                f"learning_rate, clip_norm: expected more than 0, got {self.learning_rate} and {self.clip_norm}"
            )
        for name in ("min_lr_ratio", "advantage_dropout"):
            if not 0 <= getattr(self, name) <= 1:
                raise AlgorithmError(f"{name}: expected a share from 0 to 1, got {getattr(self, name)}")

"""Guidance: the block before, which a new block has to continue, as a policy gets it.

The weights are those of real-time chunking (Black et al. 2025, arXiv 2506.07339): 1 for the actions that are executed
while the block is computed, which cannot change any more; falling for those that the block before has too; 0 behind.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from understudy.core import Tree
from understudy.policies.protocol import Array
from understudy.policies.rtc.config import Schedule


@dataclass(frozen=True, kw_only=True, eq=False)
class Guidance:
    """What `act(..., guidance=)` of a policy with `takes_guidance` gets: the block before of each row, shifted so that
    its first action is the one to be executed now."""

    previous: Tree  # [B, H, ...]; actions behind the execution horizon mean nothing
    has_previous: Array  # [B] bool; the first block of an episode continues nothing
    method: Literal["rtc", "inpaint"]
    inference_delay: int
    execution_horizon: int
    prefix_attention_schedule: Schedule
    max_guidance_weight: float

    def weights(self, block_steps: int) -> Array:
        """Float32 [B, H]; inpainting knows only 1 and 0."""
        schedule = "zeros" if self.method == "inpaint" else self.prefix_attention_schedule
        row = prefix_weights(block_steps, self.inference_delay, self.execution_horizon, schedule)
        return np.where(self.has_previous[:, None], row, np.float32(0.0))


def prefix_weights(block_steps: int, inference_delay: int, execution_horizon: int, schedule: Schedule) -> Array:
    """How close each action of a new block is kept to the block before: float32 [H], from 1 to 0."""
    at = np.arange(block_steps)
    falling = (execution_horizon - at) / (execution_horizon - inference_delay + 1)
    if schedule == "exp":
        falling = falling * np.expm1(falling) / (math.e - 1)
    elif schedule != "linear":
        falling = np.full(block_steps, float(schedule == "ones"))
    weights = np.where(at < inference_delay, 1.0, np.where(at < execution_horizon, falling, 0.0))
    return weights.astype(np.float32)

"""Bins: between numbers from -1 to 1 and the K values a token can take, and how one is drawn.

Bin 0 is -1 and bin K - 1 is 1, so that the ends, where grippers and eager experts are, are met exactly.
"""

from __future__ import annotations

import torch
from torch import Tensor

from understudy.policies.protocol import Array


def to_position(unit: Tensor, num_bins: int) -> Tensor:
    """Where numbers from -1 to 1 lie among the bins: 0 to K - 1, not rounded."""
    return (unit + 1.0) * (0.5 * (num_bins - 1))


def to_bins(unit: Tensor, num_bins: int) -> Tensor:
    """The nearest bin, int64."""
    return to_position(unit, num_bins).round().long()


def to_unit(bins: Array, num_bins: int) -> Array:
    """The number from -1 to 1 that a bin stands for, float32."""
    unit: Array = (bins * (2.0 / (num_bins - 1)) - 1.0).astype("float32")
    return unit


def draw(log_probs: Tensor, uniforms: Tensor) -> Tensor:
    """One bin for each distribution [..., K], int64 [...], where its running sum passes a number [...] from [0, 1).

    In float64, and never one without probability: the number is kept below the sum's own end, which rounding moves.
    """
    reached = log_probs.double().exp().cumsum(dim=-1)
    end = reached[..., -1]
    wanted = torch.minimum(uniforms * end, torch.nextafter(end, torch.zeros_like(end)))
    return (reached <= wanted[..., None]).sum(dim=-1)

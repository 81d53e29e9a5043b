"""Soft targets: a demonstrated number lies between two bins, and its target is a normal distribution over the bins
around it, so that the network learns that neighbouring bins are close. Pure functions.

Ten demonstrations of a task are too few to learn exact bins.
"""

from __future__ import annotations

import torch
from torch import Tensor

from understudy.policies.imitation import weighted_mean


def soft_targets(position: Tensor, num_bins: int, sigma: float) -> Tensor:
    """[..., K]: a normal around each position [...] from 0 to K - 1, cut at the ends; sigma 0 is the nearest bin."""
    if sigma == 0:
        return torch.nn.functional.one_hot(position.round().long(), num_bins).to(position.dtype)
    distance = torch.arange(num_bins, device=position.device, dtype=position.dtype) - position[..., None]
    return torch.softmax(-0.5 * (distance / sigma).square(), dim=-1)


def soft_cross_entropy(logits: Tensor, targets: Tensor, weight: Tensor) -> Tensor:
    """Of logits with targets, both [B, H, A, K]: the mean over all numbers of the actions that weigh [B, H]."""
    each = -(targets * torch.log_softmax(logits, dim=-1)).sum(dim=-1).mean(dim=-1)
    return weighted_mean(each, weight)

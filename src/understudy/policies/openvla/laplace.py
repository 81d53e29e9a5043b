"""Laplace: numbers drawn around what an L1 head predicts. All functions are pure; `given` [..., 2] is mean, log scale.

OpenVLA-OFT's L1 head was trained to the median of the demonstrations, which is the mean of a Laplace distribution. A
scale beside it makes a distribution of the prediction, so that actions have log-probs and can be explored.

log p(x) = -|x - mean| / b - log(2 b), with b = temperature * exp(log scale);  entropy = 1 + log(2 b)
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from understudy.policies.protocol import Array, Sampling

_SMALLEST = 1e-12  # of the probability of a draw that is further from the mean


def draw(given: Tensor, uniforms: Array, sampling: Sampling) -> Tensor:
    """One number for each distribution, float32 [...]: the mean, or where the distribution function passes a number
    from [0, 1)."""
    mean = given[..., 0]
    if sampling.greedy:
        return mean
    offset = torch.as_tensor(uniforms, device=given.device) - 0.5
    distance = -torch.log((1.0 - 2.0 * offset.abs()).clamp(min=_SMALLEST)) * torch.sign(offset)
    return (mean.double() + _scale(given, sampling).double() * distance).float()


def weigh(given: Tensor, numbers: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Log-densities and entropies [...] of numbers [...]."""
    log_twice = given[..., 1] + math.log(2.0 * sampling.temperature)
    log_prob = -(numbers - given[..., 0]).abs() / _scale(given, sampling) - log_twice
    return log_prob, 1.0 + log_twice


def _scale(given: Tensor, sampling: Sampling) -> Tensor:
    return sampling.temperature * given[..., 1].exp()

"""The tanh-normal: a normal sample u squeezed by tanh into (-1, 1), with independent numbers; pure functions.

log p(tanh(u)) = sum over numbers of  log N(u; mean, exp(log_std)) - log(1 - tanh(u)^2)
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)
NUM_NODES = 24
_NODES, _NODE_WEIGHTS = (part.tolist() for part in np.polynomial.hermite_e.hermegauss(NUM_NODES))

LARGEST_UNIT = 1.0 - 1e-3  # an action at its bound has no finite u; it is taken as this far from it


def bounded_log_std(raw: Tensor, low: float, high: float) -> Tensor:
    """A network's output as a log of a spread between two bounds, with a gradient everywhere."""
    return low + 0.5 * (high - low) * (torch.tanh(raw) + 1.0)


def log_slope(pre_tanh: Tensor) -> Tensor:
    """log(1 - tanh(u)^2), exact also where tanh(u) rounds to 1."""
    return 2.0 * (math.log(2.0) - pre_tanh - functional.softplus(-2.0 * pre_tanh))


def log_prob(pre_tanh: Tensor, mean: Tensor, log_std: Tensor) -> Tensor:
    """Log-density [B] of tanh(u) for u [B, D]."""
    return log_prob_of_noise((pre_tanh - mean) * torch.exp(-log_std), pre_tanh, log_std)


def log_prob_of_noise(noise: Tensor, pre_tanh: Tensor, log_std: Tensor) -> Tensor:
    """The same, given the standard normal number that u was made from: u = mean + exp(log_std) noise."""
    return (-0.5 * noise.square() - log_std - HALF_LOG_2PI - log_slope(pre_tanh)).sum(dim=-1)


def draw(mean: Tensor, log_std: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Numbers [B, D] from -1 to 1 and their log-prob [B]."""
    noise = torch.randn(mean.shape, generator=generator, device=mean.device)
    pre_tanh = mean + torch.exp(log_std) * noise
    return torch.tanh(pre_tanh), log_prob_of_noise(noise, pre_tanh, log_std)


def entropy(mean: Tensor, log_std: Tensor) -> Tensor:
    """Entropy [B]: the normal's, plus the mean log-slope by Gauss-Hermite quadrature (within 1e-3 for spreads to 1)."""
    nodes = torch.tensor(_NODES, dtype=mean.dtype, device=mean.device)
    shares = torch.tensor(_NODE_WEIGHTS, dtype=mean.dtype, device=mean.device) / math.sqrt(2 * math.pi)
    slopes = log_slope(mean[..., None] + torch.exp(log_std)[..., None] * nodes) @ shares
    return (0.5 + HALF_LOG_2PI + log_std + slopes).sum(dim=-1)


def unsqueeze(unit: Tensor) -> Tensor:
    """The u of an action from -1 to 1."""
    return torch.atanh(unit.clamp(-LARGEST_UNIT, LARGEST_UNIT))

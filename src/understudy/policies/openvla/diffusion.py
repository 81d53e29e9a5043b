"""Diffusion: from noise to the numbers of a block, as OpenVLA-OFT's diffusion head does. All functions are pure.

DDIM without noise in its steps. With a(t) the product of 1 - beta up to t, on the squared cosine, for step t to t':

x0 = clip((x - sqrt(1 - a(t)) e) / sqrt(a(t)), -1, 1);   x' = sqrt(a(t')) x0 + sqrt(1 - a(t')) e;   a = 1 at the end
"""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

from understudy.policies.openvla.config import DIFFUSION_STEPS

_MAX_BETA = 0.999


@cache
def signal_shares() -> tuple[float, ...]:
    """The share of the signal a(t) after each step of the noise."""

    def cosine(t: float) -> float:
        return math.cos((t + 0.008) / 1.008 * math.pi / 2) ** 2

    shares, share = [], 1.0
    for step in range(DIFFUSION_STEPS):
        beta = min(1 - cosine((step + 1) / DIFFUSION_STEPS) / cosine(step / DIFFUSION_STEPS), _MAX_BETA)
        share *= 1 - beta
        shares.append(share)
    return tuple(shares)


def timesteps(num_steps: int) -> list[tuple[int, int]]:
    """The steps from noise to numbers: the time that each is at, and the one that it goes to, below 0 at the end."""
    every = DIFFUSION_STEPS // num_steps
    return [(step * every, (step - 1) * every) for step in reversed(range(num_steps))]


def denoise(numbers: Tensor, noise: Tensor, times: tuple[int, int]) -> Tensor:
    """One step, given the noise that was predicted."""
    shares = signal_shares()
    now, then = shares[times[0]], shares[times[1]] if times[1] >= 0 else 1.0
    clean = ((numbers - math.sqrt(1 - now) * noise) / math.sqrt(now)).clamp(-1.0, 1.0)
    return math.sqrt(then) * clean + math.sqrt(1 - then) * noise


def time_embedding(time: Tensor, width: int) -> Tensor:
    """Sines and cosines [B, width] of times [B]."""
    half = width // 2
    rates = torch.exp(torch.arange(half, device=time.device) * (-math.log(10_000) / (half - 1)))
    angles = time[:, None] * rates[None]
    return torch.cat([angles.sin(), angles.cos()], dim=-1)

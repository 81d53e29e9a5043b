"""Critics: an ensemble of networks with equal shapes, computed together in batched products."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from understudy.policies.networks import Weights


def init_critics(num: int, sizes: Sequence[int], generator: torch.Generator) -> Weights:
    """Weights [E, in, out] and biases [E, 1, out] of layers `critic/0` to `critic/n`; each critic has its own draw."""
    weights: Weights = {}
    for number, (num_in, num_out) in enumerate(pairwise(sizes)):
        bound = math.sqrt((1 if number == len(sizes) - 2 else 6) / num_in)
        weight = torch.empty(num, num_in, num_out).uniform_(-bound, bound, generator=generator)
        weights |= {f"critic/{number}/weight": weight, f"critic/{number}/bias": torch.zeros(num, 1, num_out)}
    return weights


def critics(weights: Mapping[str, Tensor], x: Tensor, num_hidden: int, *, layer_norm: bool) -> Tensor:
    """Values [E, B] of [B, in]. LayerNorm is without scale and shift, which cost 40 % of a layer's time."""
    bias = weights["critic/0/bias"]
    x = x.expand(len(bias), *x.shape)
    for number in range(num_hidden):
        x = torch.baddbmm(weights[f"critic/{number}/bias"], x, weights[f"critic/{number}/weight"])
        x = torch.relu(functional.layer_norm(x, x.shape[-1:]) if layer_norm else x)
    return torch.baddbmm(weights[f"critic/{num_hidden}/bias"], x, weights[f"critic/{num_hidden}/weight"]).squeeze(-1)


def subset(weights: Mapping[str, Tensor], chosen: Tensor) -> Weights:
    """The weights of some of the critics."""
    return {name: weight[chosen] for name, weight in weights.items() if name.startswith("critic/")}

"""Networks: pure functions of named weights. A network is a dict of tensors; nothing else needs to be saved."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

Weights: TypeAlias = dict[str, Tensor]


def init_linear(name: str, num_in: int, num_out: int, generator: torch.Generator, *, gain: float = 1.0) -> Weights:
    """Uniform weights with variance gain^2 / (3 num_in), and zero biases."""
    bound = gain / math.sqrt(num_in)
    weight = torch.empty(num_out, num_in).uniform_(-bound, bound, generator=generator)
    return {f"{name}/weight": weight, f"{name}/bias": torch.zeros(num_out)}


def init_mlp(name: str, sizes: Sequence[int], generator: torch.Generator, *, last_gain: float = 1.0) -> Weights:
    """Layers `name/0` to `name/n`; `sizes` are those of the input, the hidden layers and the output."""
    weights: Weights = {}
    for number, (num_in, num_out) in enumerate(pairwise(sizes)):
        gain = last_gain if number == len(sizes) - 2 else math.sqrt(6)  # He's, for the ReLU behind it
        weights |= init_linear(f"{name}/{number}", num_in, num_out, generator, gain=gain)
    return weights


def mlp(weights: Mapping[str, Tensor], name: str, x: Tensor, num_hidden: int) -> Tensor:
    """[B, in] to [B, out]: `num_hidden` layers with ReLU, and a last one without."""
    for number in range(num_hidden):
        x = torch.relu(functional.linear(x, weights[f"{name}/{number}/weight"], weights[f"{name}/{number}/bias"]))
    return functional.linear(x, weights[f"{name}/{num_hidden}/weight"], weights[f"{name}/{num_hidden}/bias"])

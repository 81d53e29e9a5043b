"""MLP: linear layers with ReLU between them, and how new layers get their first weights from a generator."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import skip_init

Layer = TypeVar("Layer", bound=nn.Module)


class MLP(nn.ModuleList):
    """Layers 0 to n, [B, in] to [B, out]; `sizes` are those of the input, the hidden layers and the output.

    Its weights are undefined until `init_parameters` or `load_state_dict` fills them.
    """

    def __init__(self, sizes: Sequence[int], *, last_gain: float = 1.0):
        super().__init__(new_linear(num_in, num_out) for num_in, num_out in pairwise(sizes))
        self.last_gain = last_gain

    def init_parameters(self, generator: torch.Generator) -> None:
        """He's initialization before each ReLU; the last layer's weights are scaled by `last_gain`."""
        for number, layer in enumerate(self):
            assert isinstance(layer, nn.Linear)
            init_linear(layer, generator, gain=self.last_gain if number == len(self) - 1 else math.sqrt(6))

    def forward(self, x: Tensor) -> Tensor:
        *hidden, last = self
        for layer in hidden:
            x = torch.relu(layer.forward(x))  # no call of the module, which costs as much as a small product
        y: Tensor = last.forward(x)
        return y


class OneOutput(nn.Linear):
    """A linear layer with one output, which does not depend on a row's place in the batch.

    It is computed as two equal outputs: MKL multiplies a matrix and a single vector by a routine that treats some rows
    differently, on AMD's processors with any setting.
    """

    def __init__(self, in_features: int, *, device: torch.device | str | None = None):
        super().__init__(in_features, 1, device=device)

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight.repeat(2, 1), self.bias.repeat(2))[..., :1]


def new_linear(num_in: int, num_out: int) -> nn.Linear:
    """A linear layer whose weights are undefined."""
    return uninitialized(OneOutput, num_in) if num_out == 1 else uninitialized(nn.Linear, num_in, num_out)


def uninitialized(kind: type[Layer], *sizes: int, **options: Any) -> Layer:
    """A layer of torch whose weights are undefined: no time and no global random numbers are spent on them."""
    layer: Layer = skip_init(kind, *sizes, **options)  # type: ignore[no-untyped-call]
    return layer


@torch.no_grad()
def init_linear(layer: nn.Linear, generator: torch.Generator, *, gain: float = 1.0) -> None:
    """Uniform weights with variance gain^2 / (3 num_in), and zero biases."""
    bound = gain / math.sqrt(layer.in_features)
    layer.weight.uniform_(-bound, bound, generator=generator)
    layer.bias.zero_()


@torch.no_grad()
def init_conv(layer: nn.Conv2d, generator: torch.Generator) -> None:
    """He's initialization for the ReLU behind it, and zero biases."""
    bound = math.sqrt(6 / layer.weight[0].numel())
    layer.weight.uniform_(-bound, bound, generator=generator)
    if layer.bias is not None:
        layer.bias.zero_()

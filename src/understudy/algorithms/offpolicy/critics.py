"""Critics: an ensemble of networks with equal shapes, computed together in batched matrix products."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional


class EnsembleLinear(nn.Module):
    """E linear layers side by side: [E, B, in] to [E, B, out]."""

    def __init__(self, num: int, num_in: int, num_out: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num, num_in, num_out))
        self.bias = nn.Parameter(torch.empty(num, 1, num_out))

    @torch.no_grad()
    def init_parameters(self, generator: torch.Generator, *, gain: float) -> None:
        """Uniform weights with variance gain^2 / (3 in), each layer with its own draw, and zero biases."""
        bound = gain / math.sqrt(self.weight.shape[1])
        self.weight.uniform_(-bound, bound, generator=generator)
        self.bias.zero_()

    def forward(self, x: Tensor, chosen: Tensor | None = None) -> Tensor:
        if chosen is None:
            return torch.baddbmm(self.bias, x, self.weight)
        return torch.baddbmm(self.bias[chosen], x, self.weight[chosen])


class CriticEnsemble(nn.ModuleList):
    """E critics: linear layers with LayerNorm (if asked for) and ReLU between them."""

    def __init__(self, num: int, sizes: Sequence[int], *, layer_norm: bool):
        """`sizes` are those of the input and the hidden layers. Weights are undefined until they are filled."""
        super().__init__(EnsembleLinear(num, num_in, num_out) for num_in, num_out in pairwise((*sizes, 1)))
        self.num = num
        self.layer_norm = layer_norm

    def init_parameters(self, generator: torch.Generator) -> None:
        """He's initialization before each ReLU."""
        for number, layer in enumerate(self):
            assert isinstance(layer, EnsembleLinear)
            layer.init_parameters(generator, gain=math.sqrt(1 if number == len(self) - 1 else 6))

    def forward(self, x: Tensor, chosen: Tensor | None = None) -> Tensor:
        """Q [E, B] of inputs [B, in]; `chosen` are the indices of some of the critics.

        LayerNorm has no scale and shift, which would cost 40 % of a layer's time.
        """
        *hidden, last = self
        x = x.expand(self.num if chosen is None else len(chosen), *x.shape)
        for layer in hidden:
            x = layer.forward(x, chosen)  # not a call of the module, which costs as much as a small product
            x = torch.relu(functional.layer_norm(x, x.shape[-1:]) if self.layer_norm else x)
        q: Tensor = last.forward(x, chosen).squeeze(-1)
        return q


def drawn_targets(num: int, wanted: int, generator: torch.Generator) -> Tensor | None:
    """Indices of the target critics whose lowest value is the target; None if it is that of all."""
    if wanted == num:
        return None
    return torch.randperm(num, generator=generator, device=generator.device)[:wanted]

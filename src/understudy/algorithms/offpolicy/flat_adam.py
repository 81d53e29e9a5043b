"""Trained: named weights in one flat tensor, and the Adam that moves them: one kernel a step, whatever their number."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.optim.adam import adam

from understudy.policies.networks import Weights


class Trained:
    """`weights` are leaves that take gradients, `frozen` the same memory for those who only look."""

    def __init__(self, weights: Mapping[str, Tensor], *, learning_rate: float, device: torch.device):
        self.learning_rate = learning_rate
        self.flat, self.frozen = flattened(weights, device)
        self.weights = {name: weight.detach().requires_grad_() for name, weight in self.frozen.items()}
        self._leaves = list(self.weights.values())
        self._mean, self._means = flattened(_zeros(self.frozen), device)
        self._square, self._squares = flattened(_zeros(self.frozen), device)
        self._gradient = torch.zeros_like(self.flat)
        self._num_steps = torch.zeros((), device=device)

    @torch.no_grad()
    def _adam(self) -> None:
        adam(
            [self.flat],
            [self._gradient],
            [self._mean],
            [self._square],
            [],
            [self._num_steps],
            fused=True,
            lr=self.learning_rate,
            beta1=0.9,
            beta2=0.999,
            eps=1e-8,
            weight_decay=0.0,
            amsgrad=False,
            maximize=False,
        )

    def step(self, loss: Tensor) -> None:
        """One step down the gradient of a loss in which every weight has a part."""
        gradients = torch.autograd.grad(loss, self._leaves)
        self._gradient = torch.cat([gradient.reshape(-1) for gradient in gradients])
        self._adam()

    def gradient_norm(self) -> Tensor:
        """Of the last step."""
        norm: Tensor = torch.linalg.vector_norm(self._gradient)
        return norm

    def tensors(self) -> Weights:
        """Weights, and the moments and number of steps of Adam: all that the next step depends on."""
        kinds = (("weights", self.frozen), ("adam_mean", self._means), ("adam_square", self._squares))
        named = {f"{kind}/{name}": tensor for kind, views in kinds for name, tensor in views.items()}
        return {**named, "num_steps": self._num_steps}


def flattened(weights: Mapping[str, Tensor], device: torch.device) -> tuple[Tensor, Weights]:
    """A copy of all weights in one flat tensor, and its views in their shapes."""
    flat = torch.cat([weight.reshape(-1) for weight in weights.values()]).to(device)
    parts = torch.split_with_sizes(flat, [weight.numel() for weight in weights.values()])
    return flat, {name: part.view(weights[name].shape) for name, part in zip(weights, parts, strict=True)}


def _zeros(weights: Mapping[str, Tensor]) -> Weights:
    return {name: torch.zeros_like(weight) for name, weight in weights.items()}

"""Optimizers: torch's fused Adam with its moments in place from the start, so that a state is complete at any time."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.adam import adam

from understudy.algorithms.algorithm import AlgorithmError


def new_adam(parameters: Iterable[Tensor], *, learning_rate: float) -> torch.optim.Adam:
    """Adam over all parameters that take gradients."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    optimizer = torch.optim.Adam(trained, learning_rate, fused=True)
    init_moments(optimizer)
    return optimizer


def init_moments(optimizer: Optimizer) -> None:
    """Give every parameter the zero moments that torch would only make at the first step."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter] = {
                "step": torch.zeros((), device=parameter.device),
                "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
                "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
            }


def descend(optimizer: torch.optim.Adam, loss: Tensor) -> None:
    """One step down the gradient of a loss that depends on every parameter of the optimizer, and on others maybe.

    Others get no gradient. The gradient stays in `grad` until the next call. The step is that of `optimizer.step()` by
    torch's own function: the hooks around `step` take longer than the step of a small network.
    """
    (group,) = optimizer.param_groups
    parameters = group["params"]
    for parameter in parameters:
        parameter.grad = None
    # Not autograd.grad: only backward lays a gradient out as its parameter, and fused Adam pairs them by memory.
    torch.autograd.backward(loss, inputs=parameters)
    gradients = [parameter.grad for parameter in parameters]
    if any(gradient is None for gradient in gradients):
        raise AlgorithmError("loss: expected it to depend on every parameter of the optimizer; leave the others out")
    moments = [optimizer.state[parameter] for parameter in parameters]
    with torch.no_grad():
        adam(
            parameters,
            gradients,
            [moment["exp_avg"] for moment in moments],
            [moment["exp_avg_sq"] for moment in moments],
            [],
            [moment["step"] for moment in moments],
            fused=True,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


def gradient_norm(optimizer: Optimizer) -> Tensor:
    """Euclidean norm of the last step's gradient over all parameters."""
    gradients = [parameter.grad for group in optimizer.param_groups for parameter in group["params"]]
    if None in gradients:
        raise AlgorithmError("gradient: expected a step before its norm is asked for; call descend() first")
    norm: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
    return norm

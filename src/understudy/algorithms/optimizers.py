"""Optimizers: torch's fused Adam over parameters that share one flat tensor, with its moments in place from the start.

One flat tensor makes a step one kernel, however many parameters there are: for the small networks of RLPD on a CPU,
Adam over single tensors costs a tenth of an update.

torch wraps the methods of its optimizers for `torch.compile`. The wrappers import the compiler at the first call, which
is two seconds of CPU in every process that learns. Nothing is compiled here, so the methods are used without them.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.adam import adam


class FlatAdam(torch.optim.Adam):
    """Adam over one flat parameter. The parameters of the modules become views of it, and stay what modules hold."""

    add_param_group = inspect.unwrap(Optimizer.add_param_group)

    def __init__(self, parameters: Iterable[Tensor], *, learning_rate: float):
        """Takes all parameters that require gradients. Move modules to their device before, not after."""
        self.views = [parameter for parameter in parameters if parameter.requires_grad]
        self.flat = nn.Parameter(flatten_parameters(self.views))
        super().__init__([self.flat], learning_rate, fused=True)
        init_moments(self)

    def descend(self, loss: Tensor) -> None:
        """One step down the gradient of a loss that depends on every parameter; others get no gradient.

        The step is that of `step()` by torch's own function: the hooks around `step` take longer than the step itself.
        """
        gradients = torch.autograd.grad(loss, self.views)
        self.flat.grad = torch.cat([gradient.reshape(-1) for gradient in gradients])
        (group,), moments = self.param_groups, self.state[self.flat]
        with torch.no_grad():
            adam(
                [self.flat],
                [self.flat.grad],
                [moments["exp_avg"]],
                [moments["exp_avg_sq"]],
                [],
                [moments["step"]],
                fused=True,
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )

    def gradient_norm(self) -> Tensor:
        """Euclidean norm of the last step's gradient."""
        assert self.flat.grad is not None
        norm: Tensor = torch.linalg.vector_norm(self.flat.grad)
        return norm


class AdamW(torch.optim.AdamW):
    """torch's AdamW, to the same bits."""

    add_param_group = inspect.unwrap(Optimizer.add_param_group)
    zero_grad = inspect.unwrap(Optimizer.zero_grad)
    step = torch.no_grad()(inspect.unwrap(torch.optim.AdamW.step))


def flatten_parameters(parameters: Sequence[Tensor]) -> Tensor:
    """One flat tensor with the values of the parameters, which become views of it, one after the other."""
    flat = torch.cat([parameter.detach().reshape(-1) for parameter in parameters])
    parts = torch.split(flat, [parameter.numel() for parameter in parameters])
    for parameter, part in zip(parameters, parts, strict=True):
        parameter.data = part.view(parameter.shape)
    return flat


def init_moments(optimizer: Optimizer) -> None:
    """Give every parameter the zero moments that torch would only make at the first step."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter] = {
                "step": torch.zeros((), device=parameter.device),
                "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
                "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
            }

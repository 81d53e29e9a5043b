"""Single process: a module trained by one process. DDP (ddp.py) and FSDP (fsdp.py) override what differs.

Losses are weighted sums over all rows of all ranks, so gradients are added over ranks and never averaged.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from understudy.training.distributed.config import Precision
from understudy.training.distributed.ranks import Ranks


class SingleProcess:
    """A module in one process."""

    def __init__(self, module: nn.Module, ranks: Ranks, precision: Precision):
        self.module = module
        self.ranks = ranks
        self._low = precision == "bfloat16"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's output, in float32 whatever precision it computes in."""
        return self._autocast(self.module, args, kwargs)

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Add to the gradients; after the last micro batch they are those of all ranks."""
        loss.backward()  # type: ignore[no-untyped-call]

    def unsharded(self) -> contextlib.AbstractContextManager[None]:
        """Within, each rank may call forward at its own pace, without the others."""
        return contextlib.nullcontext()

    def gradient_norm(self, gradients: Sequence[Tensor]) -> Tensor:
        """The norm of the whole gradient, of which this rank may hold a shard."""
        return torch.nn.utils.get_total_norm(gradients)

    def _autocast(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if not self._low:
            return module(*args, **kwargs)
        with torch.autocast(self.ranks.device.type, torch.bfloat16):
            return tree_map(_to_float32, module(*args, **kwargs))


def _to_float32(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype == torch.bfloat16 else value

"""Parallel: how one module is trained by its ranks: by one alone, by replicas (DDP), or by parts (`parts.py`).

Losses are weighted sums over all rows of all ranks, so gradients are added over ranks and never averaged.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import inspect
import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

from understudy.training.distributed.config import Precision
from understudy.training.distributed.errors import RanksError
from understudy.training.distributed.ranks import Ranks

# What torch called it before 2.13, and since.
_SYNC_BUFFERS = (
    "forward_sync_buffers"
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    else "broadcast_buffers"
)


class Alone:
    """A module in one process. The others differ from it in what stands here, and in nothing else."""

    def __init__(self, module: nn.Module, ranks: Ranks, precision: Precision):
        self.module = module
        self.ranks = ranks
        self._low = precision == "bfloat16"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the module says; float32 comes out, whatever it computes in."""
        return self._autocast(self.module, args, kwargs)

    def backward(self, loss: Tensor, last: bool) -> None:
        """Add to the gradients; after the last micro batch they are those of all ranks."""
        loss.backward()  # type: ignore[no-untyped-call]

    def whole(self) -> contextlib.AbstractContextManager[None]:
        """Within, each rank may call forward as often as it likes, without the others."""
        return contextlib.nullcontext()

    def norm(self, gradients: Sequence[Tensor]) -> Tensor:
        """Of the whole gradient, of which this rank may hold a part."""
        return torch.nn.utils.get_total_norm(gradients)

    def _autocast(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if not self._low:
            return module(*args, **kwargs)
        with torch.autocast(self.ranks.device.type, torch.bfloat16):
            return tree_map(_to_float32, module(*args, **kwargs))


class Replicated(Alone):
    """Each rank has all weights; gradients are added up in buckets while the last backward pass goes on."""

    def __init__(self, module: nn.Module, ranks: Ranks, precision: Precision):
        super().__init__(module, ranks, precision)
        # Parameters without a part in a loss are no mistake (a value head under GRPO); torch warns if there are none.
        warnings.filterwarnings("ignore", message="find_unused_parameters=True was specified")
        options: Any = {_SYNC_BUFFERS: False, "find_unused_parameters": True, "gradient_as_bucket_view": True}
        self._ddp = DistributedDataParallel(module, **options)
        self._ddp.register_comm_hook(None, lambda _, bucket: _add_up(bucket))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with self._ddp.no_sync():
            return self._autocast(self._ddp, args, kwargs)

    def backward(self, loss: Tensor, last: bool) -> None:
        # DDP wants to know in forward whether a backward pass will be the last. We know it here, and tell its reducer
        # just what its own forward would have.
        if last:
            self._ddp.reducer.prepare_for_backward([loss])
        loss.backward()  # type: ignore[no-untyped-call]


def find_blocks(module: nn.Module, names: Sequence[str]) -> list[nn.Module]:
    """The modules of the classes with these names; without names, the elements of the outermost ModuleLists.

    A block is what is gathered at a time, and what is computed a second time instead of being kept.
    """
    kinds = {type(part).__name__ for part in module.modules()}
    for name in names:
        if name not in kinds:
            near = difflib.get_close_matches(name, kinds, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; there are {', '.join(sorted(kinds))}"
            raise RanksError(f"blocks: the module has no part of class {name!r}{hint}")
    found: list[nn.Module] = []

    def walk(part: nn.Module) -> None:
        for child in part.children():
            inside = type(child).__name__ in names if names else isinstance(part, nn.ModuleList)
            if inside:
                found.append(child)
            else:
                walk(child)

    walk(module)
    return found


def compute_again(blocks: Sequence[nn.Module]) -> None:
    """Keep only what goes into each block, and compute the rest again when gradients are wanted."""
    for block in blocks:
        block.forward = functools.partial(_maybe_again, block.forward)


def _maybe_again(forward: Any, *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)


def _add_up(bucket: Any) -> torch.futures.Future[Tensor]:
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    assert work is not None
    added: torch.futures.Future[Tensor] = work.get_future().then(lambda future: future.value()[0])
    return added


def _to_float32(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype == torch.bfloat16 else value

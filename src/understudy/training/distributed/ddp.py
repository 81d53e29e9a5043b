"""DDP: a module of which every rank holds a replica."""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from understudy.training.distributed.config import Precision
from understudy.training.distributed.ranks import Ranks
from understudy.training.distributed.single_process import SingleProcess

# Its name before and since torch 2.13.
_SYNC_BUFFERS = (
    "forward_sync_buffers"
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    else "broadcast_buffers"
)


class DDPReplicated(SingleProcess):
    """Each rank has all weights; gradients are summed in buckets during the last backward pass."""

    def __init__(self, module: nn.Module, ranks: Ranks, precision: Precision):
        super().__init__(module, ranks, precision)
        # Parameters without a part in a loss are allowed (a value head under GRPO); torch warns if there are none.
        warnings.filterwarnings("ignore", message="find_unused_parameters=True was specified")
        options: Any = {_SYNC_BUFFERS: False, "find_unused_parameters": True, "gradient_as_bucket_view": True}
        self._ddp = DistributedDataParallel(module, **options)
        self._ddp.register_comm_hook(None, lambda _, bucket: _sum_over_ranks(bucket))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with self._ddp.no_sync():
            return self._autocast(self._ddp, args, kwargs)

    def backward(self, loss: Tensor, *, last: bool) -> None:
        # DDP wants to know in forward whether the backward pass will be the last. We know it only here, and call its
        # reducer just as its own forward would have.
        if last:
            self._ddp.reducer.prepare_for_backward([loss])
        loss.backward()  # type: ignore[no-untyped-call]


def _sum_over_ranks(bucket: Any) -> torch.futures.Future[Tensor]:
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    assert work is not None
    added: torch.futures.Future[Tensor] = work.get_future().then(lambda future: future.value()[0])
    return added

"""FSDP: a module of which every rank holds a shard (FSDP2).

A file of its own because its imports take two seconds of CPU, and a process without FSDP does not need them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from understudy.training.distributed.config import Precision
from understudy.training.distributed.ranks import Ranks
from understudy.training.distributed.single_process import SingleProcess


class FSDPSharded(SingleProcess):
    """Each rank has a shard of each parameter and of its gradient, also between two micro batches; a block is gathered
    only while it is used."""

    def __init__(
        self, module: nn.Module, ranks: Ranks, precision: Precision, *, blocks: Sequence[nn.Module], offload: bool
    ):
        super().__init__(module, ranks, precision)
        ranks.group_of_one()
        mesh = init_device_mesh(ranks.device.type, (ranks.size,))
        low = torch.bfloat16 if self._low else _common_dtype(module)
        high = torch.float32 if self._low else None
        policy = CPUOffloadPolicy(pin_memory=ranks.device.type != "cpu") if offload else OffloadPolicy()
        for block in blocks:
            mixed = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=high)
            fully_shard(block, mesh=mesh, mp_policy=mixed, offload_policy=policy)
        mixed = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=high, output_dtype=high)
        fully_shard(module, mesh=mesh, mp_policy=mixed, offload_policy=policy)
        for wrapped in self._wrapped():
            wrapped.set_gradient_divide_factor(1.0)  # sum, do not average
            wrapped.set_force_sum_reduction_for_comms(True)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    @contextlib.contextmanager
    def unsharded(self) -> Iterator[None]:
        wrapped = list(self._wrapped())
        for module in wrapped:
            module.set_reshard_after_forward(False, recurse=False)
            module.unshard()
        try:
            yield
        finally:
            for module in wrapped:
                module.set_reshard_after_forward(module is not self._root, recurse=False)
                module.reshard()

    def gradient_norm(self, gradients: Sequence[Tensor]) -> Tensor:
        squared = torch.nn.utils.get_total_norm(gradients).square()
        dist.all_reduce(squared)
        return squared.sqrt()

    @property
    def _root(self) -> FSDPModule:
        assert isinstance(self.module, FSDPModule)
        return self.module

    def _wrapped(self) -> Iterator[FSDPModule]:
        return (module for module in self.module.modules() if isinstance(module, FSDPModule))


def _common_dtype(module: nn.Module) -> torch.dtype | None:
    """The dtype to gather in if the weights have several, such as float32 adapters over a bfloat16 base; else None."""
    return torch.float32 if len({value.dtype for value in module.parameters()}) > 1 else None

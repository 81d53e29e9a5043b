"""Ranks of any number in one process: torch's process group `fake`, whose collectives do nothing, and fake streams.

    with pretend(), fake_ranks(8) as ranks:
        Engine(model, EngineConfig(parallel="fsdp"), ranks)

This process is rank 0. What torch does around each collective, such as making the buffers of FSDP, is done.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from tests.fake_cuda.build import WRITTEN_FOR
from torch.distributed import HashStore  # type: ignore[attr-defined]

from understudy.training.distributed import fsdp
from understudy.training.distributed.ranks import Ranks

try:
    from torch._subclasses.fake_tensor import unset_fake_temporarily
    from torch.distributed.tensor._sharding_prop import ShardingPropagator
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from torch.utils._python_dispatch import _disable_current_modes

    _find_shape = ShardingPropagator._propagate_tensor_meta_non_cached
except (ImportError, AttributeError) as error:  # no stable interfaces of torch
    raise ImportError(f"{__file__}: written for torch {WRITTEN_FOR}, which has other internals; adapt it") from error

DEVICE = "cuda:0"


@contextlib.contextmanager
def fake_ranks(num: int) -> Iterator[Ranks]:
    """Within `pretend`: the first of so many ranks."""
    new_group, new_mesh = dist.new_group, fsdp.init_device_mesh  # type: ignore[attr-defined]

    def fake_group(*args: Any, **options: Any) -> Any:
        return new_group(*args, **{**options, "backend": "fake"})

    def unseen(*args: Any, **options: Any) -> Any:
        """DTensor finds shapes out with fake tensors of its own, of the size of all shards."""
        with _disable_current_modes():
            return _find_shape(*args, **options)

    def real_mesh(*args: Any, **options: Any) -> Any:
        """The ranks of a mesh are numbers that torch reads, so they are in no fake tensor."""
        with unset_fake_temporarily(), torch._C.DisableTorchFunction():
            return new_mesh(*args, **options)

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=num)
    with contextlib.ExitStack() as undo:
        undo.callback(dist.destroy_process_group)
        for where, new in (
            (dist, {"new_group": fake_group}),
            (fsdp, {"init_device_mesh": real_mesh}),
            (ShardingPropagator, {"_propagate_tensor_meta_non_cached": unseen}),
            (torch.cuda, _STREAMS),
            (torch.Tensor, {"record_stream": lambda self, stream: None}),
        ):
            undo.enter_context(mock.patch.multiple(where, **new))
        yield Ranks(0, num, store=HashStore() if num > 1 else None, device=DEVICE)


class _Stream:
    """A stream, or an event, of a device that is always finished."""

    device = torch.device(DEVICE)

    def __init__(self, *args: Any, **options: Any):
        pass

    def wait(self, other: Any = None) -> None:
        pass

    def record(self, stream: Any = None) -> None:
        pass

    def record_event(self, event: Any = None) -> Any:
        return event or _Stream()

    wait_stream = wait_event = wait
    synchronize = record

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *error: object) -> None:
        pass


_STREAMS: dict[str, Any] = {
    "Stream": _Stream,
    "Event": _Stream,
    "current_stream": _Stream,
    "default_stream": _Stream,
    "stream": lambda stream: contextlib.nullcontext(),
}

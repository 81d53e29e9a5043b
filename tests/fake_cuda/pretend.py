"""Runs the product's own code on fake CUDA tensors: shapes, dtypes and devices as on a GPU, and no data.

    build.load()                       # before the first import of torch
    with pretend() as seen:
        policy.model.to("cuda:0")
        with seen.no_sync():           # a hot loop
            ...

Raises for what a GPU would raise for, and for what would make it slow:

| mistake | raised by |
|---|---|
| tensors of two devices in one operation | torch |
| matrix products of two dtypes | WrongDtypeError; torch's own fake kernels let them pass |
| reading a number, or copying to the host, within `no_sync` | HostSyncError |
| an attention mask with a place for each two tokens of each row, unless `dense_masks` | DenseMaskError |
| logits of a whole `vocabulary` in float32 | TooLargeError |

Numbers that are read from the device are 1, since there are none. `seen` counts the attention kernels that a GPU would
take, which a CPU build does not choose itself, and the bytes of the largest attention mask.
"""

from __future__ import annotations

import contextlib
import gc
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from understudy.policies import transfer

aten = torch.ops.aten
_PRODUCTS = {
    aten.mm.default: (0, 1),
    aten.bmm.default: (0, 1),
    aten.addmm.default: (0, 1, 2),
    aten.baddbmm.default: (0, 1, 2),
    aten.linear.default: (0, 1),
    aten.convolution.default: (0, 1),
}
_READS = {aten._local_scalar_dense.default, aten.item.default, aten.is_nonzero.default}
# What makes the host wait for the device: the size of their result depends on data.
_WAITING = {aten.nonzero.default, aten.masked_select.default, aten.unique_dim.default, aten._unique2.default}
DEVICES = 8


class WrongDtypeError(Exception):
    """A matrix product of tensors of different dtypes, which kernels of a GPU refuse."""


class HostSyncError(Exception):
    """The host waits for the device where it should be ahead of it."""


class DenseMaskError(Exception):
    """An attention mask that is larger than it need be."""


class TooLargeError(Exception):
    """What the device holds is larger than it need be."""


class Seen(TorchDispatchMode):
    """Watches every operation."""

    def __init__(self, fake: FakeTensorMode) -> None:
        super().__init__()
        self._fake = fake
        self.kernels: Counter[str] = Counter()  # of attention, by name
        self.products: Counter[torch.dtype] = Counter()  # matrix products, by dtype
        self.mask_bytes = 0  # of the largest attention mask
        self.num_syncs = 0
        self.num_fused_steps = 0  # of the optimizer
        self.dense_masks = True  # whether they are allowed
        self.vocabulary: int | None = None  # number of tokens, of which a policy needs the logits of a few
        self._hot = 0

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within, the host may not wait for the device."""
        self._hot += 1
        try:
            yield
        finally:
            self._hot -= 1

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if op in _READS and getattr(args[0], "constant", None) is None:
            if args[0].device.type == "cuda":
                self.wait("reads a number")
            kind = args[0].dtype
            boolean = kind == torch.bool or op is aten.is_nonzero.default
            return True if boolean else 1.0 if kind.is_floating_point else 1
        if op in _WAITING and args[0].device.type == "cuda":
            self.wait(f"{op} has a result whose size depends on data")
        if op is aten._to_copy.default and args[0].device.type == "cuda":
            to = kwargs.get("device")
            if to is not None and torch.device(to).type == "cpu":
                self.wait(f"copies {list(args[0].shape)} to the host")
        if op is aten._to_copy.default and not isinstance(args[0], FakeTensor):
            args = (self._fake.from_tensor(args[0].detach()), *args[1:])  # else torch would copy its data for real
        if op is aten._to_copy.default:
            args[0].constant = None  # single numbers, too
        self.num_fused_steps += op is aten._fused_adamw_.default
        if op in _PRODUCTS:
            dtypes = [args[at].dtype for at in _PRODUCTS[op] if isinstance(args[at], Tensor)]
            if len(set(dtypes)) > 1:
                raise WrongDtypeError(f"{op}: {' and '.join(map(str, dtypes))}")
            self.products[dtypes[0]] += 1
        made = op(*args, **kwargs)
        logits = isinstance(made, Tensor) and made.dim() > 2 and made.shape[-1] == self.vocabulary
        if logits and made.dtype == torch.float32:
            raise TooLargeError(f"logits {list(made.shape)} of the whole vocabulary in float32; take the bins first")
        return made

    def wait(self, what: str) -> None:
        self.num_syncs += 1
        if self._hot:
            raise HostSyncError(f"the host waits for the device: {what}")


def held_bytes() -> int:
    """What all tensors on the fake device take together, each storage once."""
    gc.collect()
    fake = [one for one in gc.get_objects() if issubclass(type(one), FakeTensor)]  # which touches no other object
    found = [one for one in fake if one.fake_device.type == "cuda"]
    return sum({one.untyped_storage()._cdata: one.untyped_storage().nbytes() for one in found}.values())


@contextlib.contextmanager
def pretend() -> Iterator[Seen]:
    """Within, torch has GPUs, and all tensors are fake."""
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    seen = Seen(fake)
    with contextlib.ExitStack() as undo:
        undo.enter_context(_patched(torch.cuda, _CUDA))
        undo.enter_context(_patched(torch.Tensor, {"pin_memory": lambda self, device=None: self}))
        undo.enter_context(_patched(torch, {"tensor": _tensor}))
        undo.enter_context(_patched(functional, {"scaled_dot_product_attention": _attention(seen)}))
        undo.enter_context(_patched(transfer, {"to_array": _to_array(seen)}))
        overwrite = torch.__future__.get_overwrite_module_params_on_conversion()
        undo.callback(torch.__future__.set_overwrite_module_params_on_conversion, overwrite)
        torch.__future__.set_overwrite_module_params_on_conversion(True)  # fake parameters cannot change in place
        kernels = torch.library.Library("aten", "IMPL")
        undo.callback(kernels._destroy)
        # A GPU has a kernel for it; without one, torch would take seven operations, and as many tensors.
        kernels.impl("silu_backward", lambda gradient, value: torch.empty_like(value), "CUDA")
        undo.enter_context(fake)
        undo.enter_context(seen)
        yield seen


_CUDA: dict[str, Any] = {
    "is_available": lambda: True,
    "device_count": lambda: DEVICES,
    "current_device": lambda: 0,
    "set_device": lambda device: None,
    "get_device_name": lambda device=None: "a fake GPU",
    "get_device_capability": lambda device=None: (9, 0),
    "is_bf16_supported": lambda including_emulation=True: True,
    "is_initialized": lambda: True,
    "_lazy_init": lambda: None,
    "synchronize": lambda device=None: None,
    "get_rng_state": lambda device="cuda": torch.zeros(16, dtype=torch.uint8),
}


def _to_array(seen: Seen) -> Any:
    """The seam of the product from device to host: the shape and dtype, filled with 1."""
    import numpy as np

    def to_array(tensor: Tensor) -> Any:
        if tensor.device.type == "cuda":
            seen.wait(f"copies {list(tensor.shape)} to the host")
        name = "float32" if tensor.dtype == torch.bfloat16 else str(tensor.dtype).removeprefix("torch.")
        return np.ones(tuple(tensor.shape), name)

    return to_array


def _attention(seen: Seen) -> Any:
    """The kernel that a GPU would take, and its conditions; a CPU build would take another, with float32 scores."""
    plain = functional.scaled_dot_product_attention

    def attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if query.device.type != "cuda":
            return plain(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        if torch.is_autocast_enabled("cuda"):
            low = torch.get_autocast_dtype("cuda")
            query, key, value = query.to(low), key.to(low), value.to(low)
        if not query.dtype == key.dtype == value.dtype:
            raise WrongDtypeError(f"attention: {query.dtype}, {key.dtype} and {value.dtype}")
        if attn_mask is not None and attn_mask.device != query.device:
            raise RuntimeError(f"attention: the mask is on {attn_mask.device}, the query on {query.device}")
        if attn_mask is None and query.dtype in (torch.bfloat16, torch.float16):
            seen.kernels["flash"] += 1
            size = query.shape[-1]
            padded = [functional.pad(one, (0, -size % 8)) for one in (query, key, value)]
            return aten._scaled_dot_product_flash_attention(*padded, dropout_p, is_causal, scale=scale)[0][..., :size]
        seen.kernels["efficient"] += 1
        bias = None
        if attn_mask is not None:
            own = attn_mask
            seen.mask_bytes = max(seen.mask_bytes, own.untyped_storage().nbytes())
            if not seen.dense_masks and own.untyped_storage().nbytes() >= len(query) * query.shape[2] * key.shape[2]:
                raise DenseMaskError(f"attention: a mask of {list(own.shape)} in memory; make it a view of [B, S]")
            if own.dtype == torch.bool:
                own = torch.zeros_like(own, dtype=query.dtype).masked_fill(~own, float("-inf"))
            elif own.dtype not in (query.dtype, torch.float32):
                raise WrongDtypeError(f"attention: the mask is {own.dtype}, the query {query.dtype}")
            bias = own.to(query.dtype).expand(*query.shape[:2], query.shape[2], key.shape[2])
        grad = torch.is_grad_enabled()
        return aten._scaled_dot_product_efficient_attention(
            query, key, value, bias, grad, dropout_p, is_causal, scale=scale
        )[0]

    return attention


@contextlib.contextmanager
def _patched(where: Any, new: dict[str, Any]) -> Iterator[None]:
    old = {name: getattr(where, name) for name in new}
    for name, value in new.items():
        setattr(where, name, value)
    try:
        yield
    finally:
        for name, value in old.items():
            setattr(where, name, value)


def _tensor(*args: Any, device: Any = None, **kwargs: Any) -> Tensor:
    """torch.tensor, which would copy its data to the device itself; there is nothing to copy to."""
    made = _TENSOR(*args, **kwargs)
    there = device is not None and torch.device(device).type == "cuda"
    return torch.empty(made.shape, dtype=made.dtype, device=device) if there else made


_TENSOR = torch.tensor

"""Traced pass: the bytes and FLOPs of one micro batch, counted on tensors without data.

The network itself runs on torch's device `meta`, forward and backward, so that every tensor has its true shape and
dtype and takes no memory. Two things of a GPU are put in its place, since a CPU build of torch has them not:

| on a GPU | here |
|---|---|
| attention by the flash kernel, or with a mask by the memory-efficient one | their shapes, without a matrix of scores |
| autocast to bfloat16, which keeps a copy of each weight until the end of the pass | the same casts |
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten
from torch.utils.flop_counter import flop_registry

from understudy.training.gpu_estimate.traced_fsdp import Shards, TracedFSDP

Kind: TypeAlias = Literal["activations", "gradients", "copies"]
ALIGNMENT = 512  # bytes: torch's allocator gives no less, and multiples of it

aten = torch.ops.aten
# What autocast computes in bfloat16 and in float32, as far as the networks of this package use it.
_LOW = {functional.linear, functional.conv2d, torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, torch.einsum}
_HIGH = {functional.layer_norm, functional.softmax, torch.softmax, functional.log_softmax, torch.log_softmax}


@dataclass(frozen=True, kw_only=True)
class TracedPass:
    """What one micro batch needs beside parameters and optimizer state."""

    activations: int  # bytes at the highest moment
    gradients: int  # bytes at that moment, of this process's whole gradients; none with FSDP
    copies: int  # bytes at that moment: weights that autocast has cast, or what FSDP has gathered and reduces
    forward_flops: int
    backward_flops: int  # recomputed activations included

    @property
    def peak(self) -> int:
        return self.activations + self.gradients + self.copies


def trace(
    model: nn.Module,
    run: Callable[[], Tensor],
    *,
    autocast: bool,
    accumulated: bool = False,
    shards: Shards | None = None,
    learning: bool = True,
) -> TracedPass:
    """Run a micro batch of a model on `meta`; `run` evaluates it and returns something to differentiate.

    `accumulated`: gradients of earlier micro batches are there already. `shards`: weights are gathered and gradients
    reduced block by block, as FSDP does; shards themselves are not counted. Without `learning`, nothing is kept for a
    backward pass.
    """
    trained = [value for value in model.parameters() if value.requires_grad]
    recorder = _Recorder([*model.parameters(), *model.buffers()], gradients="gradients" if shards is None else "copies")
    hooked: list[Any] = list(trained) if learning else []
    fsdp = None if shards is None else TracedFSDP(model, shards, recorder.hold)
    hooks = [value.register_post_accumulate_grad_hook(recorder.take_gradient) for value in hooked]
    try:
        if accumulated and learning:
            for value in trained:
                value.grad = torch.zeros_like(value)
                recorder.note(value.grad, "gradients")
        with ExitStack() as undo:
            undo.enter_context(torch.set_grad_enabled(learning))
            functions = undo.enter_context(_GpuFunctions(recorder, autocast=autocast))
            undo.enter_context(recorder)
            result = run()
            forward_flops, recorder.flops = recorder.flops, 0
            if learning:
                functions.forget()  # as autocast does where its context ends
                _backward(result.sum())
                if fsdp is not None:
                    fsdp.finish()
    finally:
        if fsdp is not None:
            fsdp.close()
        for hook in hooks:
            hook.remove()
        for value in trained:
            value.grad = None
    highest = recorder.highest
    return TracedPass(
        activations=highest["activations"],
        gradients=highest["gradients"],
        copies=highest["copies"],
        forward_flops=forward_flops,
        backward_flops=recorder.flops if learning else 0,
    )


def _backward(loss: Tensor) -> None:
    """As `loss.backward()`, which would switch the modes off, and with them attention for recomputed activations."""
    engine: Any = torch.autograd.Variable._execution_engine
    engine.run_backward(
        (loss,), (torch.ones_like(loss),), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows every storage from the operation that makes it until nobody refers to it."""

    def __init__(self, kept: list[Tensor], *, gradients: Kind):
        super().__init__()  # type: ignore[no-untyped-call]
        self._gradients = gradients
        self._new: Kind = "activations"  # of tensors that are made now
        self.flops = 0
        self.now: dict[Kind, int] = {"activations": 0, "gradients": 0, "copies": 0}
        self.highest = dict(self.now)
        self._alive: dict[int, tuple[int, Kind, Any]] = {}
        self._known: dict[Any, tuple[list[Any], Any, int]] = {}
        self._kept = {id(value.untyped_storage()): value.untyped_storage() for value in kept}

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result, flops = self._run(op, args, kwargs or {})
        self.flops += flops
        for value in tree_leaves(result):
            if isinstance(value, Tensor):
                self.note(value, self._new)
        return result

    def hold(self, size: int) -> Tensor:
        """A tensor of so many bytes that is counted with copies."""
        self._new = "copies"
        try:
            return torch.empty(size, dtype=torch.uint8, device="meta")
        finally:
            self._new = "activations"

    def _run(self, op: Any, args: Any, kwargs: Any) -> tuple[Any, int]:
        """The result of an operation, and its FLOPs. The blocks of a network are alike: what has been seen is made
        again from its shape, since torch takes a millisecond to find it out."""
        given, structure = tree_flatten((args, kwargs))
        key = op, structure, tuple(_described(value) for value in given)
        known = self._known.get(key)
        if known is not None:
            results, outer, flops = known
            return tree_unflatten([_made(one) for one in results], outer), flops
        result = op(*args, **kwargs)
        count = flop_registry.get(op.overloadpacket)
        flops = 0 if count is None else int(count(*args, **kwargs, out_val=result))
        results, outer = tree_flatten(result)
        is_new = all(one.alias_info is None for one in op._schema.returns)  # and neither a view nor in place
        if is_new and all(value is None or (isinstance(value, Tensor) and value.is_meta) for value in results):
            self._known[key] = [_described(value) for value in results], outer, flops
        return result, flops

    def note(self, value: Tensor, kind: Kind) -> None:
        storage = value.untyped_storage()
        key = id(storage)
        if key in self._alive or key in self._kept or value.device.type != "meta":
            return
        size = -(-storage.nbytes() // ALIGNMENT) * ALIGNMENT
        self._alive[key] = size, kind, weakref.ref(storage, lambda _: self._drop(key))
        self._add(size, kind)

    def recast(self, value: Tensor, kind: Kind) -> None:
        """Count the memory of a tensor as another kind."""
        key = id(value.untyped_storage())
        if key in self._alive:
            size, before, reference = self._alive[key]
            self._alive[key] = size, kind, reference
            self.now[before] -= size
            self.now[kind] += size

    def take_gradient(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self.recast(parameter.grad, self._gradients)

    def _add(self, size: int, kind: Kind) -> None:
        self.now[kind] += size
        if sum(self.now.values()) > sum(self.highest.values()):
            self.highest = dict(self.now)

    def _drop(self, key: int) -> None:
        size, kind, _ = self._alive.pop(key)
        self.now[kind] -= size


def _described(value: Any) -> Any:
    """What decides the shape of a result: shape, strides and dtype of a tensor, and anything else itself."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype, value.device
    return value if value is None or isinstance(value, torch.dtype | torch.device) else (type(value), value)


def _made(described: Any) -> Tensor | None:
    if described is None:
        return None
    shape, stride, dtype, device = described
    return torch.empty_strided(shape, stride, dtype=dtype, device=device)


class _GpuFunctions(TorchFunctionMode):
    """Attention and autocast as a GPU has them."""

    def __init__(self, recorder: _Recorder, *, autocast: bool):
        super().__init__()
        self._recorder = recorder
        self._autocast = autocast
        self._cast: dict[int, Tensor] = {}  # weights, by id, until the end of the pass
        self._keeps = True

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is functional.scaled_dot_product_attention:
            return self._attention(*args, **kwargs)
        if self._autocast and function in _LOW:
            args, kwargs = tree_map(self._to_low, args), tree_map(self._to_low, kwargs)
        elif self._autocast and function in _HIGH:
            args, kwargs = tree_map(_to_float32, args), tree_map(_to_float32, kwargs)
        return function(*args, **kwargs)

    def _to_low(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dtype != torch.float32:
            return value
        if not isinstance(value, nn.Parameter):
            return value.to(torch.bfloat16)
        if id(value) in self._cast:
            return self._cast[id(value)]
        cast = value.to(torch.bfloat16)
        self._recorder.recast(cast, "copies")
        if value.requires_grad and self._keeps:  # of frozen weights, the backward pass alone keeps copies
            self._cast[id(value)] = cast
        return cast

    def forget(self) -> None:
        """Keep no copies from now on: activations are recomputed block by block, and a block has a weight once."""
        self._cast, self._keeps = {}, False

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        del enable_gqa
        if self._autocast:
            query, key, value = (self._to_low(one) for one in (query, key, value))
        if attn_mask is None and query.dtype == torch.bfloat16:
            size = query.shape[-1]
            padded = [functional.pad(one, (0, -size % 8)) if size % 8 else one for one in (query, key, value)]
            found: Tensor = aten._scaled_dot_product_flash_attention(*padded, dropout_p, is_causal, scale=scale)[0]
            return found[..., :size] if size % 8 else found
        bias = attn_mask
        if bias is not None:
            if bias.dtype == torch.bool:
                bias = torch.zeros_like(bias, dtype=query.dtype).masked_fill(~bias, float("-inf"))
            bias = bias.to(query.dtype).expand(*query.shape[:2], query.shape[2], key.shape[2])
        seen: Tensor = aten._scaled_dot_product_efficient_attention(
            query, key, value, bias, torch.is_grad_enabled(), dropout_p, is_causal, scale=scale
        )[0]
        return seen


def _to_float32(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype == torch.bfloat16 else value

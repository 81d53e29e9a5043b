"""Traced FSDP: what FSDP2 gathers and reduces around the blocks of a network while a pass of it is traced.

| in | held beside shards and activations |
|---|---|
| a block's forward | its weights, and the buffer that they came in until those of the next block have come |
| a block's backward | its weights and gradients, a buffer with the weights of the block before it, and another |
| | in which the gradients of the block behind it are reduced |
| all of a pass | the weights outside of blocks, and their gradients as soon as they are made |

A block whose inputs need no gradient keeps its weights until the end of the pass. As torch 2.13 does all this;
`benchmarks/plan_trackers.py` compares it with what FSDP2 itself holds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

_REDUCED_BYTES = 4  # of a number of a gradient: what is trained is float32


@dataclass(frozen=True, kw_only=True)
class Shards:
    """How FSDP shards a network."""

    blocks: Sequence[nn.Module]
    ranks: int
    element_bytes: int  # of a gathered number


@dataclass(eq=False)
class _Group:
    """What is gathered at once: a block, or all that is outside of blocks."""

    parameters: list[nn.Parameter]
    weights: Tensor | None = None
    buffer: Tensor | None = None  # in which the weights arrive
    forwards: list[int] = field(default_factory=list)  # their places in the order of all; a block may have several
    in_backward: bool = False


class TracedFSDP:
    """Holds memory as FSDP2 does; `hold` makes a tensor of so many bytes, which are held until it is dropped."""

    def __init__(self, model: nn.Module, shards: Shards, hold: Callable[[int], Tensor]):
        self._shards = shards
        self._hold = hold
        blocks = {block: _Group(list(block.parameters())) for block in shards.blocks}
        inside = {id(value) for group in blocks.values() for value in group.parameters}
        self._root = _Group([value for value in model.parameters() if id(value) not in inside])
        self._groups = [self._root, *blocks.values()]
        self._order: list[_Group] = []  # of forward passes
        self._arrived: Tensor | None = None  # the buffer of the last weights
        self._reducing: Tensor | None = None
        self._hooks: list[Any] = []
        for module, group in ((model, self._root), *blocks.items()):
            enter, leave = partial(self._enter_forward, group), partial(self._leave_forward, group)
            self._hooks.append(module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True))
            self._hooks.append(module.register_forward_hook(leave))

    def finish(self) -> None:
        """At the end of a backward pass: reduce what has not been reduced."""
        for group in self._groups:
            self._leave_backward(group)
        self._reducing = None

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _enter_forward(self, group: _Group, module: nn.Module, args: Any, kwargs: Any) -> Any:
        buffer = self._gathered(group)
        self._arrived = None
        group.weights = self._gathered(group)
        self._arrived = buffer
        return tree_map(partial(self._marked, group), (args, kwargs))

    def _marked(self, group: _Group, value: Any) -> Any:
        """An input of a block that tells when its gradient is there."""
        needs_gradient = isinstance(value, Tensor) and value.requires_grad and torch.is_grad_enabled()
        if not needs_gradient:
            return value
        return _AfterBackward.apply(value, lambda: self._leave_backward(group))  # type: ignore[no-untyped-call]

    def _leave_forward(self, group: _Group, module: nn.Module, args: Any, output: Any) -> None:
        if group is self._root:
            self._arrived = None
        else:
            group.weights = None
        group.forwards.append(len(self._order))
        self._order.append(group)
        for value in tree_leaves(output):
            if isinstance(value, Tensor) and value.requires_grad:
                hook = partial(self._enter_backward, group)
                value.register_hook(hook)  # type: ignore[no-untyped-call]

    def _enter_backward(self, group: _Group, gradient: Tensor) -> None:
        if group.in_backward or not group.forwards:
            return
        group.in_backward = True
        if group.weights is None:
            group.buffer = group.buffer if group.buffer is not None else self._gathered(group)
            group.weights = self._gathered(group)
            group.buffer = None
        place = group.forwards.pop()
        before = self._order[place - 1] if place else None
        if before is not None and before.weights is None:
            before.buffer = self._gathered(before)

    def _leave_backward(self, group: _Group) -> None:
        group.weights = group.buffer = None
        group.in_backward = False
        trained = [value for value in group.parameters if value.grad is not None]
        self._reducing = None
        if trained:
            size = _REDUCED_BYTES * self._shard(trained)
            self._reducing = self._hold(self._shards.ranks * size)
            for value in trained:
                value.grad = None
            self._hold(size)  # the result, which is added to a shard of the gradients

    def _gathered(self, group: _Group) -> Tensor:
        return self._hold(self._shards.ranks * self._shard(group.parameters) * self._shards.element_bytes)

    def _shard(self, parameters: list[nn.Parameter]) -> int:
        return sum(shard_numel(value, self._shards.ranks) for value in parameters)


def shard_numel(value: Tensor, ranks: int) -> int:
    """How many numbers of a tensor the first rank has: FSDP cuts it between rows, and pads all other shards to that."""
    rows = value.shape[0] if value.dim() else 1
    return -(-rows // ranks) * (value.numel() // max(rows, 1))


class _AfterBackward(torch.autograd.Function):
    """Hands a tensor on, and calls something as soon as its gradient is there."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, call: Callable[[], None]) -> Tensor:
        ctx.call = call
        return value

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.call()
        return gradient, None

"""Module blocks: the parts of a module that FSDP gathers, or activation checkpointing recomputes, one at a time."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from understudy.core.suggestion import did_you_mean
from understudy.training.distributed.errors import RanksError


def find_blocks(module: nn.Module, names: Sequence[str]) -> list[nn.Module]:
    """The submodules of the classes with these names; without names, the elements of the outermost ModuleLists.

    A ModuleList with a forward pass of its own, such as an MLP, stays whole: it need not call its elements as modules,
    and what FSDP and `compile` put around an element happens in that call alone.
    """
    kinds = {type(part).__name__ for part in module.modules()}
    for name in names:
        if name not in kinds:
            advice = did_you_mean(name, kinds, f"there are {', '.join(sorted(kinds))}")
            raise RanksError(f"blocks: the module has no part of class {name!r}; {advice}")
    found: list[nn.Module] = []

    def walk(part: nn.Module) -> None:
        is_list = isinstance(part, nn.ModuleList) and type(part).forward is nn.Module.forward
        for child in part.children():
            inside = type(child).__name__ in names if names else is_list
            if inside:
                found.append(child)
            else:
                walk(child)

    walk(module)
    return found


def checkpoint_activations(blocks: Sequence[nn.Module]) -> None:
    """Keep only the inputs of each block, and recompute its activations in the backward pass."""
    for block in blocks:
        block.forward = functools.partial(_checkpointed, block.forward)


def _checkpointed(forward: Any, *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)

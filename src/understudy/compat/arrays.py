"""Converts arrays of torch, jax and others to numpy, and batches to a device of theirs, which alone imports them."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import numpy as np

from understudy.core import ArraySpec, Spec, SpecError
from understudy.core import tree as trees
from understudy.core.spec import describe
from understudy.core.tree import AnyTree

Array = np.ndarray[Any, Any]


def to_numpy(value: Any, path: str) -> Any:
    """The value as a numpy array; numbers, text and lists are returned unchanged."""
    if isinstance(value, np.ndarray | np.generic | bool | int | float | str | list | tuple):
        return value
    if hasattr(value, "detach") and hasattr(value, "cpu"):  # a torch tensor, maybe on a device, maybe with a gradient
        value = value.detach().cpu()
    try:
        return np.asarray(value.numpy() if hasattr(value, "numpy") else value)
    except TypeError as error:  # numpy has no bfloat16
        raise SpecError(f"{path}: numpy cannot hold it ({error}); convert it first, for example to float32") from None


def tree_to_numpy(tree: AnyTree, path: str) -> AnyTree:
    return trees.map_with_paths(lambda name, leaf: to_numpy(leaf, name), tree, path)


def conform(spec: Spec, value: AnyTree, path: str) -> AnyTree:
    """The value in the dtypes of the spec. Floats are rounded to the spec's precision; nothing else is converted."""
    if _fits(spec.tree, value):
        return value
    given = trees.flatten(tree_to_numpy(value, path), path)
    for name, leaf in spec.leaves(path):
        if name in given:
            given[name] = _round(leaf, given[name])
    return trees.unflatten(trees.below(spec.check(trees.unflatten(trees.below(given, path)), path), path))


def _fits(wanted: AnyTree, value: AnyTree) -> bool:
    """Whether the value needs no conversion, which is the common case."""
    if isinstance(wanted, ArraySpec):
        return wanted.fits(value)
    return (
        type(value) is dict
        and len(value) == len(wanted)
        and all(name in value and _fits(child, value[name]) for name, child in wanted.items())
    )


def _round(leaf: ArraySpec, value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic) and leaf.dtype.startswith("float") and value.dtype.kind in "fiu":
        return np.asarray(value, leaf.numpy_dtype)
    return value


def number(value: Any, path: str) -> float:
    """The value as one float; it may be an array with one element."""
    array = np.asarray(to_numpy(value, path))
    if array.size != 1 or array.dtype.kind not in "bfiu":
        raise SpecError(f"{path}: expected one number, got {describe(value)}; pass a float")
    return float(array.item())


def place(tree: AnyTree, device: Any) -> AnyTree:
    """The tree on a device: tensors for a torch.device or its name, otherwise what jax.device_put makes."""
    if isinstance(device, str) or type(device).__module__.partition(".")[0] == "torch":
        torch = importlib.import_module("torch")
        return trees.map_leaves(lambda leaf: torch.from_numpy(np.ascontiguousarray(leaf)).to(device), tree)
    try:
        jax = importlib.import_module("jax")
    except ImportError:
        raise SpecError(
            f"device: expected a device of torch, its name, or one of jax, got {describe(device)}; jax is not installed"
        ) from None
    return jax.device_put(tree, device)


def freeze(batch: AnyTree) -> AnyTree:
    """The batch as a FrozenDict of flax, which agents of HIL-SERL take, in a program that uses flax; else unchanged."""
    frozen_dict = sys.modules.get("flax.core.frozen_dict")
    return batch if frozen_dict is None else frozen_dict.freeze(batch)

"""Published weights of any nesting: lists, tuples, numbers and empty dicts arrive as what they were.

The service carries nested dicts of arrays. What is none travels as a description beside them, in the metadata.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from understudy.compat.arrays import to_numpy
from understudy.core import StoreError
from understudy.core import tree as trees
from understudy.core.spec import describe

STRUCTURE = "structure"  # in the metadata of a version


def pack_weights(weights: Any) -> tuple[Any, dict[str, str]]:
    """The arrays by number and the description from which `unpack_weights` builds the weights; plain dicts stay."""
    if _is_plain(weights):
        return trees.map_with_paths(lambda path, leaf: to_numpy(leaf, path), weights, "params"), {}
    arrays: dict[str, Any] = {}
    described = _describe(weights, arrays, "params")
    if not arrays:
        raise StoreError(f"params: expected at least one array, got {describe(weights)}; publish weights")
    return arrays, {STRUCTURE: json.dumps(described)}


def unpack_weights(tree: Any, metadata: Mapping[str, str]) -> Any:
    """The weights that were published."""
    return _build(json.loads(metadata[STRUCTURE]), tree) if STRUCTURE in metadata else tree


def _is_plain(weights: Any) -> bool:
    """Whether it is nested dicts of arrays, with names that the service takes."""
    if isinstance(weights, Mapping):
        names = all(isinstance(name, str) and name and trees.SEPARATOR not in name for name in weights)
        return bool(weights) and names and all(_is_plain(child) for child in weights.values())
    return not isinstance(weights, list | tuple | str | bool | int | float | None)


def _describe(weights: Any, arrays: dict[str, Any], path: str) -> Any:
    if isinstance(weights, Mapping):
        return {"dict": [[n, _describe(child, arrays, f"{path}/{n}")] for n, child in weights.items()]}
    if isinstance(weights, list | tuple):
        children = [_describe(child, arrays, f"{path}/{n}") for n, child in enumerate(weights)]
        return {"list" if isinstance(weights, list) else "tuple": children}
    if weights is None or isinstance(weights, str | bool | int | float):
        return {"value": weights}
    name = str(len(arrays))
    arrays[name] = to_numpy(weights, path)
    return {"array": name}


def _build(described: dict[str, Any], arrays: Mapping[str, Any]) -> Any:
    ((kind, value),) = described.items()
    if kind == "dict":
        return {name: _build(child, arrays) for name, child in value}
    if kind in ("list", "tuple"):
        children = [_build(child, arrays) for child in value]
        return children if kind == "list" else tuple(children)
    return arrays[value] if kind == "array" else value

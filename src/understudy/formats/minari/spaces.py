"""Gymnasium's spaces in Minari's metadata.json: bounds of actions, and which fields are JPEG images."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from understudy.core import tree as trees
from understudy.core.spec import Bound
from understudy.formats.format import FormatError

MAX_DEPTH = 12


def leaves(text: Any, name: str) -> dict[str, Mapping[str, Any]]:
    """The leaf spaces by the path of their dataset; items of a Tuple are _index_0, _index_1, ..."""
    try:
        return dict(_leaves(json.loads(text), "", 0))
    except (TypeError, ValueError, LookupError, AttributeError, RecursionError) as error:
        raise FormatError(f"{name}: is not a space ({error}); metadata.json is damaged") from None


def _leaves(space: Any, path: str, depth: int) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if depth > MAX_DEPTH:
        raise ValueError("nested too deeply")
    if space["type"] == "Dict":
        for name, child in space["subspaces"].items():
            yield from _leaves(child, trees.join(path, name), depth + 1)
    elif space["type"] == "Tuple":
        for index, child in enumerate(space["subspaces"]):
            yield from _leaves(child, trees.join(path, f"_index_{index}"), depth + 1)
    else:
        yield path, space


def episode_path(path: str) -> str:
    """The path in an Episode, where items of a Tuple are 0, 1, ..."""
    return trees.SEPARATOR.join(part.removeprefix("_index_") for part in path.split(trees.SEPARATOR))


def is_image(space: Mapping[str, Any]) -> bool:
    """Whether Minari treats a space as an image, which it may store as JPEG."""
    try:
        shape = space["shape"]
        if not all(type(size) is int and 0 < size < 2**16 for size in shape):
            return False
        return (
            space["type"] == "Box"
            and space["dtype"] == "uint8"
            and len(shape) in (2, 3)
            and min(shape[:2]) >= 32
            and bool(np.all(np.asarray(space["low"]) == 0))
            and bool(np.all(np.asarray(space["high"]) == 255))
        )
    except (LookupError, TypeError, ValueError):
        return False


def bounds(space: Mapping[str, Any], shape: tuple[int, ...]) -> tuple[Bound, Bound]:
    """The lowest and highest value, or one for each element of the last dimension; None where there is none."""
    try:
        if space["type"] == "Discrete":
            return float(space["start"]), float(space["start"] + space["n"] - 1)
        if space["type"] != "Box":
            return None, None
        return _bound(space["low"], shape), _bound(space["high"], shape)
    except (LookupError, TypeError, ValueError, OverflowError):
        return None, None


def _bound(given: Any, shape: tuple[int, ...]) -> Bound:
    values = np.asarray(given, np.float64)
    if not np.isfinite(values).all() or not values.size:
        return None
    if (values == values.flat[0]).all():
        return float(values.flat[0])
    return tuple(values.tolist()) if values.shape == shape and len(shape) == 1 else None

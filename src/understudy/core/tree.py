"""Trees: nested dicts with string keys whose leaves are arrays. In flat form: one dict from path to leaf."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias, TypeVar

import numpy as np

from understudy.core.errors import SpecError

Leaf = TypeVar("Leaf")
New = TypeVar("New")

Nested: TypeAlias = "Leaf | Mapping[str, Nested[Leaf]]"
# Of arrays. Two kinds of leaves are no arrays, and are looked at in flat form: text is a str, a ragged column a list.
Tree: TypeAlias = "Nested[np.ndarray[Any, Any]]"
AnyTree: TypeAlias = Any  # of what another library gives: leaves of any type, also in tuples and lists

SEPARATOR = "/"


def join(prefix: str, name: str) -> str:
    """The path of `name` below `prefix`, either of which may be empty."""
    return f"{prefix}{SEPARATOR}{name}" if prefix and name else prefix or name


def leaves(tree: Nested[Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Walk the leaves with their paths, in the order of the dicts."""
    return iter(flatten(tree, prefix).items())


def flatten(tree: Nested[Any], prefix: str = "") -> dict[str, Any]:
    """The tree as one dict from path to leaf; a bare leaf has the path `prefix`."""
    flat: dict[str, Any] = {}
    _flatten_into(flat, tree, prefix)
    return flat


def _flatten_into(flat: dict[str, Any], tree: Nested[Any], prefix: str) -> None:
    if isinstance(tree, np.ndarray) or not isinstance(tree, Mapping):  # an array is told at once, a Mapping slowly
        flat[prefix] = tree
        return
    for name, child in tree.items():
        if not isinstance(name, str) or not name or SEPARATOR in name:
            raise SpecError(
                f"{prefix or 'tree'}: field names are non-empty strings without '{SEPARATOR}', got {name!r}; rename it"
            )
        _flatten_into(flat, child, f"{prefix}{SEPARATOR}{name}" if prefix else name)


def unflatten(flat: Mapping[str, Leaf]) -> Nested[Leaf]:
    """The tree whose `flatten` is `flat`; the single path '' gives a bare leaf."""
    if set(flat) == {""}:
        return flat[""]
    tree: dict[str, Any] = {}
    for path, leaf in flat.items():
        *parents, name = path.split(SEPARATOR)
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = leaf
    return tree


def below(flat: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """The part of a flat tree under `prefix`, with the prefix taken off; an exact match gets the path ''."""
    start = prefix + SEPARATOR
    found = {path[len(start) :]: leaf for path, leaf in flat.items() if path.startswith(start)}
    if prefix in flat:
        found[""] = flat[prefix]
    return found


def map_leaves(function: Callable[[Any], New], tree: Nested[Any]) -> Nested[New]:
    """The same tree with each leaf replaced by `function(leaf)`."""
    if isinstance(tree, Mapping):
        return {name: map_leaves(function, child) for name, child in tree.items()}
    return function(tree)


def map_with_paths(function: Callable[[str, Any], New], tree: Nested[Any], prefix: str = "") -> Nested[New]:
    """The same tree with each leaf replaced by `function(path, leaf)`."""
    if isinstance(tree, Mapping):
        return {name: map_with_paths(function, child, join(prefix, name)) for name, child in tree.items()}
    return function(prefix, tree)


def equal(a: Nested[Any], b: Nested[Any]) -> bool:
    """Whether two trees have the same paths and bit-equal leaves (shape, dtype and bytes)."""
    flat_a, flat_b = flatten(a), flatten(b)
    return flat_a.keys() == flat_b.keys() and all(equal_leaf(leaf, flat_b[path]) for path, leaf in flat_a.items())


def equal_leaf(a: Any, b: Any) -> bool:
    """Whether two arrays, texts, or ragged columns (lists of either) are bit-equal."""
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(equal_leaf(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, list | str) or isinstance(b, list | str):
        return type(a) is type(b) and bool(a == b)
    x, y = np.asarray(a), np.asarray(b)
    return x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes()

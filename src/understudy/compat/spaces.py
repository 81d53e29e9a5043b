"""Gymnasium spaces as specs, recognized by their attributes (`spaces`, `shape`, `dtype`) and not by their class."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from understudy.core import ArraySpec, Spec, SpecError
from understudy.core.spec import describe
from understudy.core.tree import AnyTree, join


def spec_of(space: Any, path: str) -> Spec:
    """The spec of a space; a Spec, an ArraySpec or a dict of them works too. Bounds of spaces are not checked."""
    return space if isinstance(space, Spec) else Spec(_tree(space, path))


def _tree(space: Any, path: str) -> AnyTree:
    if isinstance(space, ArraySpec):
        return space
    if isinstance(space, Spec):
        return space.tree
    inner = space if isinstance(space, Mapping) else getattr(space, "spaces", None)
    if isinstance(inner, Mapping):
        return {name: _tree(child, join(path, name)) for name, child in inner.items()}
    shape, dtype = getattr(space, "shape", None), getattr(space, "dtype", None)
    if inner is not None or shape is None or dtype is None:
        raise SpecError(
            f"{path}: expected a space of arrays or a dict of them, got {describe(space)}; "
            f"pass an understudy.core.Spec instead"
        )
    return ArraySpec(shape=tuple(shape), dtype=np.dtype(dtype).name)

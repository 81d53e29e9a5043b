"""SharedArrays: memory that a worker and its caller share, laid out by the spec of the world.

It holds one observation, the actions of a block, and their rewards and flags. Ragged fields (text, lists) are sent in
the messages instead. The two sides take turns: the caller writes actions before it sends a request, the worker writes
the results before it answers. The caller copies what it reads, so its arrays stay valid when the worker continues or
dies.

The memory has no name: it is a file without a directory entry, passed on as a file descriptor, and the system frees it
when the last process closes it. Its size is sealed, so that a worker cannot truncate it while the caller reads.
"""

from __future__ import annotations

import fcntl
import math
import mmap
import os
import tempfile
from collections.abc import Mapping
from typing import Any

import numpy as np

from understudy.core import AnyTree, Spec, StepSpec
from understudy.core import tree as trees

Array = np.ndarray[Any, Any]

_ALIGN_BYTES = 64


def create_memory() -> int:
    """Create shared memory of size 0 and return its file descriptor."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("understudy-worker", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def size_memory(descriptor: int, size_bytes: int) -> None:
    """Set the size of new memory and seal it."""
    os.ftruncate(descriptor, size_bytes)
    if hasattr(fcntl, "F_ADD_SEALS"):
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)


class Layout:
    """The offset, shape and dtype of each column."""

    def __init__(self, spec: StepSpec, block_steps: int):
        self.spec = spec
        self.block_steps = block_steps
        self.columns: dict[str, tuple[int, tuple[int, ...], np.dtype[Any]]] = {}  # offset, shape, dtype
        self.size_bytes = 0
        self._add_column("request", (), np.dtype("uint64"))
        for path, leaf in spec.observation.leaves("observation"):
            if not leaf.ragged:
                self._add_column(path, leaf.fixed_shape, leaf.numpy_dtype)
        for path, leaf in spec.action.leaves("action"):
            if not leaf.ragged:
                self._add_column(path, (block_steps, *leaf.fixed_shape), leaf.numpy_dtype)
        # Worlds return Python floats; they are rounded when they are stored, not between processes.
        exact = np.dtype("float64") if spec.reward.numpy_dtype.kind == "f" else spec.reward.numpy_dtype
        self._add_column("reward", (block_steps, *spec.reward.fixed_shape), exact)
        self._add_column("flags", (block_steps, 3), np.dtype("uint8"))  # terminated, truncated, success

    def _add_column(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self.columns[name] = (self.size_bytes, shape, dtype)
        size = dtype.itemsize * math.prod(shape)
        self.size_bytes += -(-size // _ALIGN_BYTES) * _ALIGN_BYTES


class SharedArrays:
    """The columns of a layout as arrays in mapped memory."""

    def __init__(self, layout: Layout, descriptor: int):
        memory = mmap.mmap(descriptor, layout.size_bytes)
        columns = {
            name: np.frombuffer(memory, dtype, math.prod(shape), offset).reshape(shape)
            for name, (offset, shape, dtype) in layout.columns.items()
        }
        self._request = columns["request"]
        self.reward = columns["reward"]  # [block_steps, ...]
        self.flags = columns["flags"]  # [block_steps, 3] uint8
        self._observation = _Columns(layout.spec.observation, columns, "observation")
        self._action = _Columns(layout.spec.action, columns, "action")

    @property
    def request(self) -> int:
        """Number of the request that was answered last."""
        return int(self._request)

    @request.setter
    def request(self, number: int) -> None:
        self._request[()] = number

    def write_observation(self, flat: Mapping[str, Any]) -> dict[str, Any]:
        """Copy a checked observation into the memory; returns its ragged leaves, which are not stored here."""
        for path, column in self._observation.fixed.items():
            column[...] = flat[path]
        return {path: flat[path] for path in self._observation.ragged}

    def read_observation(self, ragged: Mapping[str, Any]) -> AnyTree:
        """A copy of the observation, with its ragged leaves added."""
        return self._observation.read(..., ragged)

    def write_action(self, row: int, flat: Mapping[str, Any]) -> dict[str, Any]:
        """Copy a checked action into the memory; returns its ragged leaves, which are not stored here."""
        for path, column in self._action.fixed.items():
            column[row] = flat[path]
        return {path: flat[path] for path in self._action.ragged}

    def read_action(self, row: int, ragged: Mapping[str, Any]) -> AnyTree:
        """A copy of the action, with its ragged leaves added."""
        return self._action.read(row, ragged)


class _Columns:
    """The columns of one tree that are in shared memory, and the paths of its ragged leaves, which are not."""

    def __init__(self, spec: Spec, columns: Mapping[str, Array], name: str):
        paths = trees.map_with_paths(lambda path, leaf: path, spec.tree, name)
        self.fixed = {path: columns[path] for _, path in trees.leaves(paths) if path in columns}
        self.ragged = [path for _, path in trees.leaves(paths) if path not in columns]
        self._tree = trees.map_leaves(lambda path: columns.get(path, path), paths)

    def read(self, row: Any, ragged: Mapping[str, Any]) -> AnyTree:
        return _read(self._tree, row, ragged)


def _read(tree: AnyTree, row: Any, ragged: Mapping[str, Any]) -> AnyTree:
    """Copy one row of a tree of columns; a ragged leaf is given as its path. Optimised for speed."""
    if type(tree) is dict:
        return {name: _read(child, row, ragged) for name, child in tree.items()}
    return ragged[tree] if type(tree) is str else tree[row].copy()

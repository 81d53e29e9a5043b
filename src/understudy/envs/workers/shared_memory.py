"""SharedArrays: the memory that a worker and its caller share, laid out by the spec of the world.

It holds one observation, the actions of a block, and what came of each of them. Ragged fields (text, lists) have no
place in it and travel in the messages. The two sides take turns: the caller writes actions before it sends a request,
the worker writes the rest before it answers. Whatever the caller reads it copies, so that what it was given is its own
and stays as it is when the worker goes on, or dies.

The memory has no name: it is a file without a directory entry, handed on as a descriptor, and the system frees it
with the last process that has it. It is sealed to its size, so that no worker can cut it off under its caller.
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
    """A descriptor of shared memory of size 0."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("understudy-worker", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def size_memory(descriptor: int, size_bytes: int) -> None:
    """Give new memory its size, for ever."""
    os.ftruncate(descriptor, size_bytes)
    if hasattr(fcntl, "F_ADD_SEALS"):
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)


class Layout:
    """Where each column lies."""

    def __init__(self, spec: StepSpec, block_steps: int):
        self.spec = spec
        self.block_steps = block_steps
        self.places: dict[str, tuple[int, tuple[int, ...], np.dtype[Any]]] = {}  # offset, shape, dtype
        self.size_bytes = 0
        self._place("request", (), np.dtype("uint64"))
        for path, leaf in spec.observation.leaves("observation"):
            if not leaf.ragged:
                self._place(path, leaf.fixed_shape, leaf.numpy_dtype)
        for path, leaf in spec.action.leaves("action"):
            if not leaf.ragged:
                self._place(path, (block_steps, *leaf.fixed_shape), leaf.numpy_dtype)
        # Worlds give Python floats; whoever stores them rounds them, not the way from one process to another.
        exact = np.dtype("float64") if spec.reward.numpy_dtype.kind == "f" else spec.reward.numpy_dtype
        self._place("reward", (block_steps, *spec.reward.fixed_shape), exact)
        self._place("flags", (block_steps, 3), np.dtype("uint8"))  # terminated, truncated, success

    def _place(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self.places[name] = (self.size_bytes, shape, dtype)
        size = dtype.itemsize * math.prod(shape)
        self.size_bytes += -(-size // _ALIGN_BYTES) * _ALIGN_BYTES


class SharedArrays:
    """The columns of a layout, mapped."""

    def __init__(self, layout: Layout, descriptor: int):
        memory = mmap.mmap(descriptor, layout.size_bytes)
        columns = {
            name: np.frombuffer(memory, dtype, math.prod(shape), offset).reshape(shape)
            for name, (offset, shape, dtype) in layout.places.items()
        }
        self._request = columns["request"]
        self.reward = columns["reward"]  # [block_steps, ...]
        self.flags = columns["flags"]  # [block_steps, 3] uint8
        self._observation = _Columns(layout.spec.observation, columns, "observation")
        self._action = _Columns(layout.spec.action, columns, "action")

    @property
    def request(self) -> int:
        """The number of the request that was answered last."""
        return int(self._request)

    @request.setter
    def request(self, number: int) -> None:
        self._request[()] = number

    def write_observation(self, flat: Mapping[str, Any]) -> dict[str, Any]:
        """Copy in a checked observation; gives back its ragged leaves, which are not here."""
        for path, column in self._observation.fixed.items():
            column[...] = flat[path]
        return {path: flat[path] for path in self._observation.ragged}

    def read_observation(self, ragged: Mapping[str, Any]) -> AnyTree:
        """A copy of the observation, with the ragged leaves put in."""
        return self._observation.read(..., ragged)

    def write_action(self, row: int, flat: Mapping[str, Any]) -> dict[str, Any]:
        """Copy in a checked action; gives back its ragged leaves, which are not here."""
        for path, column in self._action.fixed.items():
            column[row] = flat[path]
        return {path: flat[path] for path in self._action.ragged}

    def read_action(self, row: int, ragged: Mapping[str, Any]) -> AnyTree:
        """A copy of the action, with the ragged leaves put in."""
        return self._action.read(row, ragged)


class _Columns:
    """The columns of one tree, those that are here and the paths of those that are not."""

    def __init__(self, spec: Spec, columns: Mapping[str, Array], name: str):
        paths = trees.map_with_paths(lambda path, leaf: path, spec.tree, name)
        self.fixed = {path: columns[path] for _, path in trees.leaves(paths) if path in columns}
        self.ragged = [path for _, path in trees.leaves(paths) if path not in columns]
        self._tree = trees.map_leaves(lambda path: columns.get(path, path), paths)

    def read(self, row: Any, ragged: Mapping[str, Any]) -> AnyTree:
        return _read(self._tree, row, ragged)


def _read(tree: AnyTree, row: Any, ragged: Mapping[str, Any]) -> AnyTree:
    """Copies of one row of a tree of columns; a path stands where the leaf is ragged. Made for speed."""
    if type(tree) is dict:
        return {name: _read(child, row, ragged) for name, child in tree.items()}
    return ragged[tree] if type(tree) is str else tree[row].copy()

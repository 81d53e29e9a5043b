"""Memory for the large arrays of batches: that of an array which nobody holds any more is used for the next one.

    frames = empty_array((256, 128, 128, 3), np.uint8)

New memory must be zeroed by the system, which costs about as much as filling a batch. An array, its views and tensors
that share it keep its memory; when the last of them is gone, it is free for the next array of the same size.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

MIN_BYTES = 2**20  # smaller arrays come from numpy
MAX_FREE_BYTES = 2**28  # that are kept for the next arrays


class MemoryPool:
    """Free blocks of memory by their size, the newest last."""

    def __init__(self, max_free_bytes: int = MAX_FREE_BYTES):
        self._max_free_bytes = max_free_bytes
        self._free: list[Array] = []
        self.renew_lock()

    def renew_lock(self) -> None:
        """A lock that nobody holds, for a process that was forked while another thread held it."""
        self._lock = threading.RLock()  # the garbage collector may give a block back while this thread holds it

    def empty(self, shape: Sequence[int], dtype: Any) -> Array:
        """As numpy.empty."""
        dtype = np.dtype(dtype)
        size = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
        if size < MIN_BYTES or dtype.hasobject:
            return np.empty(shape, dtype)
        lent = _Lent(self, self._take(size), tuple(shape), dtype)
        return np.asarray(lent)  # its base is `lent`, as is that of all its views

    @property
    def num_free_bytes(self) -> int:
        with self._lock:
            return sum(block.nbytes for block in self._free)

    def _take(self, size: int) -> Array:
        with self._lock:
            found = next((block for block in reversed(tuple(self._free)) if block.nbytes == size), None)
            # A block that is given back meanwhile, in this thread, may get lost; none is ever lent twice.
            self._free = [block for block in self._free if block is not found]
        return np.empty(size, np.uint8) if found is None else found

    def give_back(self, block: Array) -> None:
        with self._lock:
            self._free.append(block)
            while self.num_free_bytes > self._max_free_bytes:
                self._free = self._free[1:]


class _Lent:
    """What keeps a block from the pool until no array uses it."""

    def __init__(self, pool: MemoryPool, block: Array, shape: tuple[int, ...], dtype: np.dtype[Any]):
        self._pool = pool
        self._block = block
        self.__array_interface__ = {**block.__array_interface__, "shape": shape, "typestr": dtype.str}

    def __del__(self) -> None:
        self._pool.give_back(self._block)


_POOL = MemoryPool()
os.register_at_fork(after_in_child=_POOL.renew_lock)


def empty_array(shape: Sequence[int], dtype: Any) -> Array:
    """As numpy.empty, of the memory that all batches of this process share."""
    return _POOL.empty(shape, dtype)

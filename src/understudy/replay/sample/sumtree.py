"""Sum tree: finds the item at a position in the running sum of weights, and changes weights, in logarithmic time.

All calls take arrays: some hundred look-ups cost a few array operations for each level.
"""

from __future__ import annotations

import numpy as np

from understudy.replay.format.arrays import Array, DType

FANOUT = 16


class SumTree:
    """Weights of dtype int64 or float64. Level 0 holds them; each level above holds the sums of FANOUT neighbours."""

    def __init__(self, dtype: type[np.int64] | type[np.float64] = np.int64):
        self._dtype: DType = np.dtype(dtype)
        self._levels: list[Array] = [np.zeros(FANOUT, self._dtype)]
        self._length = 0

    def __len__(self) -> int:
        return self._length

    @property
    def total(self) -> float:
        """The sum of all weights."""
        return self._levels[-1].sum().item()  # type: ignore[no-any-return]

    @property
    def num_bytes(self) -> int:
        return sum(level.nbytes for level in self._levels)

    def weights(self, ids: Array) -> Array:
        return self._levels[0][ids]

    def append(self, weights: Array) -> None:
        """Add weights at the end."""
        start = self._length
        self._length += len(weights)
        self._grow(self._length)
        self.set(np.arange(start, self._length), weights)

    def set(self, ids: Array, weights: Array) -> None:
        """Change some weights; of an id that is given twice, the last weight counts."""
        if len(ids) == 0:
            return
        self._levels[0][ids] = weights
        parents = np.unique(ids // FANOUT)
        for below, level in zip(self._levels[:-1], self._levels[1:], strict=True):
            level[parents] = below.reshape(-1, FANOUT)[parents].sum(axis=1)
            parents = np.unique(parents // FANOUT)

    def find(self, targets: Array) -> tuple[Array, Array]:
        """For each target in [0, total): the id whose share of the running sum it falls into, and how far into it."""
        rest = np.array(targets, self._dtype)
        ids = np.zeros(len(rest), np.int64)
        lanes = np.arange(len(rest))
        for level in reversed(self._levels):
            sums = level.reshape(-1, FANOUT)[ids].cumsum(axis=1)
            child = (sums <= rest[:, None]).sum(axis=1)
            if self._dtype.kind == "f":  # rounding may carry a target past the end
                child = np.minimum(child, (sums < sums[:, -1:]).sum(axis=1))
            rest -= np.where(child > 0, sums[lanes, child - 1], 0).astype(self._dtype)
            ids = ids * FANOUT + child
        return ids, rest

    def _grow(self, length: int) -> None:
        """Make room for `length` weights: each level a multiple of FANOUT, the top one FANOUT long."""
        if length <= len(self._levels[0]):
            return
        size = FANOUT
        while size < length:
            size *= 2
        number = 0
        while True:
            size = -(-size // FANOUT) * FANOUT
            if number == len(self._levels):
                self._levels.append(np.zeros(0, self._dtype))
            level = self._levels[number]
            if len(level) < size:
                self._levels[number] = np.concatenate([level, np.zeros(size - len(level), self._dtype)])
            if size == FANOUT:
                break
            size //= FANOUT
            number += 1
        for below, number in zip(self._levels[:-1], range(1, len(self._levels)), strict=True):
            self._levels[number][: len(below) // FANOUT] = below.reshape(-1, FANOUT).sum(axis=1)

"""Mapped segments: many memory-mapped files as one array of bytes, so that numpy takes rows of all of them at once.

The array spans the addresses from the lowest mapping to the highest, also those between the mappings, which belong to
others or to nobody. Reading there would crash the process or give foreign bytes. Therefore rows are first turned into
`RowAddresses` by `locate`, which raises an IndexError unless every row lies inside the columns of a mapped segment, and
`take` accepts nothing else.

Why it pays: a batch of 256 random steps touches about as many segments as there are, with a few rows each. One indexing
call for each segment and field costs more than the copying; here a field of the whole batch is one call.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import NamedTuple

import numpy as np

from understudy.replay.format.arrays import Array
from understudy.replay.format.segment import Segment


class RowAddresses(NamedTuple):
    """Rows that lie inside mapped segments; made by `MappedSegments.locate` only."""

    segments: Array
    rows: Array


class MappedSegments:
    """Segments of one spec, by number, mapped for reading."""

    def __init__(self) -> None:
        self.segments: dict[int, Segment] = {}
        self._maps: dict[int, Array] = {}  # by segment: its bytes; keeps the mapping alive
        self._capacity = np.zeros(1, np.int64)  # by segment: its rows; 0 if it is not mapped
        self._starts: dict[str, Array] = {}  # by column: the address of row 0, by segment
        self._row_bytes: dict[str, int] = {}
        self._views: dict[tuple[str, int], Array] = {}
        self._origin = 0  # the lowest mapped address
        self._bytes: Array = np.zeros(0, np.uint8)  # from there to the highest

    def missing(self, segments: Array) -> list[int]:
        """Those of the segments that are not mapped, each once."""
        known = len(self._capacity)
        unmapped = segments[(segments >= known) | (self._capacity[np.minimum(segments, known - 1)] == 0)]
        return [int(segment_id) for segment_id in np.unique(unmapped)]

    def add(self, segment_id: int, segment: Segment) -> None:
        """Map a segment."""
        layout = segment.layout
        mapping = mmap.mmap(segment.fileno(), layout.heap_offset, prot=mmap.PROT_READ)
        os.posix_fadvise(segment.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # no reading ahead of single frames
        if layout.large:  # the other columns are small: read them at once, not page by page
            for column in layout.small:
                start = column.offset // mmap.PAGESIZE * mmap.PAGESIZE
                mapping.madvise(mmap.MADV_WILLNEED, start, column.at(layout.capacity) - start)
        content = np.frombuffer(mapping, np.uint8)
        self.segments[segment_id], self._maps[segment_id] = segment, content
        self._capacity = grown(self._capacity, segment_id + 1)
        self._capacity[segment_id] = layout.capacity
        for name, column in layout.columns.items():
            assert column.at(layout.capacity) <= content.nbytes, f"{segment.path}: {name} is not inside the mapping"
            assert self._row_bytes.get(name, column.row_bytes) == column.row_bytes, f"{segment.path}: another spec"
            self._starts[name] = grown(self._starts.get(name, np.zeros(0, np.int64)), segment_id + 1)
            self._starts[name][segment_id] = content.ctypes.data + column.offset
            self._row_bytes[name] = column.row_bytes
        self._origin = min(part.ctypes.data for part in self._maps.values())
        end = max(part.ctypes.data + part.nbytes for part in self._maps.values())
        self._bytes = np.ctypeslib.as_array((ctypes.c_uint8 * (end - self._origin)).from_address(self._origin))

    def locate(self, segments: Array, rows: Array) -> RowAddresses:
        """Check that rows are inside mapped segments; an IndexError if one is not."""
        if len(segments) and (segments.min() < 0 or segments.max() >= len(self._capacity)):
            raise IndexError(f"expected mapped segments, got {self.missing(segments)}")
        outside = (rows < 0) | (rows >= self._capacity[segments])
        if outside.any():
            first = int(np.argmax(outside))
            capacity = int(self._capacity[segments[first]])
            raise IndexError(f"segment {segments[first]}: expected a row from 0 to {capacity - 1}, got {rows[first]}")
        return RowAddresses(segments, rows)

    def take(self, name: str, located: RowAddresses) -> Array:
        """A column of some rows, as bytes [rows, row_bytes]."""
        size = self._row_bytes[name]
        addresses = self._starts[name][located.segments] + located.rows * np.int64(size) - self._origin
        strided = np.lib.stride_tricks.as_strided(self._bytes, (len(self._bytes) - size + 1, size), (1, 1))
        taken: Array = strided[addresses]
        return taken

    def view(self, name: str, segment_id: int) -> Array:
        """A column of one segment, [capacity, ...]."""
        found = self._views.get((name, segment_id))
        if found is None:
            layout = self.segments[segment_id].layout
            column = layout.columns[name]
            content = self._maps[segment_id][column.offset : column.at(layout.capacity)]
            found = self._views[name, segment_id] = content.view(column.dtype).reshape(-1, *column.shape)
        return found


def grown(array: Array, length: int) -> Array:
    """The array, with zeros at its end if it is shorter than `length`."""
    if length <= len(array):
        return array
    return np.concatenate([array, np.zeros(length - len(array), array.dtype)])

"""Gather: rows from segments into arrays that are there already.

Small fields are copied from mapped files, all segments at once. A large field (a camera frame) is read with `preadv`
straight into its place the first time, by threads; later it is copied from the mapped file, since it is then most
likely in memory. All is compared with its checksum the first time this process reads it: frames one by one, the small
fields of a segment together.

| thread | takes from | blocks on | woken by |
|---|---|---|---|
| caller | - | its readers' results | the last reader to finish |
| readers, `num_threads` of them | the pool's queue | the disk | a batch that is asked for |
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, NamedTuple

import numpy as np

from understudy.core import DamageError, StepSpec
from understudy.replay.format.layout import checksum_of, large_fields
from understudy.replay.format.segment import Segment, digest, from_bytes
from understudy.replay.read.reader import Reader

Array = np.ndarray[Any, Any]

CHECK_ROWS = 65_536
MAX_RUN = 64  # buffers in one call


class Wanted(NamedTuple):
    """One field of some rows, and the array [rows, ...] that takes it."""

    path: str
    segments: Array
    rows: Array
    out: Array


class Gatherer:
    """Reads fields of rows, given by segment and row number, of one spec."""

    def __init__(self, reader: Reader, spec: StepSpec, *, num_threads: int = 4):
        self._reader = reader
        self._spec = spec
        self._large = large_fields(spec)
        self._num_threads = num_threads
        self._pool = ThreadPoolExecutor(num_threads, "gather")
        self._window = _Window()

    def close(self) -> None:
        self._pool.shutdown()

    def field(self, path: str, segments: Array, rows: Array) -> Array:
        """One small field of some rows, in an array of its own."""
        leaf = self._spec.columns[path]
        out = np.empty((len(rows), *leaf.fixed_shape), leaf.dtype)
        self.read([Wanted(path, segments, rows, out)])
        return out

    def read(self, wanted: Iterable[Wanted]) -> None:
        """Fill all the arrays; a DamageError if a row is not what was written."""
        wanted = list(wanted)
        groups = {(id(item.segments), id(item.rows)): (item.segments, item.rows) for item in wanted}
        for segments, _ in groups.values():
            for segment_id in np.unique(segments[~self._window.has(segments)]).tolist():
                self._window.add(segment_id, self._reader.segment(segment_id))
        large = [(item, self._read_before(item)) for item in wanted if item.path in self._large]
        under_way = self._start_large(large)
        try:  # the disk works on the large ones meanwhile
            for segments, rows in groups.values():
                self._check_rows(segments, rows)
            for item in wanted:
                if item.path not in self._large:
                    self._copy_small(item)
            for item, known in large:
                self._copy_large(item, known)
        finally:
            wait(under_way)
        for future in under_way:
            future.result()

    def _copy_small(self, item: Wanted) -> None:
        path, segments, rows, out = item
        taken = self._window.take(path, segments, rows)
        if self._spec.columns[path].ragged:
            for number, place in enumerate(taken.view(np.uint32).tolist()):
                out[number] = self._ragged(path, int(segments[number]), place)
        else:
            out[...] = taken.view(out.dtype).reshape(out.shape)

    def _check_rows(self, segments: Array, rows: Array) -> None:
        """Refuse rows that are not what was written. Those of a segment are checked together, when first read."""
        window = self._window
        for segment_id in np.unique(segments[rows >= window.num_checked[segments]]).tolist():
            window.check_up_to(segment_id, int(rows[segments == segment_id].max()) + 1)
        for segment_id, damaged in window.damaged.items():
            wrong = rows[(segments == segment_id) & np.isin(rows, damaged)]
            if len(wrong):
                raise self._damage("a field", segment_id, int(wrong[0]))

    def _read_before(self, item: Wanted) -> Array:
        """Which values this process has read and checked before; most likely they are in memory."""
        known = np.zeros(len(item.rows), bool)
        for segment_id in np.unique(item.segments).tolist():
            mine = item.segments == segment_id
            known[mine] = self._window.checked(item.path, segment_id)[item.rows[mine]]
        return known

    def _start_large(self, large: list[tuple[Wanted, Array]]) -> list[Future[None]]:
        """Let the threads read the values that are new here; neighbours in a file come in one call."""
        runs: list[_Run] = []
        for path in self._large:
            values = [
                (segment_id, row, item.out[number])
                for item, known in large
                if item.path == path
                for number, segment_id, row in _numbered(item, ~known)
            ]
            for segment_id, row, out in sorted(values, key=lambda value: value[:2]):
                if runs and runs[-1].goes_on_with(path, segment_id, row):
                    runs[-1].outs.append(out)
                else:
                    runs.append(_Run(path, segment_id, row, [out]))
        parts = [runs[start :: self._num_threads] for start in range(min(self._num_threads, len(runs)))]
        return [self._pool.submit(self._read_runs, part) for part in parts]

    def _read_runs(self, runs: list[_Run]) -> None:
        """Read from disk, straight into the places where those are in one piece, and check."""
        for path, segment_id, first_row, outs in runs:
            segment = self._window.segments[segment_id]
            column = segment.layout.columns[path]
            values = [out if out.flags.c_contiguous else np.empty(column.shape, column.dtype) for out in outs]
            size = os.preadv(segment.fileno(), [value.data for value in values], column.at(first_row))
            stored = self._window.view(checksum_of(path), segment_id)
            for row, (value, out) in enumerate(zip(values, outs, strict=True), first_row):
                if size != len(outs) * column.row_bytes or digest(value) != stored[row]:
                    raise self._damage(path, segment_id, row)
                if value is not out:
                    out[...] = value
            self._window.checked(path, segment_id)[first_row : first_row + len(outs)] = True

    def _copy_large(self, item: Wanted, known: Array) -> None:
        """Copy the values that were read before. Threads would only wait for each other here."""
        for number, segment_id, row in _numbered(item, known):
            item.out[number] = self._window.view(item.path, segment_id)[row]

    def _ragged(self, path: str, segment_id: int, place: list[int]) -> Any:
        value = self._window.segments[segment_id].read_heap(place)
        if value is None:
            raise self._damage(path, segment_id, -1)
        return from_bytes(value, self._spec.columns[path])

    def _damage(self, what: str, segment_id: int, row: int) -> DamageError:
        path = self._window.segments[segment_id].path
        where = f" of row {row}" if row >= 0 else ""
        return DamageError(f"{path}: {what}{where} is not what was written; run `understudy verify`")


class _Run(NamedTuple):
    """Values of neighbouring rows of one column, and the places in a batch that take them."""

    path: str
    segment_id: int
    first_row: int
    outs: list[Array]

    def goes_on_with(self, path: str, segment_id: int, row: int) -> bool:
        here = self.first_row + len(self.outs)
        return (self.path, self.segment_id, here) == (path, segment_id, row) and len(self.outs) < MAX_RUN


def _numbered(item: Wanted, chosen: Array) -> Iterable[tuple[int, int, int]]:
    """Number, segment and row of the chosen values."""
    numbers = np.flatnonzero(chosen)
    return zip(numbers.tolist(), item.segments[numbers].tolist(), item.rows[numbers].tolist(), strict=True)


class _Window:
    """All mapped segments as one array of bytes, so that rows of many segments are taken in one call.

    The array runs from the lowest mapped address to the highest. What lies between the segments is never touched:
    every index comes from `_starts`, which knows only mapped columns.
    """

    def __init__(self) -> None:
        self.segments: dict[int, Segment] = {}
        self._known = np.zeros(0, np.int64)  # their numbers
        self._maps: dict[int, Array] = {}  # by segment: its bytes; keeps the mapping alive
        self._starts: dict[str, Array] = {}  # by column: the address of row 0, by segment
        self._row_bytes: dict[str, int] = {}
        self.num_checked = np.zeros(1, np.int64)  # by segment: its first rows, whose small fields were checked
        self.damaged: dict[int, Array] = {}  # by segment: those of them that are not what was written
        self._checked: dict[tuple[str, int], Array] = {}  # by large field and segment: by row
        self._views: dict[tuple[str, int], Array] = {}
        self._origin = 0
        self._bytes: Array = np.zeros(0, np.uint8)

    def has(self, segments: Array) -> Array:
        """Which segments are mapped."""
        return np.isin(segments, self._known)

    def add(self, segment_id: int, segment: Segment) -> None:
        """Map a segment."""
        layout = segment.layout
        mapping = mmap.mmap(segment.fileno(), layout.heap_offset, prot=mmap.PROT_READ)
        os.posix_fadvise(segment.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # no reading ahead of single frames
        if layout.large:  # the rest is little: let it be read in one go, not page by page
            for column in layout.small:
                start = column.offset // mmap.PAGESIZE * mmap.PAGESIZE
                mapping.madvise(mmap.MADV_WILLNEED, start, column.at(layout.capacity) - start)
        content = np.frombuffer(mapping, np.uint8)
        self.segments[segment_id], self._maps[segment_id] = segment, content
        self._known = np.array(list(self.segments))
        self.num_checked = _grown(self.num_checked, segment_id + 1, 0)
        for name, column in layout.columns.items():
            self._starts[name] = _grown(self._starts.get(name, np.zeros(0, np.int64)), segment_id + 1, 0)
            self._starts[name][segment_id] = content.ctypes.data + column.offset
            self._row_bytes[name] = column.row_bytes
        self._origin = min(part.ctypes.data for part in self._maps.values())
        end = max(part.ctypes.data + part.nbytes for part in self._maps.values())
        self._bytes = np.ctypeslib.as_array((ctypes.c_uint8 * (end - self._origin)).from_address(self._origin))

    def check_up_to(self, segment_id: int, num_rows: int) -> None:
        """Compare the small fields of a segment's next rows with their checksums."""
        segment = self.segments[segment_id]
        for first in range(int(self.num_checked[segment_id]), num_rows, CHECK_ROWS):
            _, good = segment.read_small(first, min(CHECK_ROWS, num_rows - first))
            if not good.all():
                known = self.damaged.get(segment_id, np.zeros(0, np.int64))
                self.damaged[segment_id] = np.concatenate([known, first + np.flatnonzero(~good)])
        self.num_checked[segment_id] = num_rows

    def take(self, name: str, segments: Array, rows: Array) -> Array:
        """A column of some rows, as bytes [rows, row_bytes]."""
        size = self._row_bytes[name]
        addresses = self._starts[name][segments] + rows * np.int64(size) - self._origin
        strided = np.lib.stride_tricks.as_strided(self._bytes, (len(self._bytes) - size + 1, size), (1, 1))
        taken: Array = strided[addresses]
        return taken

    def view(self, name: str, segment_id: int) -> Array:
        """A column of one segment."""
        found = self._views.get((name, segment_id))
        if found is None:
            layout = self.segments[segment_id].layout
            column = layout.columns[name]
            content = self._maps[segment_id][column.offset : column.at(layout.capacity)]
            found = self._views[name, segment_id] = content.view(column.dtype).reshape(-1, *column.shape)
        return found

    def checked(self, name: str, segment_id: int) -> Array:
        """For each row of a segment, whether a large field was compared with its checksum."""
        found = self._checked.get((name, segment_id))
        if found is None:
            found = self._checked[name, segment_id] = np.zeros(self.segments[segment_id].layout.capacity, bool)
        return found


def _grown(array: Array, length: int, fill: Any) -> Array:
    if length <= len(array):
        return array
    return np.concatenate([array, np.full(length - len(array), fill, array.dtype)])

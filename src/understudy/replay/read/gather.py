"""Gather: reads fields of many rows, from many segments, into arrays that the caller gives.

Small fields are copied from mapped files, all segments at once (mapped_segments.py). A large field (a camera frame) is
read with `preadv` straight into the caller's array the first time, by threads; later it is copied from the mapped file,
because it is then most likely in memory. Everything is compared with its checksum the first time this process reads it:
frames one by one, the small fields of a segment together.

| thread | takes from | blocks on | woken by |
|---|---|---|---|
| caller | - | the results of its reader threads | the last of them to finish |
| reader threads, `num_threads` of them | the pool's queue | the disk | the caller of `read` |
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import NamedTuple

import numpy as np

from understudy.core import DamageError, StepSpec
from understudy.replay.format.arrays import Array
from understudy.replay.format.layout import checksum_of, large_fields
from understudy.replay.format.segment import digest, from_bytes
from understudy.replay.read.mapped_segments import MappedSegments, RowAddresses, grown
from understudy.replay.read.reader import Reader

CHECK_ROWS = 65_536  # whose small fields are compared at once
MAX_RUN = 64  # buffers in one system call


class ReadRequest(NamedTuple):
    """One field of some rows, and the array [rows, ...] to read it into."""

    path: str
    segments: Array
    rows: Array
    out: Array


class Gatherer:
    """Reads fields of rows, given by segment and row number, of one spec."""

    def __init__(
        self,
        reader: Reader,
        spec: StepSpec,
        *,
        num_threads: int = 4,
        on_ragged: Callable[[int], None] | None = None,
    ):
        """`on_ragged` gets the number of bytes of text and ragged values before they are read, and may refuse them."""
        self._reader = reader
        self._on_ragged = on_ragged if any(leaf.ragged for leaf in spec.columns.values()) else None
        self._spec = spec
        self._large = large_fields(spec)
        self._num_threads = num_threads
        self._pool = ThreadPoolExecutor(num_threads, "gather")
        self._mapped = MappedSegments()
        self._checks = _Checks(self._mapped)

    def close(self) -> None:
        self._pool.shutdown()

    def field(self, path: str, segments: Array, rows: Array) -> Array:
        """One small field of some rows, in a new array."""
        leaf = self._spec.columns[path]
        out = np.empty((len(rows), *leaf.fixed_shape), leaf.dtype)
        self.read([ReadRequest(path, segments, rows, out)])
        return out

    def read(self, requests: Iterable[ReadRequest]) -> None:
        """Fill all the arrays; a DamageError if a row is not what was written."""
        requests = list(requests)
        groups: dict[tuple[int, int], RowAddresses] = {}  # many requests are of the same rows
        for request in requests:
            key = (id(request.segments), id(request.rows))
            if key not in groups:
                for segment_id in self._mapped.missing(request.segments):
                    self._mapped.add(segment_id, self._reader.segment(segment_id))
                groups[key] = self._mapped.locate(request.segments, request.rows)
        large = [(request, self._read_before(request)) for request in requests if request.path in self._large]
        reads = self._start_large(large)
        try:  # while the disk reads the large fields
            for located in groups.values():
                self._check_rows(located)
            if self._on_ragged is not None:
                self._on_ragged(self._num_ragged_bytes(requests, groups))
            for request in requests:
                if request.path not in self._large:
                    self._copy_small(request, groups[id(request.segments), id(request.rows)])
            for request, known in large:
                self._copy_large(request, known)
        finally:
            wait(reads)
        for future in reads:
            future.result()

    def _num_ragged_bytes(self, requests: list[ReadRequest], groups: dict[tuple[int, int], RowAddresses]) -> int:
        """The size of all text and ragged values; their rows are checked."""
        num_bytes = 0
        for request in requests:
            if self._spec.columns[request.path].ragged:
                entries = self._mapped.take(request.path, groups[id(request.segments), id(request.rows)])
                num_bytes += int(entries.view(np.uint32)[:, 1].sum(dtype=np.int64))
        return num_bytes

    def _copy_small(self, request: ReadRequest, located: RowAddresses) -> None:
        path, segments, _, out = request
        taken = self._mapped.take(path, located)
        if self._spec.columns[path].ragged:
            for number, entry in enumerate(taken.view(np.uint32).tolist()):
                out[number] = self._ragged(path, int(segments[number]), entry)
        else:
            out[...] = taken.view(out.dtype).reshape(out.shape)

    def _check_rows(self, located: RowAddresses) -> None:
        """Refuse rows that are not what was written. Those of a segment are checked together, when first read."""
        segments, rows = located
        for segment_id in np.unique(segments[rows >= self._checks.num_checked(segments)]).tolist():
            self._checks.check_up_to(segment_id, int(rows[segments == segment_id].max()) + 1)
        for segment_id, damaged in self._checks.damaged.items():
            wrong = rows[(segments == segment_id) & np.isin(rows, damaged)]
            if len(wrong):
                raise self._damage("a field", segment_id, int(wrong[0]))

    def _read_before(self, request: ReadRequest) -> Array:
        """Which values this process has read and checked before; most likely they are in memory."""
        known = np.zeros(len(request.rows), bool)
        for segment_id in np.unique(request.segments).tolist():
            mine = request.segments == segment_id
            known[mine] = self._checks.of_field(request.path, segment_id)[request.rows[mine]]
        return known

    def _start_large(self, large: list[tuple[ReadRequest, Array]]) -> list[Future[None]]:
        """Let the threads read the values that are new here; neighbours in a file are read in one call."""
        runs: list[_Run] = []
        for path in self._large:
            values = [
                (segment_id, row, request.out[number])
                for request, known in large
                if request.path == path
                for number, segment_id, row in _numbered(request, ~known)
            ]
            for segment_id, row, out in sorted(values, key=lambda value: value[:2]):
                if runs and runs[-1].is_followed_by(path, segment_id, row):
                    runs[-1].outs.append(out)
                else:
                    runs.append(_Run(path, segment_id, row, [out]))
        parts = [runs[start :: self._num_threads] for start in range(min(self._num_threads, len(runs)))]
        return [self._pool.submit(self._read_runs, part) for part in parts]

    def _read_runs(self, runs: list[_Run]) -> None:
        """Read from disk, straight into the arrays where those are contiguous, and check."""
        for path, segment_id, first_row, outs in runs:
            segment = self._mapped.segments[segment_id]
            column = segment.layout.columns[path]
            values = [out if out.flags.c_contiguous else np.empty(column.shape, column.dtype) for out in outs]
            size = os.preadv(segment.fileno(), [value.data for value in values], column.at(first_row))
            stored = self._mapped.view(checksum_of(path), segment_id)
            for row, (value, out) in enumerate(zip(values, outs, strict=True), first_row):
                if size != len(outs) * column.row_bytes or digest(value) != stored[row]:
                    raise self._damage(path, segment_id, row)
                if value is not out:
                    out[...] = value
            self._checks.of_field(path, segment_id)[first_row : first_row + len(outs)] = True

    def _copy_large(self, request: ReadRequest, known: Array) -> None:
        """Copy the values that were read before. Threads would only wait for each other here."""
        for number, segment_id, row in _numbered(request, known):
            request.out[number] = self._mapped.view(request.path, segment_id)[row]

    def _ragged(self, path: str, segment_id: int, entry: list[int]) -> str | Array:
        value = self._mapped.segments[segment_id].read_heap(entry)
        if value is None:
            raise self._damage(path, segment_id, -1)
        return from_bytes(value, self._spec.columns[path])

    def _damage(self, what: str, segment_id: int, row: int) -> DamageError:
        path = self._mapped.segments[segment_id].path
        where = f" of row {row}" if row >= 0 else ""
        return DamageError(f"{path}: {what}{where} is not what was written; run `understudy verify`")


class _Run(NamedTuple):
    """Values of neighbouring rows of one column, and the arrays to read them into."""

    path: str
    segment_id: int
    first_row: int
    outs: list[Array]

    def is_followed_by(self, path: str, segment_id: int, row: int) -> bool:
        next_row = self.first_row + len(self.outs)
        return (self.path, self.segment_id, next_row) == (path, segment_id, row) and len(self.outs) < MAX_RUN


class _Checks:
    """Which rows of the mapped segments this process has compared with their checksums."""

    def __init__(self, mapped: MappedSegments):
        self._mapped = mapped
        self._num_checked = np.zeros(1, np.int64)  # by segment: its first rows, whose small fields were compared
        self.damaged: dict[int, Array] = {}  # by segment: those of them that are not what was written
        self._large: dict[tuple[str, int], Array] = {}  # by large field and segment: by row

    def num_checked(self, segments: Array) -> Array:
        """For each segment, how many of its first rows were compared, in their small fields."""
        self._num_checked = grown(self._num_checked, int(segments.max(initial=0)) + 1)
        return self._num_checked[segments]

    def check_up_to(self, segment_id: int, num_rows: int) -> None:
        """Compare the small fields of a segment's next rows with their checksums."""
        segment = self._mapped.segments[segment_id]
        for first in range(int(self._num_checked[segment_id]), num_rows, CHECK_ROWS):
            _, good = segment.read_small(first, min(CHECK_ROWS, num_rows - first))
            if not good.all():
                known = self.damaged.get(segment_id, np.zeros(0, np.int64))
                self.damaged[segment_id] = np.concatenate([known, first + np.flatnonzero(~good)])
        self._num_checked[segment_id] = num_rows

    def of_field(self, path: str, segment_id: int) -> Array:
        """For each row of a segment, whether a large field was compared; to be written to."""
        found = self._large.get((path, segment_id))
        if found is None:
            capacity = self._mapped.segments[segment_id].layout.capacity
            found = self._large[path, segment_id] = np.zeros(capacity, bool)
        return found


def _numbered(request: ReadRequest, chosen: Array) -> Iterable[tuple[int, int, int]]:
    """Number, segment and row of the chosen values."""
    numbers = np.flatnonzero(chosen)
    return zip(numbers.tolist(), request.segments[numbers].tolist(), request.rows[numbers].tolist(), strict=True)

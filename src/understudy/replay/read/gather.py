"""Gather: reads fields of many rows, from many segments, into arrays that the caller gives.

Small fields are compared with their checksums, block by block, and kept in memory (row_blocks.py). A large field (a
camera frame) is read with `preadv` straight into the caller's array: the first time by threads, because it comes from
the disk; later by the caller, because it is then most likely in the system's memory. It is compared with its checksum
the first time this process reads it and at every CHECK_EVERY-th read, which costs about 1 % of a batch. Encoded frames
are read and decoded by the threads, GOP by GOP, and compared with the checksums of their pixels every time. Frames in
another size are read from derived files, compared every time, and those that are not there are made by the threads.

| thread | takes from | blocks on | woken by |
|---|---|---|---|
| caller | - | the results of its reader threads | the last of them to finish |
| reader threads, `num_threads` of them | the pool's queue | the disk; a decoder | the caller of `read` |
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from understudy.codecs import FrameError, decode_frames
from understudy.core import StepSpec
from understudy.core.resize import Resize, resize_frame
from understudy.core.step import decoded_checksum_of, frame_number_of
from understudy.processes import forks
from understudy.replay.format.arrays import Array
from understudy.replay.format.layout import checksum_of, large_fields
from understudy.replay.format.paths import DERIVED_DIRECTORY
from understudy.replay.format.segment import digest, from_bytes
from understudy.replay.read.derived_frames import CacheDirectory, DerivedFrames, FrameCache, WantedFrames
from understudy.replay.read.reader import Reader
from understudy.replay.read.resized_field import ResizedField
from understudy.replay.read.row_blocks import RowBlocks, damage

MAX_RUN = 64  # buffers in one system call
CHECK_EVERY = 16  # reads of a large value, of which one compares it with its checksum


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
        sizes: Mapping[str, Resize] | None = None,
        frame_cache: FrameCache | None = None,
        num_threads: int = 4,
        on_ragged: Callable[[int], None] | None = None,
    ):
        """`spec` is that of the stored steps; the fields in `sizes` are read in another size.

        `on_ragged` gets the number of bytes of text and ragged values before they are read, and may refuse them.
        """
        self._reader = reader
        self._on_ragged = on_ragged if any(leaf.ragged for leaf in spec.columns.values()) else None
        self._spec = spec
        self._sizes = sizes or {}
        self.resized = _resized_fields(reader, spec, self._sizes, frame_cache or FrameCache())
        self._large = [path for path in large_fields(spec) if path not in self.resized]
        self._encoded = [path for path in spec.encoded if path not in self.resized]
        self._small = spec.columns.keys() - {*self._large, *self._encoded, *self.resized}
        self._num_threads = num_threads
        self._pool = ThreadPoolExecutor(num_threads, "gather")
        self._blocks = RowBlocks(reader, spec, counted=self.resized)
        self._num_removed = 0
        forks.register(self)

    def after_fork_in_child(self) -> None:
        self._pool = ThreadPoolExecutor(self._num_threads, "gather")  # the threads of the other one are not here

    def close(self) -> None:
        self._pool.shutdown()
        for field in self.resized.values():
            field.derived.close()

    def field(self, path: str, segments: Array, rows: Array) -> Array:
        """One small field of some rows, in a new array."""
        leaf = self._spec.columns[path]
        out = np.empty((len(rows), *leaf.fixed_shape), leaf.dtype)
        self.read([ReadRequest(path, segments, rows, out)])
        return out

    def forget_removed(self) -> None:
        """Give back the memory of segments that the reader has closed because compaction removed them."""
        removed = self._reader.removed_segments
        self._blocks.forget(removed[self._num_removed :])
        self._num_removed = len(removed)

    def read(self, requests: Iterable[ReadRequest]) -> None:
        """Fill all the arrays; a DamageError if a row is not what was written."""
        requests = list(requests)
        places: dict[tuple[int, int], Array] = {}  # many requests are of the same rows
        self._blocks.begin()
        for request in requests:
            if (key := _key(request)) not in places:
                places[key] = self._blocks.locate(request.segments, request.rows)
        frames = [_Frames(self._blocks, path, checksum_of(path), _of(path, requests, places)) for path in self._large]
        resized = [
            _ResizedFrames(self._blocks, field, _of(path, requests, places)) for path, field in self.resized.items()
        ]
        reads = [
            self._pool.submit(self._read_runs, each, each.fresh_runs[thread :: self._num_threads])
            for each in (*frames, *resized)
            for thread in range(min(self._num_threads, len(each.fresh_runs)))
        ]
        reads += [
            self._pool.submit(self._read_gop, gop)
            for path in self._encoded
            for gop in self._gops(path, _of(path, requests, places))
        ]
        try:  # while the disk reads the large fields
            if self._on_ragged is not None:
                self._on_ragged(self._num_ragged_bytes(requests, places))
            for request in requests:
                if request.path in self._small:
                    self._copy_small(request, places[_key(request)])
            for each in (*frames, *resized):
                self._read_runs(each, each.known_runs)
        finally:
            wait(reads)
        _raise_errors(reads)
        made = [self._pool.submit(self._make_frames, *missing) for each in resized for missing in each.missing()]
        wait(made)
        _raise_errors(made)
        for each in (*frames, *resized):
            each.finish()

    def _num_ragged_bytes(self, requests: list[ReadRequest], places: dict[tuple[int, int], Array]) -> int:
        """The size of all text and ragged values; their rows are checked."""
        num_bytes = 0
        for request in requests:
            if self._spec.columns[request.path].ragged:
                entries = self._blocks.take(request.path, places[_key(request)])
                num_bytes += int(entries.view(np.uint32)[:, 1].sum(dtype=np.int64))
        return num_bytes

    def _copy_small(self, request: ReadRequest, places: Array) -> None:
        path, segments, _, out = request
        taken = self._blocks.take(path, places)
        if self._spec.columns[path].ragged:
            for number, entry in enumerate(taken.view(np.uint32).tolist()):
                out[number] = self._ragged(path, int(segments[number]), entry)
        else:
            values = taken.view(out.dtype).reshape(len(out), *self._spec.columns[path].fixed_shape)
            out[...] = [resize_frame(value, self._sizes[path]) for value in values] if path in self._sizes else values

    def _read_runs(self, frames: _Frames, runs: Array) -> None:
        """Read straight into the arrays, and compare those that are due."""
        if isinstance(frames, _ResizedFrames):
            frames.field.derived.read_runs(runs, frames.wanted)
            return
        edges = [0, *(np.flatnonzero(np.diff(runs[:, 0])) + 1).tolist(), len(runs)]
        for first, last in pairwise(edges):
            if first == last:
                continue
            of_segment = runs[first:last]
            segment = self._reader.segment(int(of_segment[0, 0]))
            segment.read_runs(frames.path, of_segment[:, 1:4].tolist(), frames.outs)
            for start, stop in of_segment[of_segment[:, 4] > 0, 2:4].tolist():
                for number in range(start, stop):
                    if frames.due[number] and digest(frames.outs[number]) != frames.checksums[number]:
                        raise damage(segment, frames.path, int(frames.rows[number]))

    def _gops(self, path: str, requests: list[tuple[ReadRequest, Array]]) -> Iterator[_Gop]:
        """The GOPs that hold the wanted values of an encoded field."""
        outs = [out for request, _ in requests for out in request.out]
        segments = _joined(request.segments for request, _ in requests)
        rows = _joined(request.rows for request, _ in requests)
        if not len(rows):
            return
        numbers = self._blocks.take(frame_number_of(path), _joined(found for _, found in requests)).reshape(-1)
        order = np.lexsort((rows, rows - numbers, segments))
        segments, numbers, first_rows = segments[order], numbers[order].astype(np.int64), (rows - numbers)[order]
        new_gop = (np.diff(segments) != 0) | (np.diff(first_rows) != 0)
        edges = [0, *(np.flatnonzero(new_gop) + 1).tolist(), len(order)]
        lasts = np.array(edges[1:], np.int64) - 1  # of each GOP, the wanted frame with the highest number
        sizes = numbers[lasts] + 1
        stops = np.cumsum(sizes)
        needed = np.arange(sizes.sum()) - np.repeat(stops - sizes, sizes) + np.repeat(first_rows[lasts], sizes)
        places = self._blocks.locate(np.repeat(segments[lasts], sizes), needed)
        entries = self._blocks.take(path, places).view(np.uint32).reshape(-1, 2)
        checksums = self._blocks.take(decoded_checksum_of(path), places).view(np.uint64).reshape(-1)
        for (start, stop), end, size in zip(pairwise(edges), stops.tolist(), sizes.tolist(), strict=True):
            yield _Gop(
                path=path,
                segment=int(segments[start]),
                first_row=int(first_rows[start]),
                entries=entries[end - size : end],
                checksums=checksums[end - size : end].tolist(),
                wanted=numbers[start:stop].tolist(),
                outs=[outs[number] for number in order[start:stop].tolist()],
            )

    def _read_gop(self, gop: _Gop) -> None:
        """Read and decode a GOP up to the last frame that is wanted of it."""
        leaf = self._spec.columns[gop.path]
        assert leaf.codec is not None
        segment = self._reader.segment(gop.segment)
        packets = segment.read_heap_values(gop.entries)
        try:
            frames = decode_frames(leaf.codec, leaf.fixed_shape, leaf.numpy_dtype, packets, gop.checksums, gop.wanted)
        except FrameError as error:
            raise FrameError(f"{segment.path}: {gop.path} of row {gop.first_row} on: {error}") from None
        for out, frame in zip(gop.outs, frames, strict=True):
            out[...] = frame

    def _make_frames(self, frames: _ResizedFrames, first_row: int, numbers: list[int]) -> None:
        """Make the wanted frames of one GOP."""
        rows = frames.rows[numbers]
        segment = self._reader.segment(int(frames.segments[numbers[0]]))
        made = frames.field.make(segment, first_row, int(rows.max()))
        for number, row in zip(numbers, rows.tolist(), strict=True):
            frames.outs[number][...] = made[row - first_row]

    def _ragged(self, path: str, segment_id: int, entry: list[int]) -> str | Array:
        segment = self._reader.segment(segment_id)
        value = segment.read_heap(entry)
        if value is None:
            raise damage(segment, path, -1)
        return from_bytes(value, self._spec.columns[path])


class _Gop(NamedTuple):
    """A GOP of encoded frames, and those of them that are wanted."""

    path: str
    segment: int
    first_row: int
    entries: Array  # [frames, 2] in the heap, up to the last that is wanted
    checksums: list[int]  # of the decoded frames
    wanted: list[int]  # their numbers in the GOP
    outs: list[Array]


class _Frames:
    """The values of one large field that a call of `read` asks for, in the order of the files.

    A run is values of neighbouring rows, which are read in one call: [runs, 5] of segment, first row, the first and the
    last number of its values (the last not included), and whether one of them is due to be compared.
    """

    def __init__(
        self,
        blocks: RowBlocks,
        path: str,
        checksum_column: str,
        requests: list[tuple[ReadRequest, Array]],
        rows_per_file: int = 2**32,
    ):
        self.path = path
        self._copies: list[tuple[Array, Array]] = []  # read into the second, because the first is not contiguous
        outs: list[Array] = []
        for request, _ in requests:
            out = request.out
            if len(out) and not out[0].flags.c_contiguous:
                out = np.empty(out.shape, out.dtype)
                self._copies.append((request.out, out))
            outs.extend(out)
        segments = _joined(request.segments for request, _ in requests)
        rows = _joined(request.rows for request, _ in requests)
        order = np.argsort((segments << 32) + rows)
        self.segments, self.rows = segments[order], rows[order]
        self.outs = [outs[number] for number in order.tolist()]
        self._places = _joined(found for _, found in requests)[order]
        self._num_reads = blocks.num_reads[path]  # by place
        self._counts = self._num_reads[self._places]
        self.due = self._counts % CHECK_EVERY == 0
        self.checksums = blocks.take(checksum_column, self._places).view(np.uint64).reshape(-1) if outs else self.rows
        fresh = self._counts == 0
        runs = _runs(self.segments, self.rows, fresh, self.due, rows_per_file)
        is_fresh = fresh[runs[:, 2]]
        self.fresh_runs = runs[is_fresh]  # of values that are new to this process
        self.known_runs = runs[~is_fresh]

    def finish(self) -> None:
        """All were read, and are what was written."""
        for out, copy in self._copies:
            out[...] = copy
        self._num_reads[self._places] = self._counts % CHECK_EVERY + 1


class _ResizedFrames(_Frames):
    """The values of a resized field that a call of `read` asks for; `checksums` are those of the stored frames."""

    def __init__(self, blocks: RowBlocks, field: ResizedField, requests: list[tuple[ReadRequest, Array]]):
        super().__init__(blocks, field.path, field.source_checksum, requests, field.derived.rows_per_file)
        self.field = field
        self._blocks = blocks
        self.wanted = WantedFrames(self.outs, self.checksums)

    def missing(self) -> Iterator[tuple[_ResizedFrames, int, list[int]]]:
        """What the derived files did not have: the first row of each GOP, and the numbers of its values."""
        numbers = self.wanted.missing()
        if not len(numbers):
            return
        first_rows = self.rows[numbers]
        if self.field.gop_size > 1:
            of_gop = self._blocks.take(frame_number_of(self.path), self._places[numbers]).reshape(-1)
            first_rows = first_rows - of_gop
        new_gop = (np.diff(self.segments[numbers]) != 0) | (np.diff(first_rows) != 0)
        for part in np.split(np.arange(len(numbers)), np.flatnonzero(new_gop) + 1):
            yield self, int(first_rows[part[0]]), numbers[part].tolist()


def _resized_fields(
    reader: Reader, spec: StepSpec, sizes: Mapping[str, Resize], cache: FrameCache
) -> dict[str, ResizedField]:
    """The fields that are kept in another size; a small one is resized for each batch."""
    directory = CacheDirectory(cache.directory or reader.path / DERIVED_DIRECTORY, cache.max_bytes)
    large = large_fields(spec)
    fields = {}
    for path, resize in sizes.items():
        leaf = spec.columns[path]
        if leaf.codec is not None or path in large:
            derived = DerivedFrames(directory, reader.catalog.store_id, path, leaf, resize)
            fields[path] = ResizedField(path, leaf, resize, derived)
    return fields


def _raise_errors(tasks: list[Future[None]]) -> None:
    for task in tasks:
        task.result()


def _joined(arrays: Iterable[Array]) -> Array:
    return np.concatenate([np.zeros(0, np.int64), *arrays])


def _runs(segments: Array, rows: Array, fresh: Array, due: Array, rows_per_file: int) -> Array:
    """The runs among values in the order of the files; those of new values have no others in them."""
    breaks = rows % rows_per_file == 0
    breaks[:1] = True
    breaks[1:] |= (segments[1:] != segments[:-1]) | (rows[1:] != rows[:-1] + 1) | (fresh[1:] != fresh[:-1])
    starts = np.flatnonzero(breaks)
    lengths = np.diff(np.append(starts, len(rows)))
    if lengths.max(initial=0) > MAX_RUN:
        within = np.arange(len(rows)) - np.repeat(starts, lengths)
        starts = np.flatnonzero(within % MAX_RUN == 0)
    stops = np.append(starts[1:], len(rows))[: len(starts)]
    some_due = np.logical_or.reduceat(due, starts) if len(starts) else due
    return np.stack([segments[starts], rows[starts], starts, stops, some_due], axis=1)


def _key(request: ReadRequest) -> tuple[int, int]:
    return id(request.segments), id(request.rows)


def _of(
    path: str, requests: list[ReadRequest], places: dict[tuple[int, int], Array]
) -> list[tuple[ReadRequest, Array]]:
    """The requests of one field, with the places of their rows."""
    return [(request, places[_key(request)]) for request in requests if request.path == path]

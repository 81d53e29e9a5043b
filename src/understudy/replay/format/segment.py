"""Segment: one file of rows of one Spec, written in place and read while it grows.

A Segment knows nothing of commits: `write` puts columns at a row that the caller chooses, and `read_checked` says for
each row whether its checksums hold. Rows that the disk does not give back are damaged rows: the others are read.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, cast

import numpy as np
import xxhash

from understudy.core import DamageError, StepSpec, UnreadableError
from understudy.core.episode import Column
from understudy.core.spec import ArraySpec
from understudy.core.step import frame_number_of
from understudy.durable import files
from understudy.durable.errors import store_error, store_errors
from understudy.durable.file_identity import FileIdentity
from understudy.durable.open_files import OpenFile
from understudy.replay.format.arrays import Array
from understudy.replay.format.layout import Layout, TensorColumn, checksum_of, parse_header

Buffer: TypeAlias = bytes | bytearray | memoryview | Array
HeapEntry: TypeAlias = Sequence[int] | Array  # offset in the heap and length of a value, without its checksum
HEAP_CHECKSUM = struct.Struct("<Q")


@dataclass(frozen=True, kw_only=True)
class WrittenRows:
    """The checksums of the rows that `write` wrote, and the heap that they took."""

    checksums: Array  # [num_rows] uint64: row/checksum
    heap_bytes: int  # of their ragged values and records


class Segment:
    """An open segment file."""

    def __init__(self, layout: Layout, file: OpenFile):
        self.layout = layout
        self.path = file.path
        self._file = file
        with file as fd:
            self.identity = FileIdentity(self.path, fd)

    @staticmethod
    def create(layout: Layout, path: Path) -> Segment:
        """Make the file with its header, durable under its name; never overwrites a file."""
        with store_errors(path, "create"):
            file = OpenFile(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        try:
            with file as fd:
                with store_errors(path, "resize"):
                    os.ftruncate(fd, layout.file_bytes)
                with store_errors(path, "write"):
                    files.write_at(fd, layout.header, 0)
                with store_errors(path, "fsync"):
                    os.fsync(fd)
            with store_errors(path.parent, "fsync"):
                files.sync_directory(path.parent)
        except BaseException:
            file.close()
            with suppress(OSError):  # a file that stays is never used: segment numbers are not given twice
                path.unlink(missing_ok=True)
            raise
        return Segment(layout, file)

    @staticmethod
    def open(layout: Layout, path: Path, *, write: bool = False) -> Segment:
        """Open a file that should have this layout; a DamageError if it is missing, short or has another header."""
        with _read_errors(path, "open"):
            file = OpenFile(path, os.O_RDWR if write else os.O_RDONLY)
            try:
                segment = Segment(layout, file)
            except BaseException:
                file.close()
                raise
        try:
            problem = segment.file_problem()
            if problem:
                raise DamageError(f"{path}: {problem}; run `understudy verify`, then `understudy repair`")
        except BaseException:
            segment.close()
            raise
        return segment

    def file_problem(self) -> str | None:
        """What is wrong with the size or the header; None if nothing is."""
        with self._reading() as fd:
            size = os.fstat(fd).st_size
        if size != self.layout.file_bytes:
            return f"expected {self.layout.file_bytes} bytes, got {size}"
        header, lost = self._read_at(len(self.layout.header), 0)
        if lost:
            return "the disk does not give the header back"
        if header != self.layout.header:
            return "the header is not the one that was written"
        return None

    def close(self) -> None:
        self._file.close()

    def expect_random_reads(self) -> None:
        """Let the system read single frames without their neighbours, but now the small fields of all rows at once."""
        with _read_errors(self.path, "read"):
            self._file.expect_random_reads()
        if self.layout.large:
            with self._reading() as fd:
                for column in self.layout.small:
                    size = column.row_bytes * self.layout.capacity
                    os.posix_fadvise(fd, column.offset, size, os.POSIX_FADV_WILLNEED)

    def sync(self) -> None:
        with store_errors(self.path, "fdatasync"), self._file as fd:
            files.sync_data(fd)

    def _write_at(self, data: bytes | bytearray | Array, offset: int) -> None:
        with store_errors(self.path, "write"), self._file as fd:
            files.write_at(fd, data, offset)

    def _read_at(self, size: int, offset: int) -> tuple[bytes, list[tuple[int, int]]]:
        """Bytes of the file, and which ranges of them the disk does not give back."""
        with self._reading() as fd:
            return files.read_readable(fd, size, offset)

    @contextmanager
    def _reading(self) -> Iterator[int]:
        """The open file; an OSError in the block becomes the error of a file that cannot be read."""
        with _read_errors(self.path, "read"), self._file as fd:
            yield fd

    # ---- writing

    def write(
        self,
        columns: Mapping[str, Column],
        *,
        first_row: int,
        heap_offset: int,
        episode: Array,
        index: Array,
        records: Mapping[int, bytes],
    ) -> WrittenRows:
        """Write checked columns, with the identity of each row and the records of some; durable only after `sync`.

        The large fields go first: the disk works on them while their checksums are made.
        """
        layout = self.layout
        num_rows = len(episode)
        for path in layout.large:
            self._write_column(path, columns[path], first_row)
        heap = bytearray()

        def add_to_heap(value: bytes) -> tuple[int, int]:
            offset = heap_offset + len(heap)
            heap.extend(HEAP_CHECKSUM.pack(digest(value)))
            heap.extend(value)
            return offset, len(value)

        out: dict[str, Array] = {}
        for path, leaf in layout.fields.items():
            if leaf.ragged:
                entries = [add_to_heap(to_bytes(value)) for value in columns[path]]
                out[path] = np.array(entries, np.uint32).reshape(num_rows, 2)
            else:
                out[path] = np.ascontiguousarray(columns[path])
        record_entries = np.zeros((num_rows, 2), np.uint32)
        for row, record in records.items():
            record_entries[row] = add_to_heap(record)
        out["row/episode"], out["row/index"], out["row/record"] = episode, index, record_entries
        for path in layout.large:
            out[checksum_of(path)] = digests(out[path].reshape(num_rows, -1))
        out["row/checksum"] = self._row_checksums(out, num_rows)
        for name in layout.columns:
            if name not in layout.large:
                self._write_column(name, out[name], first_row)
        self._write_at(heap, layout.heap_offset + heap_offset)
        return WrittenRows(checksums=out["row/checksum"], heap_bytes=len(heap))

    def _write_column(self, name: str, rows: Array, first_row: int) -> None:
        column = self.layout.columns[name]
        self._write_at(np.ascontiguousarray(rows), column.at(first_row))

    def _row_checksums(self, columns: Mapping[str, Array], num_rows: int) -> Array:
        small = [as_bytes(columns[column.name], column) for column in self.layout.small]
        matrix = np.ascontiguousarray(np.concatenate(small, axis=1))
        return digests(matrix)

    # ---- reading

    def read_rows(self, name: str, first_row: int, num_rows: int) -> tuple[Array, Array]:
        """One tensor's rows as they are on disk, unchecked, and which of them the disk gives back; the others are 0."""
        column = self.layout.columns[name]
        size = column.row_bytes
        data, lost = self._read_at(num_rows * size, column.at(first_row))
        readable = np.ones(num_rows, bool)
        for start, stop in lost:
            readable[start // size : -(-stop // size)] = False
        return np.frombuffer(data, column.dtype).reshape(num_rows, *column.shape), readable

    def read_column(self, name: str, first_row: int, num_rows: int) -> Array:
        """One tensor's rows as they are on disk, unchecked; an UnreadableError if the disk does not give all back."""
        rows, readable = self.read_rows(name, first_row, num_rows)
        if not readable.all():
            row = first_row + int(np.argmin(readable))
            raise UnreadableError(
                f"{self.path}: the disk does not give {name} of row {row} back; run `understudy verify`, then "
                f"`understudy repair`"
            )
        return rows

    def read_runs(self, name: str, runs: Iterable[tuple[int, int, int]], outs: Sequence[Array]) -> None:
        """Read rows of a tensor into contiguous arrays, unchecked; an UnreadableError as `read_column`.

        A run is a first row, a start and a stop: the rows from there on are read into the arrays from start to stop.
        """
        column = self.layout.columns[name]
        offset, size, preadv = column.offset, column.row_bytes, cast(Any, os.preadv)
        with self._reading() as fd:
            for row, start, stop in runs:
                try:
                    if preadv(fd, outs[start:stop], offset + row * size) == (stop - start) * size:
                        continue
                except OSError as error:
                    if error.errno not in files.UNREADABLE:
                        raise
                for out, value in zip(outs[start:stop], self.read_column(name, row, stop - start), strict=True):
                    out[...] = value

    def data_rows(self, name: str, first_row: int, stop_row: int | None = None) -> Iterator[tuple[int, Array]]:
        """The rows of one tensor that are not in holes of the file, unchecked: the first row of each part, the part.

        Rows that the disk does not give back are 0.
        """
        column = self.layout.columns[name]
        stop_row = self.layout.capacity if stop_row is None else stop_row
        extents = self._data_extents(column.at(first_row), column.at(stop_row))
        done = first_row
        for begin, end in extents:
            first = max((begin - column.offset) // column.row_bytes, done)
            done = -((column.offset - end) // column.row_bytes)
            if first < done:
                yield first, self.read_rows(name, first, done - first)[0]

    def read_heap(self, entry: HeapEntry) -> bytes | None:
        """A value of the heap; None if its checksum does not hold, or the disk does not give it back."""
        offset, length = int(entry[0]), int(entry[1])
        size = HEAP_CHECKSUM.size + length
        if offset + size > self.layout.heap_bytes:
            return None
        data, lost = self._read_at(size, self.layout.heap_offset + offset)
        return None if lost else _checked_value(data)

    def read_heap_values(self, entries: Array) -> list[bytes]:
        """Values of the heap, in one read if they lie next to each other; a DamageError if one is not whole."""
        starts = entries[:, 0].astype(np.int64)
        stops = starts + HEAP_CHECKSUM.size + entries[:, 1]
        if stops[-1] > self.layout.heap_bytes or (starts[1:] != stops[:-1]).any():
            values = [self.read_heap(entry) for entry in entries]
        else:
            data, lost = self._read_at(int(stops[-1] - starts[0]), self.layout.heap_offset + int(starts[0]))
            values = [
                None if lost else _checked_value(data[start:stop])
                for start, stop in zip((starts - starts[0]).tolist(), (stops - starts[0]).tolist(), strict=True)
            ]
        whole = [value for value in values if value is not None]
        if len(whole) < len(values):
            raise DamageError(
                f"{self.path}: a value of the heap is not what was written; run `understudy verify`, then "
                f"`understudy repair`"
            )
        return whole

    def read_small(self, first_row: int, num_rows: int) -> tuple[dict[str, Array], Array]:
        """The small columns and `row/checksum`, and for each row whether its checksum holds."""
        columns: dict[str, Array] = {}
        good = np.ones(num_rows, bool)
        for name in (*(column.name for column in self.layout.small), "row/checksum"):
            columns[name], readable = self.read_rows(name, first_row, num_rows)
            good &= readable
        good &= self._row_checksums(columns, num_rows) == columns["row/checksum"]
        return columns, good

    def read_checked(self, first_row: int, num_rows: int) -> tuple[dict[str, Column], Array]:
        """All stored fields and the identity columns of the rows, and for each row whether all of it is whole."""
        stored, good = self.read_small(first_row, num_rows)
        fields: dict[str, Column] = {name: stored[name] for name in ("row/episode", "row/index", "row/record")}
        for path, leaf in self.layout.fields.items():
            if leaf.ragged:
                values = [self.read_heap(entry) if ok else None for entry, ok in zip(stored[path], good, strict=True)]
                good &= np.array([value is not None for value in values])
                fields[path] = [leaf.zero() if value is None else from_bytes(value, leaf) for value in values]
            elif path in self.layout.large:
                rows, readable = self.read_rows(path, first_row, num_rows)
                good &= readable & (digests(rows.reshape(num_rows, -1)) == stored[checksum_of(path)])
                fields[path] = rows
            else:
                fields[path] = stored[path]
        if not good.all():
            for path in self.layout.spec.encoded:  # a frame needs all those before it in its GOP
                for row in (np.flatnonzero(stored[frame_number_of(path)][1:]) + 1).tolist():
                    good[row] &= good[row - 1]
        return fields, good

    def blank_heap(self, entry: HeapEntry) -> None:
        """Overwrite a damaged record with an empty JSON object of the same length."""
        offset, length = int(entry[0]), int(entry[1])
        value = b"{}".ljust(length)
        data = HEAP_CHECKSUM.pack(digest(value)) + value
        self._write_at(data, self.layout.heap_offset + offset)
        self.sync()

    # ---- the unused part

    def tail_extents(self, num_rows: int, heap_used: int) -> list[tuple[int, int]]:
        """The ranges of the file after the last row of each column and the last value of the heap."""
        layout = self.layout
        ranges = [(column.at(num_rows), column.at(layout.capacity)) for column in layout.columns.values()]
        ranges.append((layout.heap_offset + heap_used, layout.file_bytes))
        return [(start, stop) for start, stop in ranges if start < stop]

    def dirty_tail(self, num_rows: int, heap_used: int) -> list[tuple[int, int]]:
        """Ranges of the unused part that are not zero, or that the disk does not give back: of a crash, or damage."""
        dirty = []
        for start, stop in self.tail_extents(num_rows, heap_used):
            for begin, end in self._data_extents(start, stop):
                for offset in range(begin, end, 1 << 20):
                    size = min(1 << 20, end - offset)
                    data, lost = self._read_at(size, offset)
                    if lost or data.count(0) != len(data):
                        dirty.append((offset, offset + size))
        return dirty

    def _data_extents(self, start: int, stop: int) -> list[tuple[int, int]]:
        with self._reading() as fd:
            return list(files.data_extents(fd, start, stop))

    def clear_tail(self, num_rows: int, heap_used: int) -> int:
        """Zero the unused part, so that any other byte there is damage; returns how many ranges were not zero."""
        dirty = self.dirty_tail(num_rows, heap_used)
        for start, stop in dirty:
            self._write_at(bytes(stop - start), start)
        if dirty:
            self.sync()
        return len(dirty)


@contextmanager
def _read_errors(path: Path, operation: str) -> Iterator[None]:
    """Turn an OSError inside the block into the error of a file that is damaged, or that something is in the way of."""
    try:
        yield
    except FileNotFoundError as error:
        raise DamageError(f"{path}: the file is gone; restore it from a backup, or run `understudy repair`") from error
    except OSError as error:
        if error.errno not in files.UNREADABLE:
            raise store_error(error, path, operation) from error
        advice = "run `understudy verify`, then `understudy repair`"
        raise UnreadableError(f"{path}: {operation} failed: {error.strerror}; {advice}") from error


def read_layout(path: Path) -> Layout:
    """The layout that the header of a segment file describes; a DamageError if it describes none."""
    try:
        with _read_errors(path, "read"), path.open("rb") as file:
            start = file.read(8)
            size = struct.unpack("<Q", start)[0]
            if size > 100_000_000:
                raise ValueError("header too long")
            metadata, tensors = parse_header(start + file.read(size))
        spec = StepSpec.from_json(json.loads(metadata["spec"]))
        return Layout(
            spec=spec,
            capacity=tensors["row/checksum"]["shape"][0],
            heap_bytes=tensors["heap"]["shape"][0],
            store_id=metadata["store"],
            segment_id=int(metadata["segment"]),
        )
    except (ValueError, KeyError, TypeError, struct.error) as error:
        raise DamageError(f"{path}: not a readable segment ({error}); restore it from a backup") from None


def _checked_value(data: bytes) -> bytes | None:
    """The value behind its checksum in the heap; None if it is not what was written."""
    value = data[HEAP_CHECKSUM.size :]
    return value if HEAP_CHECKSUM.unpack_from(data)[0] == digest(value) else None


def digest(data: Buffer) -> int:
    """The checksum of all bytes of a contiguous buffer: xxh3, 64 bits."""
    return int(xxhash.xxh3_64_intdigest(cast(bytes, data)))


def digests(rows: Array | Sequence[Array]) -> Array:
    """The checksum of each row of a contiguous array, or of each of several."""
    return np.fromiter(map(xxhash.xxh3_64_intdigest, rows), np.uint64, len(rows))


def to_bytes(value: str | Array) -> bytes:
    """The bytes of a ragged value in the heap."""
    return value.encode() if isinstance(value, str) else np.ascontiguousarray(value).tobytes()


def from_bytes(data: bytes, leaf: ArraySpec) -> str | Array:
    """The ragged value with these bytes."""
    if leaf.dtype == "str":
        return data.decode()
    return np.frombuffer(data, leaf.dtype).reshape(-1, *leaf.shape[1:])


def as_bytes(array: Array, column: TensorColumn) -> Array:
    """A column's rows as a [rows, row_bytes] view of bytes."""
    rows = np.ascontiguousarray(array)
    return rows.view(np.uint8).reshape(len(rows), column.row_bytes)


def digest_of_checksums(checksums: Array) -> int:
    """The checksum that the catalog keeps of a span: over the checksums of its rows, as SQLite's signed integer."""
    return signed(digest(np.ascontiguousarray(checksums)))


def signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value

"""Reads rows of parquet files in small batches, as arrays with checked shapes.

The sizes that a file claims are checked before it is decoded (see `pages.py`), so that a small file cannot fill the
memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]

from understudy.formats.format import FormatError
from understudy.formats.lerobot.pages import Group, check_pages, read_footer

BATCH_ROWS = 64  # rows per decoded batch: few, because each may hold images
BATCH_BYTES = 2**28  # of a batch whose rows repeat a large dictionary
TAKEN_BYTES = 2**29  # allowed for one episode, plus TAKEN_RATIO times the file size
TAKEN_RATIO = 100

Array = np.ndarray[Any, Any]


@contextmanager
def refusing(path: Path, *others: type[Exception]) -> Iterator[None]:
    """Turn any error of reading a damaged file, including `others`, into a FormatError that names the file."""
    try:
        yield
    except FormatError:
        raise
    except FileNotFoundError:
        raise FormatError(f"{path}: is missing; fetch the dataset again") from None
    except (
        pa.ArrowException,
        OSError,
        ValueError,
        TypeError,
        LookupError,
        ArithmeticError,
        MemoryError,
        NotImplementedError,
        RecursionError,
        *others,
    ) as error:
        text = " ".join(ascii(str(error)).strip("'\"").split())[:120]
        raise FormatError(f"{path}: is damaged ({type(error).__name__}: {text}); fetch the dataset again") from None


class Rows:
    """Reads the rows of one parquet file in order; going back restarts."""

    def __init__(self, path: Path, columns: Mapping[str, int], batch_rows: int = BATCH_ROWS) -> None:
        """`columns`: number of elements per value of each column; -1 for any."""
        self._path = path
        self._columns = dict(columns)
        with refusing(path):
            groups = read_footer(path)
            self._file = pq.ParquetFile(path, page_checksum_verification=True, pre_buffer=False)
        try:
            with refusing(path):
                dictionary = self._check(groups)
                self._batch_rows = max(1, min(batch_rows, BATCH_BYTES // max(dictionary, 1)))
                self._most_bytes = TAKEN_BYTES + TAKEN_RATIO * path.stat().st_size
                self._starts = np.cumsum([0, *(group.num_rows for group in groups)], dtype=np.int64)
        except FormatError:
            self._file.close()
            raise
        self._batches: Iterator[Any] = iter(())
        self._left: Any = None  # decoded and not yet returned
        self._next = -1  # number of the next row; -1 before the first

    @property
    def num_rows(self) -> int:
        return int(self._starts[-1])

    @property
    def names(self) -> list[str]:
        return list(self._file.schema_arrow.names)

    def take(self, start: int, count: int) -> Any:
        """`count` rows from row `start` as a table."""
        if start < 0 or count < 1 or start + count > self.num_rows:
            raise FormatError(
                f"{self._path}: expected rows {start} to {start + count}, got {self.num_rows} rows; "
                f"fetch the dataset again"
            )
        with refusing(self._path):
            self._go_to(start)
            parts, num_bytes = [], 0
            while count:
                part = self._some(count)
                parts.append(part)
                count -= part.num_rows
                num_bytes += part.nbytes
                if num_bytes > self._most_bytes:
                    raise FormatError(f"{self._path}: unpacks to more than {num_bytes} bytes; fetch the dataset again")
            return pa.Table.from_batches(parts).combine_chunks()

    def close(self) -> None:
        self._batches = iter(())
        self._file.close()

    def _go_to(self, start: int) -> None:
        group = int(np.searchsorted(self._starts, start, side="right")) - 1
        if not 0 <= self._next <= start or self._next < self._starts[group]:
            groups = list(range(group, len(self._starts) - 1))
            self._batches = self._file.iter_batches(
                self._batch_rows, row_groups=groups, columns=list(self._columns), use_threads=False
            )
            self._left, self._next = None, int(self._starts[group])
        while self._next < start:
            self._some(start - self._next)

    def _some(self, most: int) -> Any:
        """Up to `most` of the next rows."""
        while self._left is None or self._left.num_rows == 0:
            self._left = next(self._batches, None)
            if self._left is None:
                raise FormatError(f"{self._path}: ends at row {self._next}; fetch the dataset again")
        part = self._left.slice(0, most)
        self._left = self._left.slice(part.num_rows)
        self._next += part.num_rows
        return part

    def _check(self, groups: Sequence[Group]) -> int:
        names = self._file.schema_arrow.names
        for name in self._columns:
            if names.count(name) != 1:
                raise FormatError(
                    f"{self._path}: expected one column {name!r}, got {names.count(name)}; fetch the dataset again"
                )
        owners = [field.name for field in self._file.schema_arrow for _ in range(_num_leaves(field.type))]
        return check_pages(self._path, groups, owners, self._columns)


def _num_leaves(kind: Any) -> int:
    """Number of page chains of a column of this type."""
    if isinstance(kind, pa.BaseExtensionType):
        kind = kind.storage_type
    if not pa.types.is_nested(kind):
        return 1
    return sum(_num_leaves(kind.field(index).type) for index in range(kind.num_fields))


def read_table(path: Path, columns: Sequence[str], most_rows: int) -> Any:
    """All rows of a small table; values may have any number of elements."""
    rows = Rows(path, dict.fromkeys(columns, -1), batch_rows=4096)
    try:
        if rows.num_rows > most_rows:
            raise FormatError(f"{path}: expected up to {most_rows} rows, got {rows.num_rows}; fetch the dataset again")
        return rows.take(0, rows.num_rows) if rows.num_rows else None
    finally:
        rows.close()


def names_in(path: Path) -> list[str]:
    """The columns of a file."""
    with refusing(path), pq.ParquetFile(path) as file:
        return list(file.schema_arrow.names)


def dense(column: Any, shape: tuple[int, ...], dtype: str, where: str) -> Array:
    """A column of numbers as [T, *shape]; a value with one element may be stored as a scalar."""
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    if isinstance(array, pa.ChunkedArray):  # of no chunks
        array = pa.concat_arrays(array.chunks)
    num_rows = len(array)
    sizes = shape
    if not pa.types.is_nested(array.type) and math.prod(shape) == 1:
        sizes = ()
    for size in sizes:
        array = _elements(array, size, where)
    if array.null_count:
        raise FormatError(f"{where}: expected numbers, got {array.null_count} nulls; fill them in")
    wanted = pa.from_numpy_dtype(np.dtype(dtype))
    if array.type != wanted:
        array = array.cast(wanted)
    values = array.to_numpy(zero_copy_only=False)
    return np.ascontiguousarray(values, dtype).reshape(num_rows, *shape)


def _elements(array: Any, size: int, where: str) -> Any:
    """The elements of lists that must all have one size."""
    kind = array.type
    if isinstance(kind, pa.BaseExtensionType):
        array = array.storage
        kind = array.type
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)):
        raise FormatError(f"{where}: expected lists of {size}, got {kind}; correct its shape in meta/info.json")
    if array.null_count:
        raise FormatError(f"{where}: expected lists of {size}, got {array.null_count} nulls; fill them in")
    if pa.types.is_fixed_size_list(kind):
        lengths = np.full(len(array), kind.list_size)
    else:
        lengths = np.diff(array.offsets.to_numpy())
    if (lengths != size).any():
        wrong = int(lengths[lengths != size][0])
        raise FormatError(f"{where}: expected lists of {size}, got one of {wrong}; correct its shape in meta/info.json")
    return array.flatten()


def texts(column: Any, where: str) -> list[str]:
    """A column of text."""
    found = column.to_pylist()
    if not all(isinstance(text, str) for text in found):
        raise FormatError(f"{where}: expected text, got {column.type}; fetch the dataset again")
    return list(found)


def images(column: Any, where: str) -> list[bytes]:
    """A column of encoded images."""
    kind = column.type
    if not pa.types.is_struct(kind) or kind.get_field_index("bytes") < 0:
        raise FormatError(f"{where}: expected images, got {kind}; correct its dtype in meta/info.json")
    found = [row["bytes"] for row in column.to_pylist() if row and isinstance(row["bytes"], bytes)]
    if len(found) < len(column):
        raise FormatError(f"{where}: expected images inside the table, got file names; embed them with lerobot")
    return found


def whole_numbers(column: Any, where: str) -> Array:
    return dense(column, (), "int64", where)

"""Checks how much memory a parquet file would need, from its footer and page headers, before it is decoded.

A column is a chain of pages, each after a header in Thrift's compact protocol. A few bytes may claim a billion values
(runs are stored as a count), so the counts are summed here and compared with the number of rows. The footer is parsed
here too, because pyarrow aborts the process on some damaged ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from understudy.formats.format import FormatError

MOST_FOOTER_BYTES = 2**28
MOST_PAGE_BYTES = 2**30  # of one page, unpacked
MOST_CELLS = 2**28  # values of one column in one group of rows
MOST_RATIO = 1000  # unpacked bytes per byte of the file, after the free bytes
MOST_FREE_BYTES = 2**28  # that are allowed for any file

_HEADER_BYTES = 8192  # a header holds a few numbers and, from some writers, minimum and maximum
_DATA, _DICTIONARY, _DATA_2 = 0, 2, 3


@dataclass(frozen=True, kw_only=True)
class Group:
    """A row group, with the start and end of each column's pages."""

    num_rows: int
    chains: Sequence[tuple[int, int]]


def read_footer(path: Path) -> list[Group]:
    """The row groups of a file; raises ValueError or LookupError if it is not a parquet file."""
    size = path.stat().st_size
    with path.open("rb") as file:
        file.seek(max(0, size - 8))
        end = file.read(8)
        length = int.from_bytes(end[:4], "little")
        if end[4:] != b"PAR1" or not 0 < length <= min(size - 8, MOST_FOOTER_BYTES):
            raise ValueError("it has no footer")
        file.seek(size - 8 - length)
        fields, _ = _struct(file.read(length), 0, 0)
    return [_group(fields_of_group, size) for fields_of_group in _list_in(fields, 4)]


def _group(fields: Any, size: int) -> Group:
    num_rows = _number(fields, 3)
    if not 0 <= num_rows < 2**40:
        raise ValueError(f"a group claims {num_rows} rows")
    chains = []
    for chunk in _list_in(fields, 1):
        about = chunk.get(3) if isinstance(chunk, dict) else None
        start, length = _number(about, 9), _number(about, 7)
        if isinstance(about, dict) and about.get(11):
            start = min(start, _number(about, 11))
        if num_rows and not 0 < start <= start + length <= size:
            raise ValueError("pages lie outside the file")
        chains.append((start, start + length))
    return Group(num_rows=num_rows, chains=chains)


def check_pages(path: Path, groups: Sequence[Group], owners: Sequence[str], columns: Mapping[str, int]) -> int:
    """Refuse a file whose pages of `columns` hold more or fewer values than its rows need.

    `owners` is the column of each chain of pages; `columns` the number of elements per value of a column, -1 for any.
    Returns the unpacked size of the largest dictionary, which every row may repeat.
    """
    size, largest = path.stat().st_size, 0
    with path.open("rb") as file:
        for group in groups:
            for owner, (start, end) in zip(owners, group.chains, strict=True):
                if owner in columns and group.num_rows:
                    num_values, num_bytes, dictionary = _walk(file, start, end)
                    largest = max(largest, dictionary)
                    elements = columns[owner]
                    good = num_values <= MOST_CELLS if elements < 0 else num_values == group.num_rows * elements
                    if not good or num_bytes > MOST_FREE_BYTES + MOST_RATIO * size:
                        raise FormatError(
                            f"{path}: {group.num_rows} rows of {owner!r} would unpack to {num_values} values and "
                            f"{num_bytes} bytes, which is not their shape; fetch the dataset again"
                        )
    return largest


def _walk(file: BinaryIO, at: int, end: int) -> tuple[int, int, int]:
    """Number of values, unpacked bytes, and bytes of dictionaries of a chain of pages."""
    num_values = num_bytes = dictionary = 0
    while at < end:
        file.seek(at)
        kind, unpacked, packed, count, length = _header(file.read(_HEADER_BYTES))
        if packed < 0 or not 0 <= unpacked <= MOST_PAGE_BYTES or count < 0:
            raise ValueError(f"a page claims {unpacked} bytes and {count} values")
        if kind in (_DATA, _DATA_2):
            num_values += count
        elif kind == _DICTIONARY:
            dictionary += unpacked
        else:
            raise ValueError(f"a page is of kind {kind}")
        num_bytes += unpacked
        at += length + packed
    if at != end:
        raise ValueError("pages end outside their column")
    return num_values, num_bytes, dictionary


def _header(data: bytes) -> tuple[int, int, int, int, int]:
    """Kind, unpacked and packed bytes, values, and the length of the header itself."""
    fields, length = _struct(data, 0, 0)
    kind = _number(fields, 1)
    body = fields.get({_DATA: 5, _DICTIONARY: 7, _DATA_2: 8}.get(kind, -1))
    return kind, _number(fields, 2), _number(fields, 3), _number(body, 1), length


def _number(fields: Any, number: int) -> int:
    value = fields.get(number) if isinstance(fields, dict) else None
    if type(value) is not int:
        raise ValueError("a struct lacks a number")
    return value


def _list_in(fields: Mapping[int, Any], number: int) -> list[Any]:
    value = fields.get(number, []) if isinstance(fields, dict) else None
    if not isinstance(value, list):
        raise ValueError("the footer lacks a list")
    return value


# --- Thrift's compact protocol -----------------------------------------------------------------------------------


def _struct(data: bytes, at: int, depth: int) -> tuple[dict[int, Any], int]:
    """The fields of a struct by number; texts and floats are skipped."""
    if depth > 8:
        raise ValueError("its structs are nested too deeply")
    fields: dict[int, Any] = {}
    number = 0
    while True:
        first = data[at]
        at += 1
        if first == 0:
            return fields, at
        if first >> 4:
            number += first >> 4
        else:
            number, at = _zigzag(data, at)
        fields[number], at = _value(data, at, first & 15, depth)


def _value(data: bytes, at: int, kind: int, depth: int) -> tuple[Any, int]:
    if kind in (1, 2):  # the type itself is the bool
        return kind == 1, at
    if kind == 3:
        return data[at], at + 1
    if kind in (4, 5, 6):
        return _zigzag(data, at)
    if kind == 7:
        return None, at + 8
    if kind == 8:
        length, at = _varint(data, at)
        return None, at + length
    if kind in (9, 10):
        return _list(data, at, depth)
    if kind == 12:
        return _struct(data, at, depth + 1)
    raise ValueError(f"a field is of kind {kind}")


def _list(data: bytes, at: int, depth: int) -> tuple[list[Any], int]:
    first = data[at]
    at += 1
    count, kind = first >> 4, first & 15
    if count == 15:
        count, at = _varint(data, at)
    if count > len(data) - at or depth > 8:
        raise ValueError("a list is longer than what holds it")
    values = []
    for _ in range(count):
        value, at = (data[at], at + 1) if kind in (1, 2) else _value(data, at, kind, depth + 1)
        values.append(value)
    return values, at


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
        if shift > 63:
            raise ValueError("a number does not end")


def _zigzag(data: bytes, at: int) -> tuple[int, int]:
    value, at = _varint(data, at)
    return (value >> 1) ^ -(value & 1), at

"""Layout: where each column of a segment lies in its file. Pure; docs/formats.md describes the same byte by byte.

A segment is a safetensors file. Each fixed-shape field is one tensor [capacity, ...]. A ragged field, such as encoded
frames, is a tensor of (offset, length) pairs into the last tensor, `heap`, where each value stands behind its checksum.
A large field (`LARGE_BYTES` or more a row) has a tensor of checksums, so that it can be read and checked alone.
All other bytes of a row, those checksums included, are covered by the tensor `row/checksum`.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TypedDict, TypeVar

import numpy as np

from understudy.core.spec import ArraySpec
from understudy.core.step import StepSpec
from understudy.replay.format.arrays import DType

SEGMENT_FORMAT = "understudy-segment-1"
LARGE_BYTES = 1024
MAX_HEAP_BYTES = 2**32 - 1  # offsets are uint32
HEADER_ALIGN = 4096
EXPECTED_COMPRESSION = 50  # of encoded frames; if they are larger, the heap is full before the rows are
ROW_ALIGN = 64  # capacities are multiples of this, so every column starts aligned for its dtype

SAFETENSORS_DTYPES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "uint64": "U64",
    "int64": "I64",
    "float16": "F16",
    "float32": "F32",
    "float64": "F64",
}
_KINDS = {np.dtype(name): kind for name, kind in SAFETENSORS_DTYPES.items()}


@dataclass(frozen=True, kw_only=True)
class TensorColumn:
    """One tensor of a segment, the heap excepted."""

    name: str
    dtype: DType
    shape: tuple[int, ...]  # of one row
    offset: int  # of row 0, in the file
    row_bytes: int

    def at(self, row: int) -> int:
        """The offset of a row in the file."""
        return self.offset + row * self.row_bytes


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The tensors of a segment of `capacity` rows and a heap of `heap_bytes`."""

    spec: StepSpec
    capacity: int
    heap_bytes: int
    store_id: str
    segment_id: int

    @cached_property
    def fields(self) -> dict[str, ArraySpec]:
        """The fields of a step as they are stored."""
        return self.spec.stored_columns

    @cached_property
    def ragged(self) -> tuple[str, ...]:
        return tuple(path for path, leaf in self.fields.items() if leaf.ragged)

    @cached_property
    def large(self) -> tuple[str, ...]:
        return large_fields(self.spec)

    @cached_property
    def columns(self) -> dict[str, TensorColumn]:
        """All tensors but the heap, in the order of the file."""
        columns: dict[str, TensorColumn] = {}
        offset = len(self.header)
        for name, (dtype, shape) in tensors_of(self.spec).items():
            size = _size(dtype, shape)
            columns[name] = TensorColumn(name=name, dtype=dtype, shape=shape, offset=offset, row_bytes=size)
            offset += size * self.capacity
        return columns

    @cached_property
    def small(self) -> tuple[TensorColumn, ...]:
        """The columns whose bytes `row/checksum` covers, in the order in which it covers them."""
        return tuple(c for c in self.columns.values() if c.name not in self.large and c.name != "row/checksum")

    @cached_property
    def heap_offset(self) -> int:
        return len(self.header) + row_bytes_of(self.spec) * self.capacity

    @cached_property
    def file_bytes(self) -> int:
        return self.heap_offset + self.heap_bytes

    @cached_property
    def header(self) -> bytes:
        """The first bytes of the file: length, JSON, padding. The same layout always gives the same bytes."""
        content: dict[str, TensorHeader | dict[str, str]] = {
            "__metadata__": {
                "format": SEGMENT_FORMAT,
                "store": self.store_id,
                "segment": str(self.segment_id),
                "spec": self.spec.json_text,
            }
        }
        start = 0
        tensors = {name: (dtype, (self.capacity, *shape)) for name, (dtype, shape) in tensors_of(self.spec).items()}
        for name, (dtype, shape) in {**tensors, "heap": (np.dtype("uint8"), (self.heap_bytes,))}.items():
            stop = start + _size(dtype, shape)
            kind = _KINDS[dtype]
            content[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [start, stop]}
            start = stop
        body = json.dumps(content, separators=(",", ":")).encode()
        body += b" " * (-(len(body) + 8) % HEADER_ALIGN)
        return struct.pack("<Q", len(body)) + body


def tensors_of(spec: StepSpec) -> dict[str, tuple[DType, tuple[int, ...]]]:
    """Name, dtype and row shape of each tensor but the heap, in the order of the file: wide dtypes first."""
    return _cached(_tensors_cache, spec.json_text, lambda: _tensors(spec))


def _tensors(spec: StepSpec) -> dict[str, tuple[DType, tuple[int, ...]]]:
    tensors: dict[str, tuple[DType, tuple[int, ...]]] = {}
    for path, leaf in spec.stored_columns.items():
        tensors[path] = (np.dtype("uint32"), (2,)) if leaf.ragged else (np.dtype(leaf.dtype), leaf.fixed_shape)
    for path in large_fields(spec):
        tensors[checksum_of(path)] = (np.dtype("uint64"), ())
    tensors["row/episode"] = (np.dtype("int64"), ())  # with index: which row of which episode this is
    tensors["row/index"] = (np.dtype("int32"), ())
    tensors["row/record"] = (np.dtype("uint32"), (2,))  # in the heap: what the catalog lists of these rows
    tensors["row/checksum"] = (np.dtype("uint64"), ())
    return dict(sorted(tensors.items(), key=lambda item: (-item[1][0].itemsize, item[0])))


def large_fields(spec: StepSpec) -> tuple[str, ...]:
    return tuple(path for path, leaf in spec.stored_columns.items() if leaf.row_bytes >= LARGE_BYTES)


def checksum_of(path: str) -> str:
    """The name of the tensor that holds the checksums of a large field."""
    return f"checksum/{path}"


def row_bytes_of(spec: StepSpec) -> int:
    """Bytes of one row in all tensors, without the heap."""
    return _cached(
        _row_bytes_cache, spec.json_text, lambda: sum(_size(dtype, shape) for dtype, shape in tensors_of(spec).values())
    )


MAX_CACHED_SPECS = 100  # any client may send a server new specs
_T = TypeVar("_T")
_row_bytes_cache: dict[str, int] = {}
_tensors_cache: dict[str, dict[str, tuple[DType, tuple[int, ...]]]] = {}


def _cached(cache: dict[str, _T], key: str, make: Callable[[], _T]) -> _T:
    found = cache.get(key)
    if found is None:
        found = make()
        if len(cache) >= MAX_CACHED_SPECS:
            cache.clear()
        cache[key] = found
    return found


def plan_capacity(spec: StepSpec, segment_bytes: int, min_rows: int = 1, min_heap_bytes: int = 0) -> tuple[int, int]:
    """Rows and heap bytes of a segment of about `segment_bytes`. Files are sparse: unused bytes take no disk."""
    encoded_bytes = sum(spec.columns[path].row_bytes for path in spec.encoded) // EXPECTED_COMPRESSION
    rows = max(segment_bytes // (row_bytes_of(spec) + encoded_bytes), min_rows, 1)
    capacity = -(-rows // ROW_ALIGN) * ROW_ALIGN
    share = 1 if any(leaf.ragged for leaf in spec.stored_columns.values()) else 4
    return capacity, min(max(segment_bytes // share, min_heap_bytes), MAX_HEAP_BYTES)


class TensorHeader(TypedDict):
    """What a safetensors header says of one tensor."""

    dtype: str
    shape: list[int]
    data_offsets: list[int]


def parse_header(header: bytes) -> tuple[dict[str, str], dict[str, TensorHeader]]:
    """The metadata and the tensors of a segment's header; a ValueError if it is not one."""
    content = json.loads(header[8:])
    if not isinstance(content, dict) or not isinstance(content.get("__metadata__"), dict):
        raise ValueError("no metadata")
    metadata = content.pop("__metadata__")
    return metadata, content


def _size(dtype: DType, shape: tuple[int, ...]) -> int:
    return dtype.itemsize * math.prod(shape)

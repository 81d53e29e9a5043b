"""Columns: the values of a field over all rows of an episode, from and to what an Example holds of it.

one value a row                 field
a list in each row (ragged)     field/ragged_flat_values, field/ragged_row_lengths_0
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from understudy.core import ArraySpec
from understudy.core.episode import Column
from understudy.formats.rlds.example import Malformed, Values
from understudy.formats.rlds.features import Leaf
from understudy.formats.rlds.images import decode_images, encode_image

Array = np.ndarray[Any, Any]

_FLAT, _LENGTHS = "ragged_flat_values", "ragged_row_lengths_0"
_IN_ROW = 2**30  # bytes of one unpacked row
_RAW = (
    "float16",
    "float64",
    "uint64",
    "int8",
    "int16",
    "uint16",
)  # dtypes that an Example cannot store exactly or compactly


def num_rows(name: str, leaf: Leaf, fields: Mapping[str, Values]) -> int | None:
    """The number of rows of a field; None if only other fields tell it."""
    if leaf.sequences:
        return len(_values(f"{name}/{_LENGTHS}", fields))
    values = _values(name, fields)
    if isinstance(values, list):
        return len(values)
    size = None if None in leaf.shape else math.prod(_fixed(leaf.shape))
    return len(values) // size if size else None


def decode_column(name: str, leaf: Leaf, fields: Mapping[str, Values], rows: int) -> Column:
    """An array [rows, ...], or a list with a value per row where the field is ragged or text."""
    if leaf.sequences:
        return _decode_sequences(name, leaf, fields, rows)
    return _decode(name, leaf, _values(name, fields), rows)


def _decode(name: str, leaf: Leaf, values: Values, rows: int) -> Column:
    if isinstance(values, list) and (
        leaf.kind != "tensor" or leaf.encoding != "none" or leaf.array_spec.dtype == "str"
    ):
        if len(values) != rows:
            raise Malformed(f"{name}: has {len(values)} values in {rows} rows")
        if leaf.kind == "image":
            return decode_images(values, leaf)
        if leaf.array_spec.dtype == "str":
            return [_text(name, value) for value in values]
        return _from_raw(name, leaf, values)
    if isinstance(values, list):
        if values:
            raise Malformed(f"{name}: holds bytes where numbers are wanted")
        values = np.zeros(0, np.int64)
    if leaf.kind != "tensor" or leaf.encoding != "none":
        raise Malformed(f"{name}: holds numbers where bytes are wanted")
    return _from_numbers(name, leaf, values, rows)


def _from_numbers(name: str, leaf: Leaf, values: Array, rows: int) -> Column:
    spec = leaf.array_spec
    if spec.numpy_dtype.kind == "f" and values.dtype.kind != "f" and len(values):
        raise Malformed(f"{name}: holds whole numbers where {spec.dtype} is wanted")
    if spec.numpy_dtype.kind != "f" and values.dtype.kind == "f":
        raise Malformed(f"{name}: holds floats where {spec.dtype} is wanted")
    if spec.dtype == "bool" and len(values) and not 0 <= int(values.min()) <= int(values.max()) <= 1:
        raise Malformed(f"{name}: holds numbers other than 0 and 1 where bool is wanted")
    if spec.numpy_dtype.kind in "iu" and spec.dtype not in ("int64", "uint64") and len(values):
        limits = np.iinfo(spec.numpy_dtype)
        if not limits.min <= int(values.min()) <= int(values.max()) <= limits.max:
            raise Malformed(f"{name}: holds numbers outside {spec.dtype}")
    if spec.dtype == "uint64":
        values = values.view(np.uint64)
    with np.errstate(over="ignore"):
        array = values.astype(spec.numpy_dtype)
    if None not in leaf.shape:
        size = math.prod(_fixed(leaf.shape))
        if len(values) != rows * size:
            raise Malformed(f"{name}: has {len(values)} numbers, and {rows} rows of {spec} are {rows * size}")
        return array.reshape(rows, *_fixed(leaf.shape))
    inner = math.prod(_fixed(leaf.shape[1:]))
    if not rows or not inner or len(values) % (rows * inner):
        raise Malformed(f"{name}: has {len(values)} numbers, which are not {rows} rows of {spec}")
    return list(array.reshape(rows, -1, *_fixed(leaf.shape[1:])))


def _from_raw(name: str, leaf: Leaf, values: list[bytes]) -> Column:
    """Decode rows of raw bytes, which may be compressed."""
    spec = leaf.array_spec
    dtype = np.dtype("<u2") if leaf.dtype == "bfloat16" else spec.numpy_dtype.newbyteorder("<")
    inner = math.prod(size for size in leaf.shape if size is not None) * dtype.itemsize
    fixed = None not in leaf.shape
    if fixed and leaf.encoding == "none":
        raise Malformed(f"{name}: holds bytes where numbers are wanted")
    found = []
    for value in values:
        raw = _unpacked(name, value, inner if fixed else _IN_ROW) if leaf.encoding == "zlib" else value
        if (fixed and len(raw) != inner) or (not fixed and (not inner or len(raw) % inner)):
            raise Malformed(f"{name}: a row has {len(raw)} bytes, which is not {spec}")
        if spec.dtype == "bool" and raw.translate(None, b"\x00\x01"):
            raise Malformed(f"{name}: holds bytes other than 0 and 1 where bool is wanted")
        found.append(raw)
    if fixed:
        whole = _as_array(b"".join(found), dtype, leaf)
        return whole.reshape(len(found), *_fixed(leaf.shape))
    return [_as_array(raw, dtype, leaf).reshape(-1, *_fixed(leaf.shape[1:])) for raw in found]


def _as_array(raw: bytes, dtype: np.dtype[Any], leaf: Leaf) -> Array:
    array = np.frombuffer(raw, dtype)
    if leaf.dtype == "bfloat16":  # the upper half of a float32
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(dtype.newbyteorder("="))


def _unpacked(name: str, value: bytes, limit: int) -> bytes:
    unpack = zlib.decompressobj()
    try:
        raw = unpack.decompress(value, limit + 1)
    except zlib.error as error:
        raise Malformed(f"{name}: cannot be decompressed ({error})") from None
    if len(raw) > limit or not unpack.eof:
        raise Malformed(f"{name}: has more than {limit} bytes when unpacked, or is cut off")
    return raw


def _decode_sequences(name: str, leaf: Leaf, fields: Mapping[str, Values], rows: int) -> Column:
    lengths = _values(f"{name}/{_LENGTHS}", fields)
    if isinstance(lengths, list) and not lengths:
        lengths = np.zeros(0, np.int64)
    if isinstance(lengths, list) or lengths.dtype.kind != "i" or len(lengths) != rows:
        raise Malformed(f"{name}: has the lengths of {len(lengths)} rows, and there are {rows}")
    flat_values = _values(f"{name}/{_FLAT}", fields)
    if len(lengths) and (int(lengths.min()) < 0 or int(lengths.max()) > 2**40):
        raise Malformed(f"{name}: a row has the length {lengths.min()} or {lengths.max()}")
    total = int(lengths.sum())
    one = Leaf(kind=leaf.kind, shape=leaf.shape, dtype=leaf.dtype, encoding=leaf.encoding)
    if None in one.shape:
        raise Malformed(f"{name}: has several dimensions of unknown length")
    flat = _decode(f"{name}/{_FLAT}", one, flat_values, total)
    (length,) = leaf.sequences
    if length is not None:
        if (lengths != length).any():
            raise Malformed(f"{name}: a row does not have the declared {length} elements")
        return flat.reshape(rows, length, *_fixed(leaf.shape))
    return np.split(flat, np.cumsum(lengths)[:-1]) if rows else []


def _values(name: str, fields: Mapping[str, Values]) -> Values:
    try:
        return fields[name]
    except KeyError:
        raise Malformed(f"{name}: is in features.json and not in the record") from None


def _text(name: str, value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise Malformed(f"{name}: is not UTF-8: {value[:40]!r}") from None


def _fixed(shape: tuple[int | None, ...]) -> tuple[int, ...]:
    return tuple(size for size in shape if size is not None)


# ---- writing


def leaf_of(spec: ArraySpec, images: str) -> Leaf:
    """How a field is stored: text and numbers directly, images as `images` says, other dtypes as bytes."""
    if spec.dtype == "str":
        return Leaf(kind="text")
    if spec.dtype == "uint32" and spec.ragged:  # TensorFlow cannot unpack bytes of it
        return Leaf(kind="tensor", shape=spec.shape[1:], dtype="uint32", sequences=(None,))
    if images != "bytes" and _is_image(spec):
        jpeg = images == "jpeg" and spec.dtype == "uint8" and spec.shape[2] != 4
        return Leaf(kind="image", shape=spec.shape, dtype=spec.dtype, encoding="jpeg" if jpeg else "png")
    large = spec.ragged or spec.row_bytes > 4096 or not spec.row_bytes
    raw = spec.dtype in _RAW or large or (spec.dtype == "uint8" and math.prod(spec.fixed_shape) > 16)
    raw = raw and spec.dtype != "uint32"
    return Leaf(kind="tensor", shape=spec.shape, dtype=spec.dtype, encoding="bytes" if raw else "none")


def _is_image(spec: ArraySpec) -> bool:
    if spec.ragged or len(spec.shape) != 3 or 0 in spec.shape:
        return False
    return spec.shape[2] in {"uint8": (1, 3, 4), "uint16": (1,)}.get(spec.dtype, ())


def encode_column(name: str, leaf: Leaf, column: Column) -> dict[str, list[bytes] | Array]:
    """The fields of an Example that hold a column."""
    if leaf.kind == "text":
        return {name: [value.encode() for value in column]}
    if leaf.kind == "image":
        return {name: [encode_image(image, leaf.encoding) for image in column]}
    if leaf.sequences:
        flat = np.concatenate([np.asarray(value).reshape(-1, *_fixed(leaf.shape)) for value in column])
        return {
            f"{name}/{_FLAT}": _as_numbers(flat),
            f"{name}/{_LENGTHS}": np.array([len(value) for value in column], np.int64),
        }
    if leaf.encoding == "bytes":
        dtype = np.dtype(leaf.dtype).newbyteorder("<")
        return {name: [np.asarray(value).astype(dtype, copy=False).tobytes() for value in column]}
    return {name: _as_numbers(column)}


def _as_numbers(column: Array) -> Array:
    flat = np.asarray(column).reshape(-1)
    return flat.astype(np.float32 if flat.dtype.kind == "f" else np.int64)

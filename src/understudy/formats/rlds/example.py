"""tf.train.Example: a dict from names to lists of bytes, float32 or int64, as a protocol buffer, parsed by hand.

Example   1: Features
Features  1: map entry {1: name, 2: Feature}, any number
Feature   1: BytesList, 2: FloatList, 3: Int64List, each {1: value, any number; numbers packed}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

Array = np.ndarray[Any, Any]
Values: TypeAlias = "list[bytes] | Array"  # bytes, or float32 [n], or int64 [n]

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5  # wire types


class Malformed(ValueError):
    """Invalid bytes; the caller, who knows the file, adds where."""


def parse(data: bytes) -> dict[str, Values]:
    """The fields of a serialised Example."""
    found: dict[str, Values] = {}
    for features in _messages(data, 0, len(data)):
        for entry in _messages(data, *features):
            name, feature = _entry(data, *entry)
            found[name] = _feature(data, *feature)
    return found


def serialize(fields: Mapping[str, Sequence[bytes] | Array]) -> bytes:
    """An Example with these fields, in the order of their names. Arrays are float32 or int64 and have one dimension."""
    entries = []
    for name in sorted(fields):
        value = fields[name]
        if not isinstance(value, np.ndarray):
            feature = _field(1, b"".join(_field(1, item) for item in value))
        elif value.dtype == np.float32:
            feature = _field(2, _field(1, value.astype("<f4").tobytes()) if value.size else b"")
        else:
            assert value.dtype == np.int64
            feature = _field(3, _field(1, _write_varints(value)) if value.size else b"")
        entries.append(_field(1, _field(1, name.encode()) + _field(2, feature)))
    return _field(1, b"".join(entries))


# ---- reading


def _messages(data: bytes, start: int, stop: int) -> list[tuple[int, int]]:
    """Positions of the values of field 1; other fields are skipped."""
    found = []
    while start < stop:
        number, wire, start = _tag(data, start, stop)
        begin, start = _value(data, wire, start, stop)
        if number == 1 and wire == _BYTES:
            found.append((begin, start))
    return found


def _entry(data: bytes, start: int, stop: int) -> tuple[str, tuple[int, int]]:
    name, feature = b"", (start, start)
    while start < stop:
        number, wire, start = _tag(data, start, stop)
        begin, start = _value(data, wire, start, stop)
        if number == 1:
            name = data[begin:start]
        elif number == 2:
            feature = (begin, start)
    try:
        return name.decode(), feature
    except UnicodeDecodeError:
        raise Malformed(f"a field's name is not UTF-8: {name[:40]!r}") from None


def _feature(data: bytes, start: int, stop: int) -> Values:
    value: Values = []
    while start < stop:
        number, wire, start = _tag(data, start, stop)
        begin, start = _value(data, wire, start, stop)
        if wire == _BYTES and number == 1:
            value = _bytes_list(data, begin, start)
        elif wire == _BYTES and number in (2, 3):
            value = _numbers(data, begin, start, floats=number == 2)
    return value


def _bytes_list(data: bytes, start: int, stop: int) -> list[bytes]:
    found = []
    while start < stop:
        if data[start] != 10:  # field 1, bytes: nothing else is in such a list
            raise Malformed(f"byte {start} of the record is not part of a list of bytes")
        size, start = _varint(data, start + 1, stop)
        if size > stop - start:
            raise Malformed(f"byte {start} of the record: {size} bytes are announced and {stop - start} are left")
        found.append(data[start : start + size])
        start += size
    return found


def _numbers(data: bytes, start: int, stop: int, *, floats: bool) -> Array:
    pieces: list[Array] = []
    while start < stop:
        number, wire, start = _tag(data, start, stop)
        begin, start = _value(data, wire, start, stop)
        if number != 1 or wire not in (_BYTES, _FIXED32 if floats else _VARINT):
            raise Malformed(f"byte {begin} of the record is not part of a list of numbers")
        pieces.append(_floats(data, begin, start) if floats else _read_varints(data, begin, start))
    if len(pieces) == 1:
        return pieces[0]
    return np.concatenate(pieces) if pieces else np.zeros(0, np.float32 if floats else np.int64)


def _floats(data: bytes, start: int, stop: int) -> Array:
    if (stop - start) % 4:
        raise Malformed(f"byte {start} of the record: {stop - start} bytes of float32")
    return np.frombuffer(data, "<f4", (stop - start) // 4, start)


def _read_varints(data: bytes, start: int, stop: int) -> Array:
    """Decode all numbers at once: each byte adds its 7 bits, shifted by its position in the number."""
    raw = np.frombuffer(data, np.uint8, stop - start, start)
    if not (raw & 0x80).any():
        return raw.astype(np.int64)
    ends = np.flatnonzero(raw < 0x80)
    if not len(ends) or ends[-1] != len(raw) - 1:
        raise Malformed(f"byte {stop} of the record: the last number is cut off")
    starts = np.concatenate([[0], ends[:-1] + 1])
    lengths = ends - starts + 1
    if lengths.max() > 10:
        raise Malformed(f"byte {start} of the record: a number has more than 64 bits")
    position = np.arange(len(raw)) - np.repeat(starts, lengths)
    bits = (raw & 0x7F).astype(np.uint64) << (7 * position).astype(np.uint64)
    return np.add.reduceat(bits, starts).view(np.int64)


def _tag(data: bytes, start: int, stop: int) -> tuple[int, int, int]:
    tag, start = _varint(data, start, stop)
    return tag >> 3, tag & 7, start


def _value(data: bytes, wire: int, start: int, stop: int) -> tuple[int, int]:
    """Start and end of a field's value."""
    if wire == _BYTES:
        size, start = _varint(data, start, stop)
    elif wire == _VARINT:
        _, end = _varint(data, start, stop)
        size = end - start
    elif wire in (_FIXED32, _FIXED64):
        size = 4 if wire == _FIXED32 else 8
    else:
        raise Malformed(f"byte {start} of the record: {wire} is no kind of field")
    if size > stop - start:
        raise Malformed(f"byte {start} of the record: {size} bytes are announced and {stop - start} are left")
    return start, start + size


def _varint(data: bytes, start: int, stop: int) -> tuple[int, int]:
    value = shift = 0
    while start < stop and shift < 70:
        byte = data[start]
        start += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, start
        shift += 7
    raise Malformed(f"byte {start} of the record: a number is cut off, or has more than 64 bits")


# ---- writing


def _field(number: int, value: bytes) -> bytes:
    return bytes([number << 3 | _BYTES]) + _write_varint(len(value)) + value


def _write_varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _write_varints(values: Array) -> bytes:
    """Encode all numbers at once: ten columns of 7 bits, of which each number uses as many as it needs."""
    unsigned = values.view(np.uint64)
    if not (unsigned >= 0x80).any():
        return unsigned.astype(np.uint8).tobytes()
    groups = (unsigned[:, None] >> np.arange(0, 70, 7, dtype=np.uint64)).astype(np.uint8) & 0x7F
    groups[:, 9] &= 1
    length = 10 - np.argmax(groups[:, ::-1] != 0, axis=1)
    length[unsigned == 0] = 1
    position = np.arange(10)
    groups |= np.where(position < length[:, None] - 1, 0x80, 0).astype(np.uint8)
    taken: Array = groups[position < length[:, None]]
    return taken.tobytes()

"""Writes items as pickle opcodes that do not depend on the version of Python or numpy; numpy 1 and 2 can read them."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from understudy.formats.format import FormatError

BEGIN = b"\x80\x03]("  # protocol 3, an empty list, a mark
BEGIN_NEXT = b"("  # after `END_BATCH`, for more items
END_BATCH = b"e"  # adds the items since the mark to the list
END = b"."


def dump_item(value: Any) -> bytes:
    """Encode one item of the list: dicts, lists, tuples, text, bytes, numbers and arrays of numbers."""
    parts: list[bytes] = []
    _dump(value, parts)
    return b"".join(parts)


def _dump(value: Any, parts: list[bytes]) -> None:
    if value is None or isinstance(value, bool):
        parts.append({None: b"N", True: b"\x88", False: b"\x89"}[value])
    elif isinstance(value, np.ndarray | np.generic):
        _dump_array(np.asarray(value), parts)
    elif isinstance(value, int):
        data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
        parts.append(b"\x8a" + bytes([len(data)]) + data)
    elif isinstance(value, float):
        parts.append(b"G" + struct.pack(">d", value))
    elif isinstance(value, str):
        parts.append(_counted(b"X", value.encode()))
    elif isinstance(value, bytes):
        parts.append(_counted(b"B", value))
    elif isinstance(value, dict):
        parts.append(b"}(")
        for key, child in value.items():
            _dump(key, parts)
            _dump(child, parts)
        parts.append(b"u")
    elif isinstance(value, list | tuple):
        parts.append(b"](" if isinstance(value, list) else b"(")
        for child in value:
            _dump(child, parts)
        parts.append(b"e" if isinstance(value, list) else b"t")
    else:
        raise FormatError(f"an exported pickle holds arrays, numbers and text, got {type(value).__name__}; convert it")


def _dump_array(array: np.ndarray[Any, Any], parts: list[bytes]) -> None:
    """Write what numpy 1 writes, which numpy 2 reads too."""
    if array.dtype.kind not in "biuf":
        raise FormatError(f"an exported pickle holds arrays of numbers, got {array.dtype}; convert it")
    array = array.astype(array.dtype.newbyteorder("<"), copy=False)
    code, order = array.dtype.str[1:], array.dtype.str[:1]
    parts.append(b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85C\x01b\x87R(K\x01")
    _dump(tuple(array.shape), parts)
    parts.append(b"cnumpy\ndtype\n" + _counted(b"X", code.encode()) + b"\x89\x88\x87R(K\x03")
    parts.append(_counted(b"X", order.encode()) + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89")
    parts.append(_counted(b"B", array.tobytes()))
    parts.append(b"tb")


def _counted(code: bytes, data: bytes) -> bytes:
    if len(data) >= 1 << 32:
        raise FormatError(f"a value of {len(data)} bytes; an exported pickle holds values below 4 GiB")
    return code + struct.pack("<I", len(data)) + data

"""Message: named arrays as one message, and a message in pieces. Pure.

A message is the bytes of a safetensors file: the length of the header, a JSON header that names each tensor, the
tensors. The last tensor, `check`, is the xxh3 of all bytes before it, which reveals damage on the network or on a disk.
A large message is sent in pieces, of which the first is the header. docs/formats.md describes both.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import xxhash

from understudy.core import WireError
from understudy.replay.format.layout import SAFETENSORS_DTYPES

Array = np.ndarray[Any, Any]
Buffer: TypeAlias = bytes | memoryview

PIECE_BYTES = 1 << 20
MAX_HEADER_BYTES = 1 << 20
MAX_JSON_BYTES = 1 << 20  # of a small message
MAX_JSON_DEPTH = 64
_JSON_MARKS = re.compile(rb'[\\"\[\]{}]')
CHECK = "check"
_CHECK_BYTES = 8
_DTYPES = {kind: np.dtype(name) for name, kind in SAFETENSORS_DTYPES.items()}
_BFLOAT16 = "BF16"
_BAD_CHECKSUM = "the checksum of a message is wrong: it was damaged on its way; send it again"


@dataclass(frozen=True)
class Tensor:
    """An entry of a header. `start` counts from the first byte after the header."""

    name: str
    dtype: str  # as safetensors names it
    shape: tuple[int, ...]
    start: int
    num_bytes: int


@dataclass(frozen=True)
class Header:
    metadata: dict[str, str]
    tensors: tuple[Tensor, ...]  # in the order of the bytes, `check` left out
    num_bytes: int  # of the header itself
    body_bytes: int  # of all that follows it


def parse_json(text: bytes | str) -> Any:
    """The value of a JSON text; a ValueError if it is not JSON or is nested too deeply.

    The depth is checked before parsing, because the parser itself stops only when the stack is full, where unrelated
    code such as the garbage collector fails too.
    """
    data = text.encode() if isinstance(text, str) else text
    if data.count(b"[") + data.count(b"{") > MAX_JSON_DEPTH:
        _refuse_deep(data)
    return json.loads(data)


def to_json(value: Any) -> bytes:
    """A small message."""
    return json.dumps(value, separators=(",", ":")).encode()


def from_json(message: bytes) -> dict[str, Any]:
    """The JSON object in a small message; a WireError if it is not one."""
    if len(message) > MAX_JSON_BYTES:
        raise WireError(f"expected at most {MAX_JSON_BYTES} bytes of JSON, got {len(message)}; send less at once")
    try:
        value = parse_json(message)
    except (ValueError, RecursionError):
        raise WireError(f"expected JSON, got {bytes(message[:40])!r}; is it an understudy client?") from None
    if not isinstance(value, dict):
        raise WireError(f"expected a JSON object, got {bytes(message[:40])!r}")
    return value


def _refuse_deep(data: bytes) -> None:
    depth, in_text, skipped = 0, False, -1
    for found in _JSON_MARKS.finditer(data):
        mark = found[0]
        if found.start() == skipped:
            continue
        if mark == b"\\":
            skipped = found.end()  # the next character is escaped
        elif mark == b'"':
            in_text = not in_text
        elif not in_text:
            depth += 1 if mark in b"[{" else -1
            if depth > MAX_JSON_DEPTH:
                raise ValueError(f"more than {MAX_JSON_DEPTH} levels of JSON")


# ---- making a message


def pack(
    metadata: Mapping[str, str], arrays: Mapping[str, Array], *, bfloat16: frozenset[str] = frozenset()
) -> list[Buffer]:
    """A message as buffers, the header first. They are views of `arrays` where those are contiguous.

    Arrays named in `bfloat16` are uint16 and hold the output of `to_bfloat16`.
    """
    content: dict[str, Any] = {"__metadata__": dict(metadata)}
    buffers: list[Buffer] = []
    start = 0
    for name, array in sorted(arrays.items(), key=lambda item: -item[1].dtype.itemsize):
        if name in (CHECK, "__metadata__") or array.dtype.name not in SAFETENSORS_DTYPES:
            raise WireError(f"{name}: cannot be sent as {array.dtype}; rename it, or convert it to another dtype")
        array = array.astype(array.dtype.newbyteorder("<"), copy=False)
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
        dtype = _BFLOAT16 if name in bfloat16 else SAFETENSORS_DTYPES[array.dtype.name]
        content[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [start, start + len(data)]}
        start += len(data)
        buffers.append(data)
    content[CHECK] = {"dtype": "U64", "shape": [], "data_offsets": [start, start + _CHECK_BYTES]}
    body = json.dumps(content, separators=(",", ":")).encode()
    body += b" " * (-len(body) % 8)
    if len(body) > MAX_HEADER_BYTES:
        raise WireError(f"expected a header of at most {MAX_HEADER_BYTES} bytes, got {len(body)}; send fewer arrays")
    buffers.insert(0, struct.pack("<Q", len(body)) + body)
    return [*buffers, _checksum(buffers)]


def check_of(message: Buffer) -> int:
    """The checksum that a whole message ends with."""
    return int.from_bytes(message[-_CHECK_BYTES:], "little")


def size_of(buffers: Iterable[Buffer]) -> int:
    return sum(len(buffer) for buffer in buffers)


def pieces(buffers: Sequence[Buffer]) -> Iterator[bytes]:
    """A message in pieces: the header, then pieces of PIECE_BYTES, the last one shorter."""
    yield bytes(buffers[0])
    waiting: list[Buffer] = []
    free = PIECE_BYTES
    for buffer in buffers[1:]:
        view = memoryview(buffer)
        while view:
            waiting.append(view[:free])
            view = view[free:]
            free -= len(waiting[-1])
            if free == 0:
                yield b"".join(waiting)
                waiting, free = [], PIECE_BYTES
    if waiting:
        yield b"".join(waiting)


# ---- reading a message


def unpack(message: Buffer) -> tuple[dict[str, str], dict[str, Array]]:
    """The metadata and the arrays of a whole message. The arrays are views of it."""
    view = memoryview(message)
    header = parse_header(view)
    if len(view) != header.num_bytes + header.body_bytes:
        raise WireError(
            f"expected a message of {header.num_bytes + header.body_bytes} bytes as its header says, got {len(view)}; "
            f"send it whole"
        )
    if _checksum([view[:-_CHECK_BYTES]]) != view[-_CHECK_BYTES:]:
        raise WireError(_BAD_CHECKSUM)
    return header.metadata, {t.name: _array(view, header, t) for t in header.tensors}


def parse_header(message: Buffer) -> Header:
    """The header at the start of a message; every number in it is checked."""
    view = memoryview(message)
    if len(view) < 8:
        raise WireError(f"expected a message, got {len(view)} bytes")
    (length,) = struct.unpack("<Q", view[:8])
    if length > min(MAX_HEADER_BYTES, len(view) - 8):
        raise WireError(
            f"expected a whole header of at most {MAX_HEADER_BYTES} bytes, got {length} bytes announced in {len(view)}"
        )
    try:
        content = parse_json(bytes(view[8 : 8 + length]))
        metadata = content.pop("__metadata__")
        if not all(isinstance(value, str) for value in metadata.values()):
            raise ValueError("metadata that is not text")
        tensors, stop = _tensors(content)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError) as error:
        raise WireError(f"not the header of a message: {str(error)[:200] or type(error).__name__}") from None
    return Header(metadata, tensors, 8 + length, stop)


def _tensors(content: Mapping[str, Any]) -> tuple[tuple[Tensor, ...], int]:
    found = []
    at = 0
    for name, entry in content.items():
        dtype, shape, (start, stop) = entry["dtype"], entry["shape"], entry["data_offsets"]
        sizes = [*shape, start, stop]
        if not all(type(size) is int and 0 <= size < 2**48 for size in sizes) or len(shape) > 16:
            raise ValueError(f"{name[:80]}: impossible sizes")
        num_bytes = 2 if dtype == _BFLOAT16 else _DTYPES[dtype].itemsize
        if num_bytes * math.prod(max(size, 1) for size in shape) >= 2**48:  # numpy refuses it even if it is empty
            raise ValueError(f"{name[:80]}: impossible sizes")
        num_bytes *= math.prod(shape)
        if start != at or stop != at + num_bytes:
            raise ValueError(f"{name[:80]}: wrong offsets")
        found.append(Tensor(name, dtype, tuple(shape), start, num_bytes))
        at = stop
    if not found or (found[-1].name, found[-1].dtype, found[-1].shape) != (CHECK, "U64", ()):
        raise ValueError("no checksum at the end")
    return tuple(found[:-1]), at


def _array(view: memoryview, header: Header, tensor: Tensor) -> Array:
    start = header.num_bytes + tensor.start
    data = np.frombuffer(view[start : start + tensor.num_bytes], np.uint8)
    return as_array(data, tensor)


def as_array(data: Array, tensor: Tensor) -> Array:
    """The bytes of a tensor as an array; a bool that is neither 0 nor 1 is refused."""
    if tensor.dtype == _BFLOAT16:
        return from_bfloat16(data.view(np.uint16)).reshape(tensor.shape)
    if tensor.dtype == "BOOL" and data.size and data.max() > 1:
        raise WireError(f"{tensor.name[:80]}: expected flags of 0 or 1, got {data.max()}; check the sender")
    return data.view(_DTYPES[tensor.dtype]).reshape(tensor.shape)


class Assembly:
    """Collects the pieces of a message without copying; refuses more than the header announced."""

    def __init__(self, first: bytes, *, max_bytes: int):
        self.header = _whole_header(first, max_bytes)
        self._pieces = [first]
        self._missing = self.header.body_bytes

    @property
    def complete(self) -> bool:
        return self._missing == 0

    def add(self, piece: bytes) -> None:
        _check_piece(piece, self._missing)
        self._pieces.append(piece)
        self._missing -= len(piece)

    def pieces(self) -> list[bytes]:
        """All pieces of a complete message, after checking their checksum."""
        body, check = self._pieces[:-1], self._pieces[-1]
        if len(check) < _CHECK_BYTES:  # the checksum itself was cut in two
            body, check = self._pieces[:-2], self._pieces[-2] + check
        if _checksum([*body, memoryview(check)[:-_CHECK_BYTES]]) != check[-_CHECK_BYTES:]:
            raise WireError(_BAD_CHECKSUM)
        return self._pieces

    def bytes_of(self, tensor: Tensor) -> Array:
        """A copy of the bytes of one tensor of a complete message."""
        first, last = tensor.start // PIECE_BYTES, (tensor.start + tensor.num_bytes) // PIECE_BYTES
        data = np.frombuffer(b"".join(self._pieces[1 + first : 2 + last]), np.uint8)
        start = tensor.start - first * PIECE_BYTES
        return data[start : start + tensor.num_bytes]

    def scatter(self, targets: Sequence[Array]) -> None:
        """Copy the tensors, in their order, into flat arrays of bytes."""
        source = (np.frombuffer(piece, np.uint8) for piece in self.pieces()[1:])
        piece = np.empty(0, np.uint8)
        for target in targets:
            filled = 0
            while filled < target.size:
                if not piece.size:
                    piece = next(source)
                part = piece[: target.size - filled]
                target[filled : filled + part.size] = part
                filled += part.size
                piece = piece[part.size :]


def receive(pieces: Iterator[bytes], *, max_bytes: int) -> tuple[dict[str, str], dict[str, Array]]:
    """The metadata and the arrays of a message in pieces; each piece is copied into place as it arrives."""
    header, body = receive_body(pieces, max_bytes=max_bytes)
    return header.metadata, arrays_of(header, body)


def arrays_of(header: Header, body: Array) -> dict[str, Array]:
    """The arrays of a message whose body was received whole; views of it, where they need no conversion."""
    return {t.name: as_array(body[t.start : t.start + t.num_bytes], t) for t in header.tensors}


def receive_body(pieces: Iterator[bytes], *, max_bytes: int) -> tuple[Header, Array]:
    """The header of a message in pieces, and the bytes after it as uint8; their checksum is right."""
    first = next(pieces)
    header = _whole_header(first, max_bytes)
    body = np.empty(header.body_bytes, np.uint8)
    digest = xxhash.xxh3_64(first)
    at = 0
    while at < body.size:
        piece = next(pieces)
        _check_piece(piece, body.size - at)
        body[at : at + len(piece)] = np.frombuffer(piece, np.uint8)
        digest.update(body[at : min(at + len(piece), body.size - _CHECK_BYTES)].data)
        at += len(piece)
    if int(digest.intdigest()).to_bytes(_CHECK_BYTES, "little") != body[-_CHECK_BYTES:].tobytes():
        raise WireError(_BAD_CHECKSUM)
    return header, body


def _whole_header(first: bytes, max_bytes: int) -> Header:
    """The header in the first piece; refused if it announces more than `max_bytes`."""
    header = parse_header(first)
    if header.num_bytes != len(first):
        raise WireError("expected the header alone in the first piece of a message, got more or less; check the sender")
    if header.body_bytes > max_bytes:
        raise WireError(
            f"expected a message of at most {max_bytes} bytes, got {header.body_bytes}; send less, or raise the limit"
        )
    return header


def _check_piece(piece: bytes, missing: int) -> None:
    if len(piece) != min(missing, PIECE_BYTES):
        raise WireError(f"expected a piece of {min(missing, PIECE_BYTES)} bytes, got {len(piece)}")


def _checksum(buffers: Iterable[Buffer]) -> bytes:
    digest = xxhash.xxh3_64()
    for buffer in buffers:
        digest.update(buffer)
    return int(digest.intdigest()).to_bytes(_CHECK_BYTES, "little")


# ---- bfloat16


def to_bfloat16(array: Array) -> Array:
    """float32 numbers as the upper halves of their bits, rounded to the nearest (ties to even); a NaN stays one."""
    bits = np.ascontiguousarray(array, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(array), (bits >> 16) | 0x40, rounded).astype(np.uint16).reshape(np.shape(array))


def from_bfloat16(halves: Array) -> Array:
    return (halves.astype(np.uint32) << 16).view(np.float32)

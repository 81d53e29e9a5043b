"""Reads and writes shards: files of records with checksums, as tfrecord (plain or compressed) or array_record.

tfrecord: u64 length, u32 masked crc32c of the length, the record, u32 masked crc32c of the record
"""

from __future__ import annotations

import importlib
import struct
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from understudy.formats.format import FormatError

_HEADER = struct.Struct("<QI")
_CRC = struct.Struct("<I")
MAX_COMPRESSED_RECORD = 2**30  # bytes of one unpacked record; more is refused
_PIECE = 2**20


def load(module: str) -> Any:
    """Import a module of the extra `rlds`."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise FormatError(f"rlds: needs {error.name}; run `pip install 'understudy-robotics[rlds]'`") from None


def read_records(path: Path, file_format: str, wanted: Callable[[int], bool]) -> Iterator[tuple[int, bytes]]:
    """Yield number and content of each wanted record, after a check of its checksum; others are skipped unread.

    At the end it yields the total number of records with empty content: (number, b"").
    """
    reader = _read_array_record if file_format == "array_record" else _read_tfrecord
    try:
        yield from reader(path, wanted)
    except OSError as error:
        raise FormatError(f"{path}: cannot be read ({error.strerror or error}); check the file") from None


# ---- tfrecord


def _read_tfrecord(path: Path, wanted: Callable[[int], bool]) -> Iterator[tuple[int, bytes]]:
    crc = load("google_crc32c").value
    number = 0
    with path.open("rb") as file:
        stream = _stream(file, path, crc)
        while header := stream.read(_HEADER.size):
            if len(header) < _HEADER.size:
                raise _damaged(path, number, "is cut off")
            length, check = _HEADER.unpack(header)
            if _masked(crc(header[:8])) != check:
                raise _damaged(path, number, "has a length that does not fit its checksum")
            if not stream.has(length + _CRC.size):
                raise _damaged(path, number, f"should have {length} bytes and is cut off")
            if wanted(number):
                data = stream.read(length)
                tail = stream.read(_CRC.size)
                if len(data) < length or len(tail) < _CRC.size:
                    raise _damaged(path, number, "is cut off")
                if _masked(crc(data)) != _CRC.unpack(tail)[0]:
                    raise _damaged(path, number, "does not fit its checksum")
                yield number, data
            else:
                stream.skip(length + _CRC.size)
            number += 1
    yield number, b""


class _Stream(Protocol):
    def read(self, size: int) -> bytes: ...

    def skip(self, size: int) -> None: ...

    def has(self, size: int) -> bool:
        """Whether this many bytes may be left, as far as known without reading them."""
        ...


def _stream(file: BinaryIO, path: Path, crc: Callable[[bytes], int]) -> _Stream:
    """The content of the file, decompressed if the whole file is compressed."""
    start = file.read(_HEADER.size)
    file.seek(0)
    if len(start) == _HEADER.size:
        _, check = _HEADER.unpack(start)
        if _masked(crc(start[:8])) != check and (start[:2] == b"\x1f\x8b" or _is_zlib(start)):
            return _Compressed(file, path)
    return _Plain(file, path)


def _is_zlib(start: bytes) -> bool:
    return start[0] & 0x0F == 8 and int.from_bytes(start[:2], "big") % 31 == 0


class _Plain:
    def __init__(self, file: BinaryIO, path: Path):
        self._file = file
        self._left = path.stat().st_size

    def read(self, size: int) -> bytes:
        data = self._file.read(size)
        self._left -= len(data)
        return data

    def skip(self, size: int) -> None:
        self._file.seek(size, 1)
        self._left -= size

    def has(self, size: int) -> bool:
        return size <= self._left


class _Compressed:
    """Decompresses gzip or zlib piece by piece."""

    def __init__(self, file: BinaryIO, path: Path):
        self._file = file
        self._path = path
        self._unpack = zlib.decompressobj(zlib.MAX_WBITS | 32)  # accepts both
        self._ready = bytearray()

    def read(self, size: int) -> bytes:
        while len(self._ready) < size and self._fill():
            pass
        data = bytes(self._ready[:size])
        del self._ready[:size]
        return data

    def _fill(self) -> bool:
        """Decompress one more piece; False at the end."""
        packed = self._unpack.unconsumed_tail or self._file.read(_PIECE)
        try:
            piece = self._unpack.decompress(packed, _PIECE)
        except zlib.error as error:
            raise FormatError(f"{self._path}: cannot be decompressed ({error}); fetch it again") from None
        if not packed and not piece and not self._unpack.eof:
            raise FormatError(f"{self._path}: is compressed and cut off; fetch it again")
        self._ready += piece
        return bool(piece) or not self._unpack.eof

    def skip(self, size: int) -> None:
        while size:
            taken = len(self.read(min(size, _PIECE)))
            if not taken:
                return
            size -= taken

    def has(self, size: int) -> bool:
        return size <= MAX_COMPRESSED_RECORD


def _masked(crc: int) -> int:
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _damaged(path: Path, number: int, what: str) -> FormatError:
    return FormatError(f"{path}: record {number} {what}; fetch the file again")


# ---- array_record


def _read_array_record(path: Path, wanted: Callable[[int], bool]) -> Iterator[tuple[int, bytes]]:
    module = load("array_record.python.array_record_module")
    with path.open("rb"):  # for a clear error if the file is missing
        pass
    number = 0
    try:
        with closing(module.ArrayRecordReader(str(path))) as reader:
            total = reader.num_records()
            for number in range(total):
                if wanted(number):
                    yield number, bytes(reader.read([number])[0])
    except (RuntimeError, IndexError, ValueError) as error:
        first = str(error).partition(";")[0]
        raise FormatError(f"{path}: record {number}: {first or error!r}; fetch the file again") from None
    yield total, b""


# ---- writing


class RecordWriter(Protocol):
    def write(self, record: bytes) -> None: ...

    def close(self) -> None: ...


def write_records(path: Path, file_format: str) -> RecordWriter:
    """Create a shard."""
    return _ArrayRecordWriter(path) if file_format == "array_record" else _TfRecordWriter(path)


class _TfRecordWriter:
    def __init__(self, path: Path):
        self._crc = load("google_crc32c").value
        self._file = path.open("xb")

    def write(self, record: bytes) -> None:
        length = struct.pack("<Q", len(record))
        self._file.write(length + _CRC.pack(_masked(self._crc(length))))
        self._file.write(record)
        self._file.write(_CRC.pack(_masked(self._crc(record))))

    def close(self) -> None:
        self._file.close()


class _ArrayRecordWriter:
    def __init__(self, path: Path):
        module = load("array_record.python.array_record_module")
        self._writer = module.ArrayRecordWriter(str(path), "group_size:1")  # as TensorFlow Datasets does

    def write(self, record: bytes) -> None:
        self._writer.write(record)

    def close(self) -> None:
        self._writer.close()

"""Reads the opcodes of a pickle, and finds which memoized objects are used again."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from understudy.formats.format import FormatError

MAX_MEMO = 1 << 26
MAX_LINE = 1 << 28  # of the text opcodes of protocol 0, which store arrays as text
MAX_NUMBER = 64  # characters, or bytes, of a number

# The argument of each opcode: none, a little-endian number, a payload after its length, one line or two.
_NOTHING = frozenset(bytes([code]) for code in b"0(.NR12]}ab)stulde\x85\x86\x87\x88\x89\x93\x94")
_NUMBER = {
    code: struct.Struct(layout)
    for code, layout in {
        b"J": "<i",
        b"K": "<B",
        b"M": "<H",
        b"h": "<B",
        b"j": "<I",
        b"q": "<B",
        b"r": "<I",
        b"G": ">d",
        b"\x80": "<B",
        b"\x95": "<Q",
    }.items()
}
_PAYLOAD = {
    code: struct.Struct(layout)
    for code, layout in {
        b"X": "<I",
        b"\x8c": "<B",
        b"\x8d": "<Q",
        b"B": "<I",
        b"C": "<B",
        b"\x8e": "<Q",
        b"\x96": "<Q",
        b"\x8a": "<B",
        b"\x8b": "<I",
    }.items()
}
_LINE = {b"I": 1, b"L": 1, b"F": 1, b"V": 1, b"g": 1, b"p": 1, b"c": 2}
_BULK = (b"B", b"\x8e", b"\x96", b"V", b"X", b"\x8d")  # large payloads, which the first pass skips
_NUMBERS = (b"I", b"L", b"F", b"\x8a", b"\x8b", b"g", b"p")
_REFUSED = {
    b"i": "an instance of a class",
    b"o": "an instance of a class",
    b"\x81": "an instance of a class",
    b"\x92": "an instance of a class",
    b"P": "a reference to outside",
    b"Q": "a reference to outside",
    b"\x82": "a name from the extension registry",
    b"\x83": "a name from the extension registry",
    b"\x84": "a name from the extension registry",
    b"\x97": "a buffer that is not in the file",
    b"\x98": "a buffer that is not in the file",
    b"S": "text of Python 2",
    b"T": "text of Python 2",
    b"U": "text of Python 2",
    b"\x8f": "a set",
    b"\x90": "a set",
    b"\x91": "a set",
}


class OpcodeReader:
    """Iterates over the opcodes of a file with their arguments; lengths are checked against the file's size."""

    def __init__(self, file: IO[bytes], path: Path, *, skip: bool):
        self._file, self._path, self._skip = file, path, skip
        self._size = path.stat().st_size
        self._next = 0  # position in the file; `tell` would be a system call
        self.position = 0  # of the opcode

    def refuse(self, what: str) -> FormatError:
        return FormatError(f"{self._path}: byte {self.position}: {what}")

    def __iter__(self) -> Iterator[tuple[bytes, Any]]:
        while True:
            self.position = self._next
            code = self._take(1)
            if code in _NOTHING:
                yield code, None
                if code == b".":
                    return
            elif code in _NUMBER:
                layout = _NUMBER[code]
                yield code, layout.unpack(self._take(layout.size))[0]
            elif code in _PAYLOAD:
                layout = _PAYLOAD[code]
                yield code, self._payload(code, layout.unpack(self._take(layout.size))[0])
            elif code in _LINE:
                lines = [self._line(code) for _ in range(_LINE[code])]
                yield code, lines[0] if len(lines) == 1 else lines
            elif code in _REFUSED:
                raise self.refuse(
                    f"holds {_REFUSED[code]}, which is not read, because it could run code; keep numpy arrays, "
                    f"numbers, text, dicts and lists, and convert the rest where the file was written"
                )
            else:
                raise self.refuse(f"{code!r} is no opcode of a pickle; is this the right file?")

    def _take(self, size: int) -> bytes:
        found = self._file.read(size)
        if len(found) < size:
            raise self.refuse("the file ends before its last item is complete; copy it again, or drop the file")
        self._next += size
        return found

    def _payload(self, code: bytes, size: int) -> bytes:
        if size > self._size - self._next:
            raise self.refuse(f"claims {size} bytes, more than the file has; it is damaged")
        if code in _NUMBERS and size > MAX_NUMBER:
            raise self.refuse(f"holds a number of {size} bytes; expected at most {MAX_NUMBER}")
        if self._skip and code in _BULK:
            self._next = self._file.seek(size, 1)
            return b""
        return self._take(size)

    def _line(self, code: bytes) -> bytes:
        limit = MAX_NUMBER if code in _NUMBERS else 256 if code == b"c" else MAX_LINE
        line = self._file.readline(limit + 1)
        self._next += len(line)
        if not line.endswith(b"\n"):
            raise self.refuse(f"holds a line without an end in {limit} bytes; it is damaged")
        return line[:-1]


class Memo:
    """Checks the memo numbers of a pickle; the objects themselves are stored by the caller."""

    def __init__(self, opcodes: OpcodeReader):
        self._opcodes, self._seen, self._count = opcodes, bytearray(), 0

    def put(self, code: bytes, argument: Any) -> int:
        index = self._count if code == b"\x94" else self.number(argument)
        if not 0 <= index < MAX_MEMO:
            raise self._opcodes.refuse(f"memoizes object {index}; expected less than {MAX_MEMO}")
        if index >= len(self._seen):
            self._seen.extend(bytes(index + 1 - len(self._seen)))
        if not self._seen[index]:
            self._seen[index], self._count = 1, self._count + 1
        return index

    def get(self, argument: Any) -> int:
        index = self.number(argument)
        if not 0 <= index < len(self._seen) or not self._seen[index]:
            raise self._opcodes.refuse(f"uses object {index}, which was not memoized; it is damaged")
        return index

    def number(self, argument: Any) -> int:
        if isinstance(argument, int):
            return argument
        return parse_int(argument, self._opcodes)


PUT, GET = (b"q", b"r", b"p", b"\x94"), (b"h", b"j", b"g")


def last_uses(opcodes: OpcodeReader) -> dict[int, int]:
    """The memo numbers of objects that are used again, with the position of their last use."""
    memo, last = Memo(opcodes), {}
    for code, argument in opcodes:
        if code in PUT:
            memo.put(code, argument)
        elif code in GET:
            last[memo.get(argument)] = opcodes.position
    return last


def parse_int(line: bytes, opcodes: OpcodeReader) -> int:
    try:
        return int(line.removesuffix(b"L"))
    except ValueError:
        raise opcodes.refuse(f"{line[:20]!r} is no number; it is damaged") from None

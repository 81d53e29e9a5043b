"""NAL units: the parts of an H.264 stream. A stored frame has them behind start codes (Annex B of the standard)."""

from __future__ import annotations

from collections.abc import Iterator

_START = b"\0\0\1"
_SLICES = (1, 5)  # kinds of units with pixels: of a frame that refers to others, and of a key frame
_BEFORE_SLICES = (6, 7, 8, 9, 14, 15, 16, 17, 18)  # behind a slice, these begin the next frame


def access_units(packet: bytes) -> list[bytes]:
    """The bytes of each frame in a packet; most packets are one."""
    found, begin, has_slice = [], 0, False
    for at in _starts(packet):
        kind, after = packet[at + 3] & 31, packet[at + 4]
        is_slice = kind in _SLICES
        if has_slice and (kind in _BEFORE_SLICES or (is_slice and after & 0x80)):  # or it begins with macroblock 0
            stop = at - (packet[at - 1] == 0)  # the first unit of a frame has a start code of four bytes
            found.append(packet[begin:stop])
            begin, has_slice = stop, False
        has_slice = has_slice or is_slice
    return [*found, packet[begin:]]


def _starts(packet: bytes) -> Iterator[int]:
    """Where start codes are that two bytes or more follow; inside a unit there are none."""
    at = packet.find(_START)
    while 0 <= at < len(packet) - 4:
        yield at
        at = packet.find(_START, at + 3)

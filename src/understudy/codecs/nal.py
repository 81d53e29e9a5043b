"""NAL units: the parts of an H.264 stream, behind start codes (Annex B, as a store keeps them) or lengths (MP4)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

KEY_SLICE = 5  # kind of a unit with pixels that need no other frame
SEQUENCE, PICTURE = 7, 8  # kinds of parameter sets
DELIMITER = 9  # kind of a unit that only says that a frame begins
_START = b"\0\0\1"
_SLICES = (1, KEY_SLICE)
_BEFORE_SLICES = (6, SEQUENCE, PICTURE, DELIMITER, 14, 15, 16, 17, 18)  # behind a slice, these begin the next frame


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


def split_units(packet: bytes) -> list[bytes]:
    """The units of a packet, without their start codes."""
    starts = [*_starts(packet), len(packet)]
    units = [packet[at + 3 : stop].rstrip(b"\0") for at, stop in pairwise(starts)]  # no unit ends with a zero
    return [unit for unit in units if unit]


def join_units(units: Sequence[bytes]) -> bytes:
    """The packet of these units, with start codes of three or four bytes where x264 writes them."""
    long = [number == 0 or kind_of(unit) in (SEQUENCE, PICTURE) for number, unit in enumerate(units)]
    return b"".join((b"\0" if is_long else b"") + _START + unit for unit, is_long in zip(units, long, strict=True))


def split_sample(sample: bytes, length_bytes: int) -> list[bytes]:
    """The units of a sample of an MP4 file, each behind its length; a ValueError if the lengths do not fit."""
    units, at = [], 0
    while at < len(sample):
        stop = at + length_bytes + int.from_bytes(sample[at : at + length_bytes])
        if stop > len(sample) or stop == at + length_bytes:
            raise ValueError("a part of a frame is longer than the frame, or empty")
        units.append(sample[at + length_bytes : stop])
        at = stop
    return units


def kind_of(unit: bytes) -> int:
    return unit[0] & 31


def _starts(packet: bytes) -> Iterator[int]:
    """Where start codes are that two bytes or more follow; inside a unit there are none."""
    at = packet.find(_START)
    while 0 <= at < len(packet) - 4:
        yield at
        at = packet.find(_START, at + 3)

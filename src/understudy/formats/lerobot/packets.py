"""Packets: the H.264 frames of LeRobot's MP4 files as a store keeps them, without encoding or decoding them.

An MP4 file has the units of a frame behind their lengths, and the parameter sets often only in its header; a store has
them behind start codes, with the parameter sets in the first frame of each GOP.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import av
import av.container
import av.error

from understudy.codecs import EncodedColumn, encode_frames
from understudy.codecs.nal import (
    DELIMITER,
    KEY_SLICE,
    SEQUENCE,
    access_units,
    join_units,
    kind_of,
    split_sample,
    split_units,
)
from understudy.core.codec import H264, MAX_GOP_SIZE
from understudy.formats.format import FormatError
from understudy.formats.lerobot.tables import Array, refusing
from understudy.formats.lerobot.video import open_video

TICKS = 512  # of a frame, as FFmpeg has them
_RANGES = (0, 1)  # not said, or limited
_MATRICES = (2, 5, 6)  # not said, or BT.601


class PacketsDifferError(FormatError):
    """A video has no frames that a store can keep as they are."""


def mux(packets: Sequence[bytes], fps: int) -> bytes:
    """The frames of an episode as an MP4 video."""
    video = io.BytesIO()
    with (
        av.open(io.BytesIO(packets[0]), "r", format="h264") as source,  # knows the parameter sets
        av.open(video, "w", format="mp4") as container,
    ):
        stream: Any = container.add_stream_from_template(source.streams.video[0], opaque=True)
        stream.time_base = Fraction(1, fps * TICKS)
        for number, data in enumerate(packets):
            packet: Any = av.Packet(data)
            packet.pts = packet.dts = number * TICKS
            packet.duration, packet.time_base, packet.stream = TICKS, stream.time_base, stream
            packet.is_keyframe = is_key(split_units(data))
            container.mux(packet)
    return video.getvalue()


def packets_of(video: bytes) -> list[list[bytes]]:
    """The units of each frame of a video that `mux` made."""
    with av.open(io.BytesIO(video), "r", format="mp4") as container:
        packets = container.demux(container.streams.video[0])
        return [split_sample(bytes(packet), 4) for packet in packets if packet.pts is not None]


def playable(column: EncodedColumn, codec: H264, frames: Array) -> tuple[EncodedColumn, int]:
    """The frames with one packet for each, as an MP4 file needs them, and how many had to be encoded again.

    A GOP that was cut begins with a packet of several frames (see `join_frames`): there is no place for these.
    """
    packets, checksums, num_again = list(column.packets), list(column.checksums), 0
    for first, stop in column.gops:
        if len(access_units(packets[first])) > 1:
            made = encode_frames(codec, frames[first:stop])
            packets[first:stop], checksums[first:stop] = made.packets, made.checksums
            num_again += stop - first
    return EncodedColumn(packets, column.frame_numbers, checksums), num_again


def is_key(units: Sequence[bytes]) -> bool:
    return any(kind_of(unit) == KEY_SLICE for unit in units)


class PacketReader:
    """Reads the H.264 frames of one file; a PacketsDifferError if a store cannot keep them."""

    def __init__(self, path: Path, shape: tuple[int, ...], fps: float) -> None:
        self._path, self._fps = path, fps
        self._container, self._stream = open_video(path, shape)
        try:
            with refusing(path, av.error.FFmpegError):
                self._check()
        except FormatError:
            self._container.close()
            raise

    def _check(self) -> None:
        context: Any = self._stream.codec_context
        extradata = context.extradata or b""
        if context.codec.canonical_name != "h264":
            raise PacketsDifferError(f"its video is {context.codec.canonical_name}")
        if context.pix_fmt != "yuv420p" or context.color_range not in _RANGES or context.colorspace not in _MATRICES:
            raise PacketsDifferError(f"its colours are {context.pix_fmt} in a range or matrix of their own")
        if context.height % 2 or context.width % 2:
            raise PacketsDifferError("its height or width is odd")
        if context.has_b_frames:
            raise PacketsDifferError("its video has B frames")
        keys = [number for number, entry in enumerate(self._stream.index_entries) if entry.is_keyframe]
        ends = [*keys, len(self._stream.index_entries)]
        self.gop_size = max((stop - first for first, stop in pairwise(ends)), default=0)
        if not keys or keys[0] != 0 or self.gop_size > MAX_GOP_SIZE:
            raise PacketsDifferError(f"its GOPs have up to {self.gop_size} frames, more than {MAX_GOP_SIZE}")
        if len(extradata) < 7 or extradata[0] != 1:
            raise PacketsDifferError("its header has no parameter sets")
        self._length_bytes = (extradata[4] & 3) + 1
        self._parameter_sets = list(_parameter_sets(extradata))
        self._tick_s = float(self._stream.time_base)

    def take(self, times_s: Array) -> list[list[bytes]]:
        """The frames at these increasing times, GOP by GOP.

        If the first of them is inside a GOP, its packet has the frames that it depends on, too.
        """
        with refusing(self._path, av.error.FFmpegError):
            return self._take(times_s)

    def _take(self, times_s: Array) -> list[list[bytes]]:
        near_s = 0.25 / self._fps
        start = max(0, round(float(times_s[0]) / self._tick_s) - 1)
        self._container.seek(start, stream=self._stream, backward=True)
        gops: list[list[bytes]] = []
        before: list[bytes] = []
        num_found = 0
        for packet in self._container.demux(self._stream):
            if packet.pts is None:
                continue
            if packet.pts != packet.dts:
                raise self._other("its video has B frames")
            at_s, data = packet.pts * self._tick_s, self._packet(packet)
            if at_s < times_s[0] - near_s:
                before = [data] if packet.is_keyframe else [*before, data]
                continue
            if abs(at_s - times_s[num_found]) > near_s:
                raise self._other(f"the frame at {at_s:.3f} s is at no time of the table")
            if packet.is_keyframe:
                gops.append([data])
            elif gops:
                gops[-1].append(data)
            else:
                gops.append([b"".join([*before, data])])
            num_found += 1
            if num_found == len(times_s):
                return gops
        raise FormatError(f"{self._path}: has no frame at {times_s[num_found]:.3f} s; fetch the dataset again")

    def _packet(self, packet: Any) -> bytes:
        """A frame as a store keeps it."""
        units = split_sample(bytes(packet), self._length_bytes)
        if packet.is_keyframe:
            if not is_key(units):
                raise self._other("a key frame needs frames before it")
            if not any(kind_of(unit) == SEQUENCE for unit in units):
                at = int(kind_of(units[0]) == DELIMITER)
                units = [*units[:at], *self._parameter_sets, *units[at:]]
        return join_units(units)

    def _other(self, why: str) -> PacketsDifferError:
        return PacketsDifferError(f"{self._path}: {why}, so its frames cannot be kept as they are; use --codec raw")

    def close(self) -> None:
        self._container.close()


def _parameter_sets(extradata: bytes) -> Iterator[bytes]:
    """The parameter sets in the header of an MP4 file."""
    at = 6
    for count in (extradata[5] & 31, None):
        if count is None:
            count, at = extradata[at], at + 1
        for _ in range(count):
            stop = at + 2 + int.from_bytes(extradata[at : at + 2])
            if stop > len(extradata) or stop == at + 2:
                raise ValueError("its parameter sets are cut off")
            yield extradata[at + 2 : stop]
            at = stop


def keepable(paths: Sequence[Path], shape: tuple[int, ...], fps: float) -> H264:
    """The codec of all these files; a PacketsDifferError that says why, if a store cannot keep their frames."""
    gop_size = 1
    for path in paths:
        reader = PacketReader(path, shape, fps)
        gop_size = max(gop_size, reader.gop_size)
        reader.close()
    return H264(crf=None, gop_size=gop_size)

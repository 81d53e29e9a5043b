"""Frames: encodes the frames of a GOP and decodes them again, with a checksum of what a decoder makes of each.

The checksum is made when a frame is encoded, from the frame decoded again. So a batch is the same for ever: a decoder
that gives other pixels, because the bytes are damaged or because it is another version, is found out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np

from understudy.codecs import h264, jpeg, png
from understudy.codecs.picture import FrameError, Picture
from understudy.core.codec import H264, Codec, Jpeg

Array: TypeAlias = np.ndarray[Any, Any]

__all__ = ["EncodedColumn", "EncodedFrames", "FrameError", "decode_frames", "encode_frames", "join_frames", "measured"]


@dataclass(frozen=True)
class EncodedFrames:
    """The bytes of each frame of a GOP, and the checksum of each frame once it is decoded."""

    packets: list[bytes]
    checksums: list[int]


@dataclass(frozen=True)
class EncodedColumn:
    """The frames of one field of an episode as they are stored, T+1 of them."""

    packets: list[bytes]
    frame_numbers: list[int]  # of each frame in its GOP; 0 begins a GOP
    checksums: list[int]  # of each frame once it is decoded

    @property
    def gops(self) -> list[tuple[int, int]]:
        """The first frame of each GOP, and the first behind it."""
        starts = [at for at, number in enumerate(self.frame_numbers) if number == 0]
        return list(pairwise([*starts, len(self.packets)]))

    def pixels(self, codec: Codec, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """The decoded frames; a FrameError if one is not what it was."""
        out = np.empty((len(self.packets), *shape), dtype)
        for first, stop in self.gops:
            packets, checksums = self.packets[first:stop], self.checksums[first:stop]
            out[first:stop] = decode_frames(codec, shape, dtype, packets, checksums, range(stop - first))
        return out


def measured(codec: Codec, shape: tuple[int, ...], dtype: np.dtype[Any], gops: Sequence[list[bytes]]) -> EncodedColumn:
    """GOPs that others encoded, with the checksums of what they decode to here."""
    checksums = [picture.checksum for gop in gops for picture in _decode(codec, gop, shape, dtype)]
    numbers = [number for gop in gops for number in range(len(gop))]
    return EncodedColumn([packet for gop in gops for packet in gop], numbers, checksums)


def encode_frames(codec: Codec, frames: Array) -> EncodedFrames:
    """Encode frames [n, height, width, ...] that follow each other; n is at most the codec's `gop_size`."""
    packets = _encode(codec, frames)
    pictures = _decode(codec, packets, frames.shape[1:], frames.dtype)
    return EncodedFrames(packets, [picture.checksum for picture in pictures])


def decode_frames(
    codec: Codec,
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    packets: Sequence[bytes],
    checksums: Sequence[int],
    wanted: Sequence[int],
) -> list[Array]:
    """Decode the first frames of a GOP; returns those whose numbers are `wanted`.

    A FrameError if one of them is not the frame that was encoded.
    """
    pictures = _decode(codec, packets, shape, dtype)
    found = []
    for number in wanted:
        if pictures[number].checksum != checksums[number]:
            raise FrameError(
                f"frame {number} of a GOP decodes to other pixels than when it was written; its bytes are damaged, "
                f"or this machine's {codec.name} decoder differs from the writer's"
            )
        found.append(pictures[number].pixels())
    return found


def join_frames(codec: Codec, packets: Sequence[bytes]) -> bytes:
    """The last of a GOP's first frames as one packet that needs no other: it holds those that it depends on."""
    return b"".join(packets) if isinstance(codec, H264) else packets[-1]


def _encode(codec: Codec, frames: Array) -> list[bytes]:
    if isinstance(codec, H264):
        return h264.encode(frames, codec)
    if isinstance(codec, Jpeg):
        return [jpeg.encode(frame, codec) for frame in frames]
    return [png.encode(frame) for frame in frames]


def _decode(codec: Codec, packets: Sequence[bytes], shape: tuple[int, ...], dtype: np.dtype[Any]) -> Sequence[Picture]:
    if isinstance(codec, H264):
        return h264.decode(packets, shape)
    if isinstance(codec, Jpeg):
        return [jpeg.decode(packet, shape) for packet in packets]
    return [png.decode(packet, shape, dtype) for packet in packets]

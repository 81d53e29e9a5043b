"""H.264 through FFmpeg: a GOP, of which the first is a key frame and each other one follows the one before.

Every decoder of H.264 must give the same YUV planes, bit by bit, so the checksum of a frame is that of its planes. The
conversion to RGB is FFmpeg's, with the flags that make it independent of the CPU; a version that converts otherwise is
noticed before the first frame (`_check_conversion`).
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from understudy.codecs.nal import access_units
from understudy.codecs.picture import Array, FrameError, checksum_of, library
from understudy.core.codec import H264

# No B frames: a frame needs only those before it. One thread: the same frames give the same bytes. Measured on rendered
# scenes: `superfast` with macroblock trees takes two thirds of the time of `veryfast`, for 7 % more bytes.
_X264 = {
    "preset": "superfast",
    "tune": "fastdecode",
    "bf": "0",
    "x264-params": "mbtree=1:rc-lookahead=10:scenecut=0",
}
USUAL_CRF = H264().crf  # of frames that are added to others of an unknown one
_CONVERTED = 0x74CC4788C7FEE75E  # the checksum of `_ramp` as RGB
_decoders = threading.local()


def encode(frames: Array, codec: H264) -> list[bytes]:
    """The packet of each frame; they stand for themselves, with the parameter sets in the first."""
    av = library("av")
    context = av.CodecContext.create("libx264", "w")
    context.height, context.width = frames.shape[1:3]
    context.pix_fmt, context.time_base, context.thread_count = "yuv420p", Fraction(1, 30), 1
    context.gop_size = codec.gop_size
    context.options = {**_X264, "crf": str(USUAL_CRF if codec.crf is None else codec.crf)}
    convert = av.video.reformatter.VideoReformatter()
    packets = []
    for number, frame in enumerate(frames):
        picture = convert.reformat(
            av.VideoFrame.from_numpy_buffer(np.ascontiguousarray(frame), "rgb24"),
            format="yuv420p",
            interpolation="AREA",
            threads=1,
        )
        picture.pts = number
        packets += context.encode(picture)
    packets += context.encode(None)
    return [bytes(packet) for packet in packets]


def decode(packets: Sequence[bytes], shape: tuple[int, ...]) -> list[YuvPicture]:
    """The frames of a GOP, or its first ones.

    The first packet may hold frames before its own: those that it depends on, in a GOP whose beginning was cut off.
    """
    decoder = _decoder()
    units = access_units(packets[0])
    try:
        frames = decoder.decode([*units, *packets[1:]])[len(units) - 1 :]
    except decoder.error as error:
        _decoders.own = None
        raise FrameError(f"an H.264 frame cannot be decoded ({error}); run `understudy verify`") from None
    if len(frames) != len(packets) or any((frame.height, frame.width, 3) != shape for frame in frames):
        _decoders.own = None
        raise FrameError(
            f"an H.264 GOP: expected {len(packets)} frames of {list(shape)}, got {len(frames)} or others; run "
            f"`understudy verify`"
        )
    return [YuvPicture(frame, decoder) for frame in frames]


@dataclass(frozen=True)
class YuvPicture:
    """A frame in the planes that the decoder gave."""

    frame: Any  # av.VideoFrame
    decoder: _Decoder

    @property
    def checksum(self) -> int:
        return checksum_of(self.frame.to_ndarray())

    def pixels(self) -> Array:
        return self.decoder.to_rgb(self.frame)


class _Decoder:
    """A decoder and a converter that are used again for GOP after GOP, by one thread."""

    def __init__(self) -> None:
        av = library("av")
        self.error: type[Exception] = av.error.FFmpegError
        self._packet = av.Packet
        self._context = av.CodecContext.create("h264", "r")
        self._context.thread_count, self._context.thread_type = 1, "NONE"
        self._converter = av.video.reformatter.VideoReformatter()
        flags = av.video.reformatter.Interpolation
        self._flags = flags.BILINEAR | flags.FULL_CHR_H_INT | flags.ACCURATE_RND | flags.BITEXACT

    def decode(self, packets: Sequence[bytes]) -> list[Any]:
        frames = []
        for packet in packets:
            frames += self._context.decode(self._packet(packet))
        frames += self._context.decode(None)
        self._context.flush_buffers()
        return frames

    def to_rgb(self, frame: Any) -> Array:
        converted = self._converter.reformat(frame, format="rgb24", interpolation=self._flags, threads=1)
        pixels: Array = converted.to_ndarray()
        return pixels


def _decoder() -> _Decoder:
    """The decoder of this thread."""
    own: _Decoder | None = getattr(_decoders, "own", None)
    if own is None:
        own = _Decoder()
        _check_conversion(own)
        _decoders.own = own
    return own


def _check_conversion(decoder: _Decoder) -> None:
    """Refuse a version of FFmpeg that makes other RGB pixels of the same planes."""
    av = library("av")
    found = checksum_of(decoder.to_rgb(av.VideoFrame.from_ndarray(_ramp(), "yuv420p")))
    if found != _CONVERTED:
        raise FrameError(
            f"FFmpeg {av.ffmpeg_version_info} converts YUV to RGB otherwise than the versions that this store's frames "
            f"are defined by; install another version of PyAV (`pip install 'av>=15,<19'`)"
        )


def _ramp() -> Array:
    """Planes of a 16x16 frame with many pairs of brightness and colour."""
    return (np.arange(16 * 24) * 7 % 256).astype(np.uint8).reshape(24, 16)

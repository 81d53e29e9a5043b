"""VideoReader decodes the frames of a video file in order; VideoWriter appends the videos of episodes to a file.

A frame is found by its time, as in LeRobot. Consecutive episodes of a file are decoded without seeking. Only MP4 is
read: a file cannot choose another demuxer.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import av.container
import av.error
import av.video.frame
import av.video.reformatter
import numpy as np

from understudy.formats.format import FormatError
from understudy.formats.lerobot.tables import refusing

Array = np.ndarray[Any, Any]

MOST_MEAN_ERROR = 12.0  # of 255, over the frames of one camera in one episode; more is refused
_NEAR_FRAMES = 64  # smaller gaps are decoded, larger ones seek


@dataclass(frozen=True, kw_only=True)
class Codec:
    encoder: str
    pixels: str
    settings: Mapping[str, str]
    exact: bool = False
    least: int = 1  # pixels per side


CODECS: Mapping[str, Codec] = {
    # LeRobot's default; a key frame every second frame makes random access cheap
    # (below 32 x 32, SVT-AV1 3.0 divides by zero and ends the process)
    "av1": Codec(encoder="libsvtav1", pixels="yuv420p", settings={"g": "2", "crf": "30", "preset": "8"}, least=32),
    "h264": Codec(encoder="libx264", pixels="yuv420p", settings={"g": "2", "crf": "23", "bf": "0"}),
    "lossless": Codec(encoder="libx264rgb", pixels="rgb24", settings={"g": "2", "qp": "0", "bf": "0"}, exact=True),
}


class VideoReader:
    """Reads the frames of one file in order; going back seeks."""

    def __init__(self, path: Path, shape: tuple[int, ...], fps: float) -> None:
        """`shape` is [height, width, 3]."""
        self._path, self._shape, self._fps = path, shape, fps
        self._frames: Iterator[av.video.frame.VideoFrame] | None = None
        self._at_s = 0.0  # time of the last decoded frame
        self.num_decoded = 0
        self._reformatter = av.video.reformatter.VideoReformatter()
        self._container, self._stream = open_video(path, shape)
        self._tick_s = float(self._stream.time_base or 0)

    def take(self, times_s: Array, out: Array) -> None:
        """Decode the frames at these increasing times into `out` [len(times_s), height, width, 3]."""
        near_s = 0.25 / self._fps
        if len(times_s) > 1 and float(np.diff(times_s).min()) <= 2 * near_s:
            raise FormatError(f"{self._path}: frames are not at {self._fps:g} fps; correct fps in meta/info.json")
        with refusing(self._path, av.error.FFmpegError):
            self._go_to(float(times_s[0]), near_s)
            for index, wanted_s in enumerate(times_s.tolist()):
                self._convert(self._frame_at(wanted_s, near_s), out[index])

    def close(self) -> None:
        self._frames = None
        self._container.close()

    def _go_to(self, start_s: float, near_s: float) -> None:
        ahead_s = start_s - self._at_s
        if self._frames is not None and near_s < ahead_s < _NEAR_FRAMES / self._fps:
            return
        self._container.seek(max(0, round(start_s / self._tick_s) - 1), stream=self._stream, backward=True)
        self._frames = self._container.decode(self._stream)
        self._at_s = -1.0

    def _frame_at(self, wanted_s: float, near_s: float) -> av.video.frame.VideoFrame:
        assert self._frames is not None
        for frame in self._frames:
            if frame.pts is None:
                continue
            self._at_s = frame.pts * self._tick_s
            self.num_decoded += 1
            if frame.is_corrupt:
                raise FormatError(f"{self._path}: the frame at {self._at_s:.3f} s is damaged; fetch the dataset again")
            if self._at_s > wanted_s + near_s:
                break
            if self._at_s >= wanted_s - near_s:
                return frame
        self._frames = None
        raise FormatError(f"{self._path}: has no frame at {wanted_s:.3f} s; fetch the dataset again")

    def _convert(self, frame: av.video.frame.VideoFrame, out: Array) -> None:
        if (frame.height, frame.width) != self._shape[:2]:
            raise FormatError(f"{self._path}: frames change their size; fetch the dataset again")
        out[:] = self._reformatter.reformat(frame, format="rgb24").to_ndarray()


def open_video(path: Path, shape: tuple[int, ...]) -> tuple[av.container.InputContainer, Any]:
    """An MP4 file with frames of this shape, and its video stream."""
    height, width, _ = shape
    with refusing(path, av.error.FFmpegError):
        if not path.is_file():
            raise FileNotFoundError
        options = {"protocol_whitelist": "file", "enable_drefs": "0"}  # a video may not refer to other files
        container = av.open(f"file:{path.absolute()}", "r", format="mp4", options=options)
    try:
        with refusing(path, av.error.FFmpegError):
            stream = container.streams.video[0]
            context: Any = stream.codec_context
            if context is None:
                raise ValueError("its codec is unknown")
            if (context.height, context.width) != (height, width):
                raise FormatError(
                    f"{path}: expected frames of {height} x {width}, got {context.height} x {context.width}; "
                    f"correct the shape in meta/info.json"
                )
            context.thread_count = 1
            context.options = {"max_pixels": str(4 * width * height + 2**16), "err_detect": "explode"}
            if not stream.time_base:
                raise ValueError("it has no time base")
            return container, stream
    except FormatError:
        container.close()
        raise


def encode(frames: Array, codec: Codec, fps: int) -> bytes:
    """Encode frames [T, height, width, 3] as an MP4 video."""
    os.environ.setdefault("SVT_LOG", "1")  # otherwise the encoder prints its settings for each episode
    video = io.BytesIO()
    with _kept_scheduling(), av.open(video, "w", format="mp4") as container:
        stream: Any = container.add_stream(codec.encoder, rate=fps, options=dict(codec.settings))
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = codec.pixels
        stream.time_base = Fraction(1, fps)
        for index, image in enumerate(frames):
            frame = av.video.frame.VideoFrame.from_ndarray(image, format="rgb24")
            frame.pts, frame.time_base = index, Fraction(1, fps)
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return video.getvalue()


@contextmanager
def _kept_scheduling() -> Iterator[None]:
    """Gives this thread its scheduling back: as root, SVT-AV1 makes the thread that opens it a real-time one."""
    if not hasattr(os, "sched_getscheduler"):  # only Linux has it
        yield
        return
    policy, parameters = os.sched_getscheduler(0), os.sched_getparam(0)
    try:
        yield
    finally:
        if os.sched_getscheduler(0) != policy:
            os.sched_setscheduler(0, policy, parameters)


def mean_error(video: bytes, frames: Array) -> float:
    """Mean absolute error of the decoded video, in units of 1/255."""
    total = count = 0
    reformatter = av.video.reformatter.VideoReformatter()
    with av.open(io.BytesIO(video), "r", format="mp4") as container:
        for frame, image in zip(container.decode(video=0), frames, strict=True):
            decoded = reformatter.reformat(frame, format="rgb24").to_ndarray()
            total += int(np.abs(decoded.astype(np.int16) - image).sum())
            count += image.size
    return total / count


class VideoWriter:
    """Concatenates videos with the same encoding into one file."""

    def __init__(self, path: Path, fps: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._container = av.open(str(path), "w", format="mp4")
        self._stream: Any = None
        self._fps = fps
        self.num_frames = 0
        self.size_bytes = 0

    def add(self, video: bytes, num_frames: int) -> None:
        with av.open(io.BytesIO(video), "r", format="mp4") as source:
            stream = source.streams.video[0]
            if self._stream is None:
                self._stream = self._container.add_stream_from_template(stream, opaque=True)
                self._stream.time_base = stream.time_base
            assert stream.time_base is not None
            shift = round(Fraction(self.num_frames, self._fps) / stream.time_base)
            for packet in source.demux(stream):
                if packet.dts is None or packet.pts is None:
                    continue  # a flush packet
                packet.pts += shift
                packet.dts += shift
                packet.stream = self._stream
                self._container.mux(packet)
        self.num_frames += num_frames
        self.size_bytes += len(video)

    def close(self) -> None:
        self._container.close()

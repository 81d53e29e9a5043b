"""Videos: an episode's cameras side by side as a GIF or MP4, with a strip that shows who was in control."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from understudy.codecs.picture import library
from understudy.core import ArraySpec, Episode, EpisodeError, Source, Tree, UnderstudyError
from understudy.core import tree as trees
from understudy.replay import Reader

Array = np.ndarray[Any, Any]
Frames: TypeAlias = list[list[Array]]  # for each step, the images [h, w, 3] of all cameras

HEIGHT = 192  # minimum height of a camera in pixels; smaller images are enlarged by a whole number
STRIP = 12
GAP = 4
DEFAULT_FPS = 20.0
BLOCK_ROWS = 60  # that are decoded at a time
COLOURS = {
    Source.POLICY: (120, 130, 140),
    Source.HUMAN: (240, 130, 30),
    Source.SCRIPT: (60, 120, 200),
    Source.RANDOM: (160, 90, 180),
}
LATER = (225, 225, 225)  # steps that are still to come
NO_CAMERAS = "the episode has no cameras (uint8 [H, W, 3]); record one that has"


@dataclass(frozen=True)
class Film:
    """A stored episode as a video."""

    frames: Iterator[Array]  # decoded and drawn when they are taken
    num_frames: int
    height: int
    width: int
    fps: float  # of the episode, where it is known
    suffix: str  # of the file that suits it: .mp4 if cameras are stored encoded, because these are large


def film_of(reader: Reader, episode: int) -> Film:
    """The video of a stored episode. Of encoded frames, few are decoded at a time: those of minutes fill the memory."""
    record, stored = reader.stored_rows(episode)
    spec = reader.spec(record.spec)
    cameras = {path: leaf for path, leaf in spec.observation.leaves("observation") if _is_camera(leaf)}
    if not cameras:
        raise UnderstudyError(NO_CAMERAS)
    if record.num_rows < 2:
        raise EpisodeError(f"episode {episode}: has {record.num_rows} rows so far; film it when it has more")

    source = np.asarray(stored["source"])[:-1]

    def frames() -> Iterator[Array]:
        for first in range(0, record.num_rows, BLOCK_ROWS):
            stop = min(first + BLOCK_ROWS, record.num_rows)
            columns = reader.decode(record, stored, first, stop)
            for row in range(first, stop):
                yield _frame([columns[path][row - first] for path in cameras], source, row)

    encoded = any(leaf.codec is not None for leaf in cameras.values())
    height, width, _ = _frame([np.zeros(leaf.fixed_shape, np.uint8) for leaf in cameras.values()], source, 0).shape
    return Film(
        frames=frames(),
        num_frames=record.num_rows,
        height=height,
        width=width,
        fps=record.info.fps or DEFAULT_FPS,
        suffix=".mp4" if encoded else ".gif",
    )


def _is_camera(leaf: ArraySpec) -> bool:
    return leaf.dtype == "uint8" and len(leaf.shape) == 3 and leaf.shape[-1] == 3


def draw_episode(episode: Episode) -> list[Array]:
    """The frames of a recorded episode, uint8 [H, W, 3] each."""
    columns = _images(episode.observation, num_dimensions=4)
    if not columns:
        raise UnderstudyError(NO_CAMERAS)
    return draw_frames([[column[at] for column in columns] for at in range(len(episode) + 1)], episode.source)


def cameras_of(observation: Tree) -> list[Array]:
    """The images in an observation."""
    return _images(observation, num_dimensions=3)


def _images(tree: Tree, *, num_dimensions: int) -> list[Array]:
    return [
        leaf
        for _, leaf in trees.leaves(tree)
        if isinstance(leaf, np.ndarray)
        and leaf.dtype == np.uint8
        and leaf.ndim == num_dimensions
        and leaf.shape[-1] == 3
    ]


def draw_frames(frames: Frames, source: Array) -> list[Array]:
    """The cameras side by side; `source` [T] says who chose each step."""
    return [_frame(images, source, index) for index, images in enumerate(frames)]


def video_name(text: str, suffix: str = ".gif") -> str:
    """The name of a video file: `text` without characters that some file systems or shells refuse, such as colons."""
    return re.sub(r"[^\w.-]+", "-", text) + suffix


def write_video(path: Path, drawn: Iterable[Array], *, fps: float = DEFAULT_FPS) -> None:
    """Write drawn frames, of which there is at least one, to a GIF or an MP4 file (H.264)."""
    writers = {".gif": _write_gif, ".mp4": _write_mp4}
    write = writers.get(path.suffix.lower())
    if write is None:
        raise UnderstudyError(
            f"{path}: videos are written as .gif or .mp4, got {path.suffix or 'no suffix'}; choose one of these"
        )
    try:
        write(path, iter(drawn), fps)
    except BaseException as error:
        path.unlink(missing_ok=True)  # a part of a video looks like a whole one
        if not isinstance(error, OSError):
            raise
        raise UnderstudyError(f"{path}: cannot be written ({error.strerror or error}); choose another path") from None


def _write_gif(path: Path, drawn: Iterator[Array], fps: float) -> None:
    try:
        from PIL import Image
    except ModuleNotFoundError:
        raise UnderstudyError(
            "GIF videos need pillow, which is not installed; run `pip install 'understudy-robotics[plot]'`"
        ) from None
    images = map(Image.fromarray, drawn)
    next(images).save(path, save_all=True, append_images=images, duration=round(1000 / fps), loop=0)


def _write_mp4(path: Path, drawn: Iterator[Array], fps: float) -> None:
    av = library("av")
    rate = Fraction(fps).limit_denominator(1000)
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=rate, options={"crf": "20", "preset": "veryfast"})
        stream.pix_fmt = "yuv420p"  # which every browser and player shows; its sizes are even
        for number, frame in enumerate(drawn):
            height, width = frame.shape[0] // 2 * 2, frame.shape[1] // 2 * 2
            if number == 0:
                stream.height, stream.width = height, width
            picture = av.VideoFrame.from_ndarray(np.ascontiguousarray(frame[:height, :width]), format="rgb24")
            container.mux(stream.encode(picture))
        container.mux(stream.encode(None))


def _frame(cameras: list[Array], source: Array, index: int) -> Array:
    images = [_enlarged(image) for image in cameras]
    height = max(len(image) for image in images)
    width = sum(image.shape[1] + GAP for image in images) - GAP
    frame = np.full((height + GAP + STRIP, width, 3), 255, np.uint8)
    at = 0
    for image in images:
        frame[: len(image), at : at + image.shape[1]] = image
        at += image.shape[1] + GAP
    frame[height + GAP :] = _strip(source, index, width)
    return frame


def _enlarged(image: Array) -> Array:
    times = max(-(-HEIGHT // len(image)), 1)
    return image.repeat(times, axis=0).repeat(times, axis=1)


def _strip(source: Array, index: int, width: int) -> Array:
    """A line of colours: the steps so far by who chose them, later steps pale."""
    colours = np.array([COLOURS[Source(number)] for number in source.tolist()], np.uint8)
    colours[index:] = LATER
    return colours[np.arange(width) * len(source) // width]

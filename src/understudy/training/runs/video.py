"""Videos: an episode's cameras side by side as an animated GIF, with a strip that shows who was in control."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from understudy.core import Episode, Source, Tree, UnderstudyError
from understudy.core import tree as trees

Array = np.ndarray[Any, Any]
Frames: TypeAlias = list[list[Array]]  # for each step, the images [h, w, 3] of all cameras

HEIGHT = 192  # minimum height of a camera in pixels; smaller images are enlarged by a whole number
STRIP = 12
GAP = 4
COLOURS = {
    Source.POLICY: (120, 130, 140),
    Source.HUMAN: (240, 130, 30),
    Source.SCRIPT: (60, 120, 200),
    Source.RANDOM: (160, 90, 180),
}
LATER = (225, 225, 225)  # steps that are still to come


def draw_episode(episode: Episode) -> list[Array]:
    """The frames of a recorded episode, uint8 [H, W, 3] each."""
    columns = _images(episode.observation, num_dimensions=4)
    if not columns:
        raise UnderstudyError("the episode has no cameras (uint8 [H, W, 3]); record one that has")
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


def video_name(text: str) -> str:
    """The name of a video file: `text` without characters that some file systems or shells refuse, such as colons."""
    return re.sub(r"[^\w.-]+", "-", text) + ".gif"


def write_video(path: Path, drawn: list[Array], *, fps: float = 20.0) -> None:
    """Write drawn frames to a GIF."""
    if path.suffix.lower() != ".gif":
        raise UnderstudyError(f"{path}: videos are written as .gif, got {path.suffix or 'no suffix'}; rename it")
    try:
        from PIL import Image
    except ModuleNotFoundError:
        raise UnderstudyError(
            "videos need pillow, which is not installed; run `pip install 'understudy-robotics[plot]'`"
        ) from None
    images = [Image.fromarray(frame) for frame in drawn]
    try:
        images[0].save(path, save_all=True, append_images=images[1:], duration=round(1000 / fps), loop=0)
    except OSError as error:
        raise UnderstudyError(f"{path}: cannot be written ({error.strerror or error}); choose another path") from None


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

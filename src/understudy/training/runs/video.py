"""Films: an episode's cameras side by side as a moving picture, with a strip that shows who was in control."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from understudy.core import Episode, Source, Tree, UnderstudyError
from understudy.core import tree as trees

Array = np.ndarray[Any, Any]
Frames: TypeAlias = list[list[Array]]  # of each moment, the pictures [h, w, 3] of all cameras

HEIGHT = 192  # of a camera at least; smaller ones are enlarged by a whole number
STRIP = 12
GAP = 4
COLOURS = {
    Source.POLICY: (120, 130, 140),
    Source.HUMAN: (240, 130, 30),
    Source.SCRIPT: (60, 120, 200),
    Source.RANDOM: (160, 90, 180),
}
LATER = (225, 225, 225)  # steps that are still to come


def film(episode: Episode) -> list[Array]:
    """A recorded episode, frame by frame, uint8 [H, W, 3] each."""
    columns = _pictures(episode.observation, num_dimensions=4)
    if not columns:
        raise UnderstudyError("the episode has no cameras (uint8 [H, W, 3]); record one that has")
    return draw([[column[at] for column in columns] for at in range(len(episode) + 1)], episode.source)


def cameras_of(observation: Tree) -> list[Array]:
    """The pictures in an observation."""
    return _pictures(observation, num_dimensions=3)


def _pictures(tree: Tree, *, num_dimensions: int) -> list[Array]:
    return [
        leaf
        for _, leaf in trees.leaves(tree)
        if isinstance(leaf, np.ndarray)
        and leaf.dtype == np.uint8
        and leaf.ndim == num_dimensions
        and leaf.shape[-1] == 3
    ]


def draw(frames: Frames, source: Array) -> list[Array]:
    """The cameras side by side; `source` [T] is who chose each step."""
    return [_frame(pictures, source, index) for index, pictures in enumerate(frames)]


def write_film(path: Path, drawn: list[Array], *, fps: float = 20.0) -> None:
    """Write drawn frames to a GIF."""
    if path.suffix.lower() != ".gif":
        raise UnderstudyError(f"{path}: films are written as .gif, got {path.suffix or 'no ending'}; rename it")
    try:
        from PIL import Image
    except ModuleNotFoundError:
        raise UnderstudyError(
            "films need pillow, which is not installed; run `pip install 'understudy[plot]'`"
        ) from None
    images = [Image.fromarray(frame) for frame in drawn]
    try:
        images[0].save(path, save_all=True, append_images=images[1:], duration=round(1000 / fps), loop=0)
    except OSError as error:
        raise UnderstudyError(f"{path}: cannot be written ({error.strerror or error}); choose another place") from None


def _frame(cameras: list[Array], source: Array, index: int) -> Array:
    pictures = [_enlarged(picture) for picture in cameras]
    height = max(len(picture) for picture in pictures)
    width = sum(picture.shape[1] + GAP for picture in pictures) - GAP
    frame = np.full((height + GAP + STRIP, width, 3), 255, np.uint8)
    at = 0
    for picture in pictures:
        frame[: len(picture), at : at + picture.shape[1]] = picture
        at += picture.shape[1] + GAP
    frame[height + GAP :] = _strip(source, index, width)
    return frame


def _enlarged(picture: Array) -> Array:
    times = max(-(-HEIGHT // len(picture)), 1)
    return picture.repeat(times, axis=0).repeat(times, axis=1)


def _strip(source: Array, index: int, width: int) -> Array:
    """One line of colours: the steps so far by who chose them, the others pale."""
    colours = np.array([COLOURS[Source(number)] for number in source.tolist()], np.uint8)
    colours[index:] = LATER
    return colours[np.arange(width) * len(source) // width]

"""`understudy film`: an episode's cameras as a moving picture, with a strip that shows who was in control."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro
from rich.console import Console

from understudy.core import Episode, Source, UnderstudyError
from understudy.core import tree as trees
from understudy.replay import Reader

Array = np.ndarray[Any, Any]

HEIGHT = 192  # of a camera at least; smaller ones are enlarged by a whole number
STRIP = 12
GAP = 4
COLOURS = {
    Source.POLICY: (120, 130, 140), Source.HUMAN: (240, 130, 30), Source.SCRIPT: (60, 120, 200),
    Source.RANDOM: (160, 90, 180),
}  # fmt: skip
LATER = (225, 225, 225)  # steps that are still to come


def command(
    store: Annotated[Path, tyro.conf.Positional],
    episode: Annotated[int, tyro.conf.Positional],
    *,
    out: Path | None = None,
    fps: float = 20.0,
) -> int:
    """Make a moving picture (GIF) of an episode: its cameras side by side, and below them who was in control.

    Grey is the policy, orange a human, blue a script, purple chance.

    Args:
        store: Directory of the store.
        episode: Number of the episode, as `understudy info STORE --episodes` shows it.
        out: File to write; by default episode-NUMBER.gif here.
        fps: Frames a second.
    """
    if not fps > 0:
        raise UnderstudyError(f"fps: expected a number above 0, got {fps:g}")
    out = out or Path(f"episode-{episode}.gif")
    with Reader(store) as reader:
        frames = film(reader.read(episode))
    _write(out, frames, fps)
    height, width = frames[0].shape[:2]
    Console(highlight=False).print(f"{out}: {len(frames)} frames of {width}x{height}", soft_wrap=True)
    return 0


def film(episode: Episode) -> list[Array]:
    """The frames of an episode, uint8 [H, W, 3] each."""
    cameras = [
        column for _, column in trees.leaves(episode.observation)
        if isinstance(column, np.ndarray) and column.dtype == np.uint8 and column.shape[1:][-1:] == (3,)
        and column.ndim == 4
    ]  # fmt: skip
    if not cameras:
        raise UnderstudyError("the episode has no cameras (uint8 [H, W, 3]); record one that has")
    return [_frame(cameras, episode.source, index) for index in range(len(episode) + 1)]


def _frame(cameras: list[Array], source: Array, index: int) -> Array:
    pictures = [_enlarged(camera[index]) for camera in cameras]
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


def _write(path: Path, frames: list[Array], fps: float) -> None:
    try:
        from PIL import Image
    except ModuleNotFoundError:
        raise UnderstudyError(
            "films need pillow, which is not installed; run `pip install 'understudy[plot]'`"
        ) from None
    if path.suffix.lower() != ".gif":
        raise UnderstudyError(f"{path}: films are written as .gif, got {path.suffix or 'no ending'}; rename it")
    images = [Image.fromarray(frame) for frame in frames]
    try:
        images[0].save(path, save_all=True, append_images=images[1:], duration=round(1000 / fps), loop=0)
    except OSError as error:
        raise UnderstudyError(f"{path}: cannot be written ({error.strerror or error}); choose another place") from None

"""`understudy film`: writes the cameras of an episode as a video, with a strip that shows the source of each action."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from understudy.cli.progress import ProgressLine
from understudy.core import UnderstudyError
from understudy.replay import Reader
from understudy.training.runs.video import Array, Film, film_of, video_name, write_video


def command(
    store: Annotated[Path, tyro.conf.Positional],
    episode: Annotated[int, tyro.conf.Positional],
    *,
    out: Path | None = None,
    fps: float | None = None,
) -> int:
    """Write an episode as a video, GIF or MP4: its cameras side by side, and below them the source of each action.

    Grey is the policy, orange a human, blue a script, purple a random action.

    Args:
        store: Directory of the store.
        episode: Id of the episode, as `understudy info STORE --episodes` shows it.
        out: File to write, .gif or .mp4; by default STORE-episode-ID in the working directory, with a number if it
            exists: a GIF, or an MP4 if the cameras are stored encoded.
        fps: Frame rate of the video in frames per second; None: that of the episode where it is known, else 20.
    """
    if fps is not None and not fps > 0:
        raise UnderstudyError(f"fps: expected a number above 0, got {fps:g}")
    console = Console(highlight=False)
    with Reader(store) as reader, ProgressLine(console, "film", "frames") as progress:
        film = film_of(reader, episode)
        out = out or free_name(store, episode, film.suffix)
        fps = fps or film.fps
        write_video(out, _shown(film, progress), fps=fps)
    size = f"{film.num_frames} frames of {film.width}x{film.height}"
    console.print(f"{out}: {size}, {fps:g} a second", soft_wrap=True)
    return 0


def _shown(film: Film, progress: ProgressLine) -> Iterator[Array]:
    for frame in film.frames:
        yield frame
        progress.advance(film.num_frames)


def free_name(store: Path, episode: int, suffix: str) -> Path:
    """A file of the working directory that does not exist, named after the store, or after the run that it is in."""
    found = store.resolve()
    name = f"{found.parent.name if found.name == 'store' else found.name}-episode-{episode}"
    out = Path(video_name(name, suffix))
    for number in itertools.count(2):
        if not out.exists():
            break
        out = Path(video_name(f"{name}-{number}", suffix))
    return out

"""`understudy film`: writes the cameras of an episode as a video, with a strip that shows the source of each action."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from understudy.core import UnderstudyError
from understudy.replay import Reader
from understudy.training.runs.video import draw_episode, video_name, write_video


def command(
    store: Annotated[Path, tyro.conf.Positional],
    episode: Annotated[int, tyro.conf.Positional],
    *,
    out: Path | None = None,
    fps: float = 20.0,
) -> int:
    """Write an episode as a GIF video: its cameras side by side, and below them the source of each action.

    Grey is the policy, orange a human, blue a script, purple a random action.

    Args:
        store: Directory of the store.
        episode: Id of the episode, as `understudy info STORE --episodes` shows it.
        out: File to write; by default STORE-episode-ID.gif in the working directory, with a number if it exists.
        fps: Frame rate of the video in frames per second.
    """
    if not fps > 0:
        raise UnderstudyError(f"fps: expected a number above 0, got {fps:g}")
    out = out or free_name(store, episode)
    with Reader(store) as reader:
        frames = draw_episode(reader.read(episode))
    write_video(out, frames, fps=fps)
    height, width = frames[0].shape[:2]
    Console(highlight=False).print(f"{out}: {len(frames)} frames of {width}x{height}", soft_wrap=True)
    return 0


def free_name(store: Path, episode: int) -> Path:
    """A file of the working directory that does not exist, named after the store, or after the run that it is in."""
    found = store.resolve()
    name = f"{found.parent.name if found.name == 'store' else found.name}-episode-{episode}"
    out = Path(video_name(name))
    for number in itertools.count(2):
        if not out.exists():
            break
        out = Path(video_name(f"{name}-{number}"))
    return out

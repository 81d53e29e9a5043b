"""`understudy film`: an episode's cameras as a moving picture, with a strip that shows who was in control."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from understudy.core import UnderstudyError
from understudy.replay import Reader
from understudy.training.runs.video import film, write_film


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
    write_film(out, frames, fps=fps)
    height, width = frames[0].shape[:2]
    Console(highlight=False).print(f"{out}: {len(frames)} frames of {width}x{height}", soft_wrap=True)
    return 0

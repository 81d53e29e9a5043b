"""`understudy trim`, `split` and `merge`: make new episodes of stored ones, without encoding a frame again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from understudy.replay import Reader, Store, origins
from understudy.replay import merge as merge_episodes
from understudy.replay import split as split_episode
from understudy.replay import trim as trim_episode


def trim(
    store: Annotated[Path, tyro.conf.Positional],
    episode: Annotated[int, tyro.conf.Positional],
    *,
    first: int = 0,
    stop: int | None = None,
    delete_source: bool = False,
) -> int:
    """Store a part of an episode as a new one, which says where it comes from; frames are not encoded again.

    Args:
        store: Directory of the store, to which no other process is writing.
        episode: Id of the episode, as `understudy info STORE --episodes` shows it.
        first: First step to keep, counted from 0.
        stop: First step to leave out again; by default the end of the episode.
        delete_source: Take the old episode out of every view; without this, it stays as it is.
    """
    with Store.open(store, create=False) as opened:
        if stop is None:
            with Reader(store) as reader:
                stop = reader.record(episode).num_rows - 1
        new = trim_episode(opened, episode, first, stop, delete_source=delete_source)
    _show(store, [new])
    return 0


def split(
    store: Annotated[Path, tyro.conf.Positional],
    episode: Annotated[int, tyro.conf.Positional],
    *,
    at: tuple[int, ...],
    delete_source: bool = False,
) -> int:
    """Store an episode as several new ones that follow each other; frames are not encoded again.

    Args:
        store: Directory of the store, to which no other process is writing.
        episode: Id of the episode, as `understudy info STORE --episodes` shows it.
        at: Steps that a new episode begins with, counted from 0: `--at 100 250` makes three episodes.
        delete_source: Take the old episode out of every view; without this, it stays as it is.
    """
    with Store.open(store, create=False) as opened:
        new = split_episode(opened, episode, at, delete_source=delete_source)
    _show(store, new)
    return 0


def merge(
    store: Annotated[Path, tyro.conf.Positional],
    episodes: Annotated[tuple[int, ...], tyro.conf.Positional],
    *,
    delete_source: bool = False,
) -> int:
    """Store episodes that follow each other as a new one; frames are not encoded again.

    Each must begin with exactly the observation that the one before it ended with.

    Args:
        store: Directory of the store, to which no other process is writing.
        episodes: Ids of the episodes, in their order.
        delete_source: Take the old episodes out of every view; without this, they stay as they are.
    """
    with Store.open(store, create=False) as opened:
        new = merge_episodes(opened, episodes, delete_source=delete_source)
    _show(store, [new])
    return 0


def _show(store: Path, new: list[int]) -> None:
    console = Console(highlight=False)
    with Reader(store) as reader:
        for episode in new:
            record = reader.record(episode)
            made_of = "; ".join(map(str, origins(record.info)))
            console.print(f"episode {episode}: {record.num_rows - 1:,} steps, from {made_of}", soft_wrap=True)

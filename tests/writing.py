"""Episodes into a writer, and a writer's chunks out of it."""

from __future__ import annotations

from typing import Any

from understudy.core import Episode
from understudy.replay import Writer
from understudy.replay.format.chunk import Chunk


def write_episode(writer: Writer, episode: Episode, **info: Any) -> None:
    """All of it, under its own info or what is given instead."""
    writer.begin(**info) if info else writer.begin(episode.info)
    for step in episode.steps():
        writer.append(step)
    writer.end(episode.last_observation)


class Collector:
    """Keeps the chunks of a writer."""

    keeps_columns = True

    def __init__(self) -> None:
        self.chunks: list[Chunk] = []

    def commit(self, chunk: Chunk) -> int:
        self.chunks.append(chunk)
        return len(self.chunks)

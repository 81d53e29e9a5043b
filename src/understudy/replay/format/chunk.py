"""Chunk: the rows that a writer commits together. Stored whole or not at all, and once however often it is sent."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from understudy.core import EpisodeInfo, StepSpec
from understudy.core.episode import Column

# open: more rows may come. ended: the last row is the last observation. cut: stopped before it ended.
EpisodeState: TypeAlias = Literal["open", "ended", "cut"]


@dataclass(frozen=True, kw_only=True)
class Part:
    """Neighbouring rows of a chunk that belong to one episode, and the state and attributes of that episode."""

    episode: int  # the writer's own number of the episode
    first_index: int  # of the first row, in its episode
    num_rows: int
    state: EpisodeState  # of the episode after these rows
    info: EpisodeInfo


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """Rows of one writer. `seq` counts a writer's chunks from 0 without gaps."""

    writer: str
    incarnation: str
    seq: int
    spec: StepSpec
    columns: Mapping[str, Column]  # checked, by field; encoded before a store commits it
    parts: tuple[Part, ...]  # in the order of the rows
    check: int | None = None  # the checksum of its message; None if it was not sent
    release: Callable[[], None] | None = None  # to be called when `columns` will not be read again

    @property
    def num_rows(self) -> int:
        return sum(part.num_rows for part in self.parts)

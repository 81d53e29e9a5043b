"""Chunk: what a writer hands over in one go. It is stored whole or not at all, and once however often it is sent."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from understudy.core import EpisodeInfo, StepSpec

# open: more rows may come. ended: the last row is the last observation. cut: given up before it ended.
State: TypeAlias = Literal["open", "ended", "cut"]


@dataclass(frozen=True, kw_only=True)
class Part:
    """Some neighbouring rows of a chunk that belong to one episode, and what is now known of that episode."""

    episode: int  # the writer's own number of the episode
    first_index: int  # of the first row, in its episode
    num_rows: int
    state: State  # of the episode after these rows
    info: EpisodeInfo


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """Rows of one writer. `seq` counts a writer's chunks from 0 without gaps."""

    writer: str
    incarnation: str
    seq: int
    spec: StepSpec
    columns: Mapping[str, Any]  # checked: field to [rows, ...], or to a list where ragged
    parts: tuple[Part, ...]  # in the order of the rows
    done: Callable[[], None] | None = None  # tells that `columns` will not be read again

    @property
    def num_rows(self) -> int:
        return sum(part.num_rows for part in self.parts)

"""Splicer: renumbers the episodes of a writer after some of its chunks were dropped. Pure.

Two rows are stored next to each other only if one followed the other. So an episode that lost rows in its middle is cut
before the gap, and what follows the gap becomes an episode of its own with a label that counts the missing steps.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from understudy.core import EpisodeInfo
from understudy.replay.format.chunk import Part
from understudy.replay.write.writer import info_after_gap


@dataclass(frozen=True)
class _Open:
    """The episode that is open after the last part that was not dropped."""

    given: int  # its number in the writer's chunks
    number: int  # and in the chunks that are sent
    missing: int  # rows that were dropped before its first row
    num_rows: int  # of the writer, the missing ones included
    info: EpisodeInfo


class Splicer:
    """Takes the parts of each chunk that was not dropped, in order, and renumbers the episodes."""

    def __init__(self) -> None:
        self._open: _Open | None = None
        self._next_number = 0

    def splice(self, parts: Iterable[Part]) -> tuple[Part, ...]:
        out: list[Part] = []
        for part in parts:
            now = self._open
            if now is None or now.given != part.episode or now.num_rows != part.first_index:
                if now is not None:
                    out.append(self._cut(now))
                if part.num_rows == 0:  # the end of an episode of which all rows were dropped
                    self._open = None
                    continue
                before = now.num_rows if now is not None and now.given == part.episode else 0
                missing = part.first_index - before
                now = _Open(
                    part.episode,
                    self._next_number,
                    part.first_index,
                    part.first_index,
                    info_after_gap(part.info, missing) if missing else part.info,
                )
                self._next_number += 1
            info = replace(part.info, labels={**now.info.labels, **part.info.labels})
            out.append(replace(part, episode=now.number, first_index=part.first_index - now.missing, info=info))
            now = replace(now, num_rows=now.num_rows + part.num_rows, info=info)
            self._open = now if part.state == "open" else None
        return tuple(out)

    @staticmethod
    def _cut(now: _Open) -> Part:
        return Part(episode=now.number, first_index=now.num_rows - now.missing, num_rows=0, state="cut", info=now.info)

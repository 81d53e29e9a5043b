"""Splicer: the parts of chunks after some chunks were dropped. Pure.

A row is never the neighbour of one that it did not follow. So an episode from whose middle rows are missing is cut
before the gap, and what stands behind the gap is an episode of its own that says how many steps are missing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from understudy.core import EpisodeInfo
from understudy.replay.format.chunk import Part
from understudy.replay.write.writer import behind_gap


@dataclass(frozen=True)
class _Open:
    """The episode that is open behind the last part that came through."""

    given: int  # its number as it came in
    number: int  # and as it went out
    missing: int  # rows of it that were dropped before its first
    num_rows: int  # that came in, the missing ones counted
    info: EpisodeInfo


class Splicer:
    """Takes the parts of each chunk that was not dropped, in order, and numbers the episodes anew."""

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
                if part.num_rows == 0:  # the end of an episode of which nothing came through
                    self._open = None
                    continue
                before = now.num_rows if now is not None and now.given == part.episode else 0
                missing = part.first_index - before
                now = _Open(
                    part.episode,
                    self._next_number,
                    part.first_index,
                    part.first_index,
                    behind_gap(part.info, missing) if missing else part.info,
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

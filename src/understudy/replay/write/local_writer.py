"""LocalWriter: a Writer into a store of this process. `append` copies the step and returns.

A thread encodes and commits the chunks (background.py). `flush`, and `end` and `cut` with `flush_each_episode`, return
when everything is durable. If frames come faster than they can be encoded and written, `overflow` says what happens:

| overflow | `append` | the episode |
|---|---|---|
| block | waits | is whole |
| raise | raises a BacklogError while there is no room | is cut at the gap, and continues as another one |
| drop_episode | returns | is cut where the first step was dropped; the rest of it is dropped and counted |
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from understudy.core import BacklogError, EpisodeError, EpisodeInfo, Step, StepSpec
from understudy.core.tree import Tree
from understudy.replay.format.chunk import Chunk
from understudy.replay.write.background import OVERFLOWS, BackgroundCommits, Overflow
from understudy.replay.write.writer import Writer

logger = logging.getLogger(__name__)


class LocalWriter(Writer):
    """One stream of episodes into a store of this process."""

    def __init__(
        self,
        commit: Callable[[Chunk], int],
        name: str,
        incarnation: str,
        spec: StepSpec,
        *,
        commit_steps: int = 50,
        flush_each_episode: bool = True,
        overflow: Overflow = "block",
    ):
        check_overflow(overflow)
        self._commit_now = commit
        self.commits = BackgroundCommits(name, commit, overflow=overflow)
        super().__init__(
            self.commits,
            name,
            incarnation,
            spec,
            commit_steps=commit_steps,
            flush_each_episode=flush_each_episode,
            keeps_lock=any(leaf.codec is not None for leaf in spec.columns.values()),
        )
        self._drops = overflow == "drop_episode"
        self._dropping = False  # the rest of the current episode
        self.num_dropped = 0  # steps, with overflow="drop_episode"

    @property
    def num_uncommitted(self) -> int:
        """Rows that a crash would lose now."""
        return len(self._buffer) + self.commits.num_rows

    def begin(self, info: EpisodeInfo | None = None, **attributes: Any) -> int:
        number = super().begin(info, **attributes)
        self._dropping = False
        return number

    def append(self, step: Step) -> None:
        if self._dropping:
            self._drop_step()
            return
        try:
            super().append(step)
        except BacklogError:
            if not self._drops:
                raise
            self._dropping = True  # this step is kept
            logger.warning(
                "writer %r: frames come too fast; the rest of episode %d is dropped", self.name, self._number
            )

    def _drop_step(self) -> None:
        with self._turn:
            self._check_open("append")
            self._num_refused += 1
            self.num_dropped += 1

    def end(self, last_observation: Tree, **attributes: Any) -> int:
        if self._dropping:
            return self.cut(**attributes)
        with self.commits.patience():
            return super().end(last_observation, **attributes)

    def cut(self, last_observation: Tree | None = None, **attributes: Any) -> int:
        with self.commits.patience():
            return super().cut(None if self._dropping else last_observation, **attributes)

    def flush(self) -> int:
        """Commit all that was appended; returns the number of the commit when it is durable."""
        with self.commits.patience():
            self._commit()
        self._last_commit = self.commits.flush()
        return self._last_commit

    def _commit_episode(self) -> int:
        return self.flush()

    def _commit_columns(self, chunk: Chunk) -> int:
        self.commits.flush()
        return self._commit_now(chunk)


def check_overflow(overflow: str) -> None:
    if overflow not in OVERFLOWS:
        raise EpisodeError(f"overflow: expected {', '.join(OVERFLOWS)}, got {overflow!r}; choose one of these")

"""BackgroundCommits: encodes and commits the chunks of one writer, so that `append` returns at once.

| caller | takes from | blocks on | woken by |
|---|---|---|---|
| `commit`, in the control loop | - | a full queue, with overflow="block" | the committing thread |
| `flush` | - | chunks that are not durable yet | the committing thread |
| committing thread | the queue of chunks | the queue; the codecs' threads; the disk | `commit` |
| the end of the process | - | chunks that are not durable yet | the committing threads |

The committing thread ends after IDLE_S without a chunk, so there is nothing to close. An error ends it for good: the
next call raises it, and so does `Store.close`, if nobody has heard of it before.
"""

from __future__ import annotations

import atexit
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal, TypeAlias, get_args
from weakref import WeakSet

from understudy.core import BacklogError, StoreFailedError, UnderstudyError
from understudy.processes import forks
from understudy.replay.format.chunk import Chunk

logger = logging.getLogger(__name__)

Overflow: TypeAlias = Literal["block", "raise", "drop_episode"]
OVERFLOWS: tuple[Overflow, ...] = get_args(Overflow)
MAX_QUEUED_CHUNKS = 4
IDLE_S = 10.0


class BackgroundCommits:
    """The chunks of one writer on their way into a store."""

    keeps_columns = True

    def __init__(self, writer: str, commit: Callable[[Chunk], int], *, overflow: Overflow = "block"):
        self.writer = writer
        self._commit = commit
        self._overflow = overflow
        self._patient = False
        self._changed = threading.Condition()  # guards all below
        self._queue: deque[Chunk] = deque()  # the first is being committed
        self._has_thread = False
        self._last_commit = 0
        self._failure: UnderstudyError | None = None
        self._failure_was_raised = False
        forks.register(self)
        _all.add(self)

    def after_fork_in_child(self) -> None:
        self._changed = threading.Condition()
        self._queue.clear()  # the parent commits them
        self._has_thread = False

    def commit(self, chunk: Chunk) -> int:
        """Queue a chunk; returns the last commit that is durable."""
        with self._changed:
            self._raise_failure()
            if len(self._queue) >= MAX_QUEUED_CHUNKS:
                if self._overflow != "block" and not self._patient:
                    raise BacklogError(
                        f"writer {self.writer!r}: {self.num_rows} steps wait to be encoded and written, and more come "
                        f"faster than that; record fewer or smaller cameras, choose a faster codec, or overflow='block'"
                    )
                self._changed.wait_for(lambda: len(self._queue) < MAX_QUEUED_CHUNKS or self._failure is not None)
                self._raise_failure()
            self._queue.append(chunk)
            if not self._has_thread:
                self._has_thread = True
                threading.Thread(target=self._work, name=f"commit:{self.writer}", daemon=True).start()
            self._changed.notify_all()
            return self._last_commit

    @contextmanager
    def patience(self) -> Iterator[None]:
        """In here `commit` waits for room, whatever the overflow: the caller has asked to wait for the disk."""
        self._patient = True
        try:
            yield
        finally:
            self._patient = False

    def flush(self) -> int:
        """Wait until all chunks are durable; returns the number of the last commit."""
        with self._changed:
            self._changed.wait_for(lambda: not self._queue or self._failure is not None)
            self._raise_failure()
            return self._last_commit

    def drain(self) -> UnderstudyError | None:
        """As `flush`, before the store is closed; returns an error that no call has raised so far."""
        with self._changed:
            self._changed.wait_for(lambda: not self._queue or self._failure is not None)
            return None if self._failure_was_raised else self._failure

    @property
    def num_rows(self) -> int:
        """Rows that are not durable yet."""
        with self._changed:
            return sum(chunk.num_rows for chunk in self._queue)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            self._failure_was_raised = True
            raise self._failure.with_traceback(None) from None

    def _work(self) -> None:
        """Commit what is queued, until nothing comes for a while."""
        try:
            while (chunk := self._next_chunk()) is not None:
                commit = self._commit(chunk)
                if chunk.release is not None:
                    chunk.release()
                with self._changed:
                    self._last_commit = commit
                    self._queue.popleft()
                    self._changed.notify_all()
        except UnderstudyError as error:
            self._fail(error)
        except BaseException as error:
            self._fail(StoreFailedError(f"writer {self.writer!r}: {error!r}; this is a defect, please report it"))
            raise

    def _next_chunk(self) -> Chunk | None:
        with self._changed:
            if self._changed.wait_for(lambda: bool(self._queue), IDLE_S):
                return self._queue[0]
            self._has_thread = False
            return None

    def _fail(self, error: UnderstudyError) -> None:
        with self._changed:
            self._failure, self._has_thread = error, False
            self._changed.notify_all()


_all: WeakSet[BackgroundCommits] = WeakSet()


@atexit.register
def _drain_all() -> None:
    """Commit what was handed over, although nobody has closed the store: a process that ends has not crashed."""
    for commits in list(_all):
        if (error := commits.drain()) is not None:
            logger.error("writer %r: not all of its steps are stored: %s", commits.writer, error)

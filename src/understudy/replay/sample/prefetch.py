"""Prefetch: a thread draws batches ahead of time, into a few arrays that are used in turn.

| loop | takes from | blocks on | woken by |
|---|---|---|---|
| caller (`next`) | the queue of full batches | that queue, when it is empty | the filling thread, or its error |
| filling thread | the queue of free batches | that queue, when it is empty | the caller's next `next`, or `close` |

The thread passes every exception to the caller and ends. It also ends at `close`, and when its owner is gone. A forked
process does not have the thread, and `next` says so.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Iterator
from typing import Any, Generic, TypeAlias

from understudy.core.closeable import Closeable
from understudy.processes import forks
from understudy.replay.sample.batch_source import BatchStream, Item

Filled: TypeAlias = tuple[Item, dict[str, Any]] | BaseException  # a batch and the state after it, or what ended it


class Prefetch(Closeable, Generic[Item]):
    """An endless iterator of batches. A batch is the caller's until the next one is asked for."""

    def __init__(self, source: BatchStream[Item], *, depth: int = 2, follow_every: int = 1):
        self._free: queue.SimpleQueue[Item | None] = queue.SimpleQueue()
        self._full: queue.SimpleQueue[Filled[Item]] = queue.SimpleQueue()
        for _ in range(depth + 1):
            self._free.put(source.make())
        self._state = source.state()
        self._lent: Item | None = None
        self._ended = self._forked = False
        loop = threading.Thread(
            target=_fill, args=(source, self._free, self._full, follow_every), name="prefetch", daemon=True
        )
        loop.start()
        self._loop = loop
        self._finalizer = weakref.finalize(self, self._free.put, None)
        forks.register(self)

    def after_fork_in_child(self) -> None:
        self._forked = True

    def __iter__(self) -> Iterator[Item]:
        return self

    def __next__(self) -> Item:
        if self._ended:
            raise StopIteration
        if self._forked:
            raise forks.forked_error("Prefetch: its thread", "make a sampler and a Prefetch in this process")
        if self._lent is not None:
            self._free.put(self._lent)
            self._lent = None
        filled = self._full.get()
        if isinstance(filled, BaseException):
            self._ended = True
            raise filled
        self._lent, self._state = filled
        return self._lent

    def state(self) -> dict[str, Any]:
        """The state of the source after the last batch that the caller got, however far ahead the thread is."""
        return self._state

    def close(self) -> None:
        """End the thread, after the batch that it is drawing."""
        self._ended = True
        self._finalizer()
        self._loop.join()


def _fill(
    source: BatchStream[Item],
    free: queue.SimpleQueue[Item | None],
    full: queue.SimpleQueue[Filled[Item]],
    follow_every: int,
) -> None:
    """The filling thread; it holds no reference to its owner."""
    number = 0
    while (batch := free.get()) is not None:
        try:
            if number % follow_every == 0:
                source.follow()
            source.sample(batch)
        except BaseException as error:  # noqa: BLE001 (a thread's outermost loop: the caller raises it)
            full.put(error)
            return
        full.put((batch, source.state()))
        number += 1

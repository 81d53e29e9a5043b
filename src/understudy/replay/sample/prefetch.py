"""Prefetch: batches made ahead by a thread, in a few arrays that are used in turn.

| loop | takes from | blocks on | woken by |
|---|---|---|---|
| caller (`next`) | the queue of full batches | that queue, when it is empty | the filling thread, or its error |
| filling thread | the queue of free batches | that queue, when it is empty | the caller's next `next`, or `close` |

The thread hands every exception on to the caller and ends with it. It ends at `close`, and when its owner is gone.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Iterator
from typing import Any, Protocol

from understudy.core.closeable import Closeable


class Source(Protocol):
    """A Sampler or a Mixture."""

    def follow(self) -> Any: ...

    def make(self) -> Any: ...

    def sample(self, out: Any) -> Any: ...

    def state(self) -> dict[str, Any]: ...


class Prefetch(Closeable):
    """An endless iterator of batches. A batch is the caller's until the next one is asked for."""

    def __init__(self, source: Source, *, depth: int = 2, follow_every: int = 1):
        self._free: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._full: queue.SimpleQueue[Any] = queue.SimpleQueue()
        for _ in range(depth + 1):
            self._free.put(source.make())
        self._state = source.state()
        self._lent: Any = None
        self._ended = False
        loop = threading.Thread(
            target=_fill, args=(source, self._free, self._full, follow_every), name="prefetch", daemon=True
        )
        loop.start()
        self._loop = loop
        self._finalizer = weakref.finalize(self, self._free.put, None)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._ended:
            raise StopIteration
        if self._lent is not None:
            self._free.put(self._lent)
            self._lent = None
        batch, state, error = self._full.get()
        if error is not None:
            self._ended = True
            raise error
        self._lent, self._state = batch, state
        return batch

    def state(self) -> dict[str, Any]:
        """The state of the source after the last batch that was handed out, however far ahead the thread is."""
        return self._state

    def close(self) -> None:
        """End the thread; waits for the batch it is at."""
        self._ended = True
        self._finalizer()
        self._loop.join()


def _fill(source: Source, free: Any, full: Any, follow_every: int) -> None:
    """The filling thread; it holds no reference to its owner."""
    number = 0
    while (batch := free.get()) is not None:
        try:
            if number % follow_every == 0:
                source.follow()
            source.sample(batch)
        except BaseException as error:  # noqa: BLE001 (the outermost of a thread: the caller raises it)
            full.put((None, None, error))
            return
        full.put((batch, source.state(), None))
        number += 1

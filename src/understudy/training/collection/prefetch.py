"""Prefetch: one stream of rollouts that runs in a thread, ahead of who will ask for it.

| loop | takes from | blocks on | woken by |
|---|---|---|---|
| the thread | the stream | the stream | the stream |
| who takes its rollouts | their queue | the queue | the thread |
| `wait`, `close` | - | the thread | its end |
"""

from __future__ import annotations

import concurrent.futures
import queue
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from understudy.training.collection.rollout import Rollout
from understudy.training.collection.task_start_plan import Ticket


class Prefetch:
    """The rollouts of one stream, until somebody takes them."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="prefetch")
        self._tickets: list[Ticket] | None = None  # None if they were taken
        self._finished: queue.SimpleQueue[Rollout | None] = queue.SimpleQueue()  # None is the end
        self._running: Future[None] | None = None

    def begin(self, tickets: Sequence[Ticket], stream: Iterator[Rollout]) -> None:
        """Run the stream of these tickets; what was not taken of an earlier one is dropped."""
        self.wait()
        self._tickets, self._finished = list(tickets), queue.SimpleQueue()
        self._running = self._thread.submit(_run, stream, self._finished)

    def wait(self) -> None:
        """Return when nothing runs any more. An error is raised to who takes the rollouts."""
        if self._running is not None:
            concurrent.futures.wait([self._running])

    def take(self, tickets: Sequence[Ticket]) -> Iterator[Rollout] | None:
        """The rollouts as they are finished, and then the error that ended the stream early, if any.

        None if others run or nothing does; then nothing runs any more.
        """
        if self._running is None or self._tickets != list(tickets):
            self.wait()
            return None
        self._tickets = None
        return _taken(self._finished, self._running)

    def close(self) -> None:
        """Wait for the end of the stream."""
        self._thread.shutdown()


def _run(stream: Iterator[Rollout], finished: queue.SimpleQueue[Rollout | None]) -> None:
    try:
        for rollout in stream:
            finished.put(rollout)
    finally:
        finished.put(None)


def _taken(finished: queue.SimpleQueue[Rollout | None], running: Future[None]) -> Iterator[Rollout]:
    while (rollout := finished.get()) is not None:
        yield rollout
    running.result()

"""Prefetch: one stream of rollouts that runs in a thread, ahead of who will ask for it.

| loop | takes from | blocks on | woken by |
|---|---|---|---|
| the thread | the stream | the stream | the stream |
| `wait`, `take`, `close` | - | the thread | the end of the stream; `close`: its next rollout |
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from understudy.training.collection.rollout import Rollout
from understudy.training.collection.task_start_plan import Ticket


class Prefetch:
    """The rollouts of one stream, until somebody takes them."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="prefetch")
        self._tickets: list[Ticket] = []
        self._finished: list[Rollout] = []
        self._running: Future[None] | None = None
        self._closed = False

    def begin(self, tickets: Sequence[Ticket], stream: Iterator[Rollout]) -> None:
        """Run the stream of these tickets; what was not taken of an earlier one is dropped."""
        self.wait()
        self._tickets, self._finished = list(tickets), []
        self._running = self._thread.submit(self._run, stream)

    def wait(self) -> None:
        """Return when nothing runs any more. An error is raised by `take`."""
        if self._running is not None:
            concurrent.futures.wait([self._running])

    def take(self, tickets: Sequence[Ticket]) -> Iterator[Rollout] | None:
        """The rollouts, if they are those of these tickets; then the error that ended the stream early, if any."""
        self.wait()
        if self._running is None or self._tickets != list(tickets):
            return None
        finished, running = self._finished, self._running
        self._finished, self._running = [], None
        return _taken(finished, running)

    def close(self) -> None:
        """End the stream at its next rollout."""
        self._closed = True
        self._thread.shutdown()

    def _run(self, stream: Iterator[Rollout]) -> None:
        for rollout in stream:
            self._finished.append(rollout)
            if self._closed:
                return


def _taken(finished: Sequence[Rollout], running: Future[None]) -> Iterator[Rollout]:
    yield from finished
    running.result()

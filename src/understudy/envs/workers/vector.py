"""Vector: many workers, each going on by itself; the slowest holds up nobody.

| loop | takes from | blocks on | woken by |
|---|---|---|---|
| `ready`, in the caller | all channels | an answer, or `timeout_s` | a worker; each TICK_S, to look after all |
| each worker's process (process.py) | its channel | the next request; its world | `send` |

with Vector([source] * 8) as vector:
    for slot in range(len(vector)):
        vector.send(slot, Reset(seed=slot))
    while True:
        for slot, outcome in vector.ready(timeout_s=1.0):
            vector.send(slot, next_command(slot, outcome))

Each `send` ends in exactly one outcome. A worker that failed is started again in the meantime, so the Reset that
follows may be sent at once. There is no thread: time-outs and starts happen within `ready`, so call it often.
"""

from __future__ import annotations

import logging
import os
import selectors
import time
from collections.abc import Sequence
from functools import partial

from understudy.core.closeable import Closeable
from understudy.envs.workers.outcomes import Command, Outcome
from understudy.envs.workers.restarting_worker import TICK_S, Limits, Worker
from understudy.envs.world import WorldError
from understudy.envs.world_factory import WorldFactory

logger = logging.getLogger(__name__)


class Vector(Closeable):
    """Workers by slot number. `max_starting` bounds how many build their worlds at once, so that none starves."""

    def __init__(
        self, sources: Sequence[WorldFactory], *, limits: Limits | None = None, max_starting: int | None = None
    ):
        self.max_starting = max(2, os.cpu_count() or 1) if max_starting is None else max_starting
        if not sources or self.max_starting < 1:
            raise WorldError(
                f"vector: expected at least one source and max_starting from 1, got {len(sources)} and {max_starting}"
            )
        self._selector = selectors.DefaultSelector()
        self.workers = tuple(
            Worker(source, limits=limits, name=f"{source.label}[{slot}]", watch=partial(self._watch, slot))
            for slot, source in enumerate(sources)
        )
        self._urgent: set[int] = set()  # to be polled without waiting
        self._next_tick_at = 0.0
        self._closed = False
        self._start_some(time.monotonic())

    def __len__(self) -> int:
        return len(self.workers)

    @property
    def num_pending(self) -> int:
        """Commands that have no outcome yet."""
        return sum(worker.pending for worker in self.workers)

    def start(self) -> None:
        """Wait until all worlds are built, so that their specs are known; raises the first failure."""
        while any(worker.state in ("down", "starting", "hung") for worker in self.workers):
            self._tick([])
            for worker in self.workers:
                if worker.state == "down" and worker.failure is not None:
                    raise worker.failure
            self._selector.select(TICK_S)

    def send(self, slot: int, command: Command) -> None:
        """Ask one worker for something; a slot takes one command at a time. Does not block."""
        worker = self.workers[slot]
        worker.begin(command)
        if worker.failure is not None:
            self._urgent.add(slot)
        elif worker.state == "down":
            self._start_some(time.monotonic())

    def ready(self, timeout_s: float) -> list[tuple[int, Outcome]]:
        """The outcomes that are there, or the first that come within the time; each is given out once."""
        if self._closed:
            raise WorldError("vector: it is closed; make a new one")
        outcomes: list[tuple[int, Outcome]] = []
        deadline = time.monotonic() + timeout_s
        while True:
            now = time.monotonic()
            pause_s = 0.0 if self._urgent or outcomes else max(0.0, min(self._next_tick_at, deadline) - now)
            slots = {key.data for key, _ in self._selector.select(pause_s)} | self._urgent
            self._urgent = set()
            for slot in slots:
                self._poll(slot, outcomes)
            now = time.monotonic()
            if now >= self._next_tick_at:
                self._tick(outcomes)
            if outcomes or now >= deadline:
                return outcomes

    def close(self) -> None:
        """Let all worlds close themselves at the same time, then end all processes."""
        for worker in self.workers:
            worker.close(wait=False)
        for worker in self.workers:
            worker.close()
        self._selector.close()
        self._closed = True

    # --- stages of `ready` ---

    def _poll(self, slot: int, outcomes: list[tuple[int, Outcome]]) -> None:
        outcome = self.workers[slot].poll()
        if outcome is not None:
            outcomes.append((slot, outcome))

    def _tick(self, outcomes: list[tuple[int, Outcome]]) -> None:
        """Look after all workers, and start some of those that are down."""
        given = {slot for slot, _ in outcomes}
        for slot in range(len(self.workers)):
            if slot not in given:
                self._poll(slot, outcomes)
        now = time.monotonic()
        self._start_some(now)
        self._next_tick_at = now + TICK_S

    def _start_some(self, now: float) -> None:
        free = self.max_starting - sum(worker.state == "starting" for worker in self.workers)
        waiting = [worker for worker in self.workers if worker.state == "down" and now >= worker.launch_at]
        # Those that someone waits for go first, then those that have waited longest.
        for worker in sorted(waiting, key=lambda worker: (not worker.pending, worker.launch_at))[: max(0, free)]:
            worker.launch()

    def _watch(self, slot: int, descriptor: int, opened: bool) -> None:
        if opened:
            self._selector.register(descriptor, selectors.EVENT_READ, slot)
        else:
            self._selector.unregister(descriptor)

"""The base of Ray actors that work for long: one thread works while the supervisor polls.

| thread | takes from | blocks on | woken by |
|---|---|---|---|
| `work` | whatever the role works on | that | that |
| Ray's, in `poll` | the status of the process | the end of the work, up to `wait_s` | the work thread |
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import ray

from understudy.cluster.status import Event, RoleStatus
from understudy.processes.stop import Stopped, StopRequest
from understudy.training.runs.health import Health
from understudy.training.runs.stack_dump import dump_stacks


@dataclass(frozen=True, kw_only=True)
class Notice:
    """What a supervisor tells a process with each poll."""

    addresses: Mapping[str, str] = field(default_factory=dict)  # of the shards, by name
    num_actors: int = 1  # actors of RLPD that run now
    stop: bool = False  # whether the run was asked to stop


@dataclass(frozen=True, kw_only=True)
class PollReply:
    """What a process answers. Updates, messages and events are sent once."""

    health: Mapping[str, Any]
    completed: int = 0  # steps, updates or iterations: grows with progress
    updates: Sequence[Any] = ()  # for the progress display of the run
    messages: Sequence[str] = ()  # sentences for the console
    events: Sequence[Event] = ()
    roles: Sequence[RoleStatus] = ()  # processes that this one supervises itself
    counts: Counter[str] = field(default_factory=Counter)  # faults of those
    finished: bool = False
    result: Any = None  # of the work, once it has finished
    stopped: str | None = None  # if it finished because of a stop request: what was saved, in a sentence

    @property
    def idle_s(self) -> float:
        return idle_s(self.health)


class Supervised(Protocol):
    """The supervisor that a process has itself, as far as its status goes."""

    def roles(self) -> list[RoleStatus]: ...

    def totals(self) -> Counter[str]: ...

    def take_events(self) -> list[Event]: ...


class RoleProcess:
    """One Ray actor. A subclass has the methods that are started."""

    def __init__(self, health: Health, *, progress_timeout_s: float):
        self.health = health
        self.supervised: Supervised | None = None
        self._progress_timeout_s = progress_timeout_s
        self._lock = threading.Lock()  # guards updates and messages
        self._updates: list[Any] = []
        self._messages: list[str] = []
        self._finished = threading.Event()
        self._result: Any = None
        self._error: BaseException | None = None
        self._stopped: str | None = None
        self.stop = StopRequest()

    # ---- called by the supervisor

    def location(self) -> tuple[str, int]:
        """The node and the process; answers as soon as Ray has placed this actor."""
        return location()

    def start(self, method: str, *args: Any) -> None:
        """Begin to run a method of this object in a thread; returns at once."""
        self._finished.clear()
        self._result, self._error = None, None
        self.health.progress("starting")
        threading.Thread(target=self._work, args=(method, *args), name="work", daemon=True).start()

    def poll(self, notice: Notice, *, wait_s: float) -> PollReply:
        """Answer after `wait_s`, or as soon as the work has ended; the error that ended it is raised here."""
        if notice.stop:
            self.stop.request()
        self.notified(notice)
        finished = self._finished.wait(wait_s)
        if finished and self._error is not None:
            raise self._error
        health = self.health.now()
        if idle_s(health) > self._progress_timeout_s and not health["stack"]:
            health["stack"] = dump_stacks()
        with self._lock:
            updates, self._updates = self._updates, []
            messages, self._messages = self._messages, []
        own = self.supervised
        return PollReply(
            health=health,
            completed=self.completed(health),
            updates=updates,
            messages=messages,
            events=[] if own is None else own.take_events(),
            roles=[] if own is None else own.roles(),
            counts=Counter() if own is None else own.totals(),
            finished=finished,
            result=self._result if finished else None,
            stopped=self._stopped if finished else None,
        )

    # ---- for subclasses

    def notified(self, notice: Notice) -> None:
        """Take in what the supervisor tells."""

    def completed(self, health: Mapping[str, Any]) -> int:
        """A number that grows with progress: updates of a learner, steps of an actor."""
        return int(health["update"] or health["step"] or 0)

    def report(self, update: Any, *, supersedes: Callable[[Any], bool]) -> None:
        """Send an update with the next reply, in place of the one before it if that is superseded."""
        with self._lock:
            if self._updates and supersedes(self._updates[-1]):
                self._updates.pop()
            self._updates.append(update)

    def say(self, messages: Sequence[str]) -> None:
        with self._lock:
            self._messages += messages

    def _work(self, method: str, *args: Any) -> None:
        try:
            self._result = getattr(self, method)(*args)
        except Stopped as stopped:
            self._stopped = stopped.sentence
        except BaseException as error:  # noqa: BLE001  # a thread has no caller; `poll` raises it
            self._error = error
        self._finished.set()


def location() -> tuple[str, int]:
    """The node and the process that this code runs in."""
    return str(ray.get_runtime_context().get_node_id()), os.getpid()


def idle_s(health: Mapping[str, Any]) -> float:
    """Seconds without progress, by the clock of the process that says so."""
    return float(health["beat_s"]) - float(health["progress_s"])

"""Forks: what a forked process may still use of the objects that its parent had open.

A fork copies memory, but no threads; and a copy of a SQLite connection or a gRPC channel must be neither used nor
closed. So objects that hold one of these `register`, and their `after_fork_in_child` gives up what cannot be shared:
readers and samplers open it again when they are next used, and connections, writers and threads say where they belong.

A fork in the middle of another thread's work would copy that work half done, and SQLite's locks as if they were held
for ever. Therefore such work is done inside `unforked`:

| caller | blocks on | woken by |
|---|---|---|
| the thread that forks | threads inside `unforked` | the last of them to leave; goes on after FORK_WAIT_S |
| a thread that enters `unforked` | a fork that is under way | the end of the fork |
"""

from __future__ import annotations

import concurrent.futures.thread
import ctypes
import logging
import os
import threading
import weakref
from types import TracebackType
from typing import Protocol

from understudy.core import StoreClosedError

# Hooks that run before a fork run in the reverse order of their registration. Those of the two modules above take locks
# that a thread inside `unforked` may need to get out, so they have to be registered first.
_REGISTERED_BEFORE = (logging, concurrent.futures.thread)

FORK_WAIT_S = 60.0


class Forked(Protocol):
    """An object that a forked process gets a copy of."""

    def after_fork_in_child(self) -> None:
        """Give up what belongs to the parent. The only thread is the one that forked; no lock is worth its state."""


def register(owner: Forked) -> None:
    """Have `owner.after_fork_in_child` called in every process that is forked from this one while `owner` lives."""
    _registered.add(owner)


def leave_to_parent(value: object) -> None:
    """Never destroy this process's copy of an object, because destroying it would act on what the parent still uses."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))


def forked_error(what: str, advice: str) -> StoreClosedError:
    """The error of something that cannot be used across a fork."""
    return StoreClosedError(f"{what} belongs to the process that this one was forked from; {advice}")


class _Unforked:
    """A context manager: no fork happens while a thread is inside. Entering and leaving take no lock, because single
    operations on a dict are atomic: either the thread sees that a fork is under way, or the fork sees the thread.

    A thread may enter while it forks or waits here: Python may collect garbage at any moment, and a catalog that nobody
    closed is closed inside. So the lock is one that a thread may take twice.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.RLock())
        self._inside: dict[int, int] = {}  # by thread: how many times it has entered
        self._forking: int | None = None  # the thread that forks

    def __enter__(self) -> None:
        me = threading.get_ident()
        depth = self._inside.get(me, 0)
        self._inside[me] = depth + 1
        if self._forking is not None and not depth and self._forking != me:
            self._wait_for_fork(me)

    def _wait_for_fork(self, me: int) -> None:
        with self._changed:
            del self._inside[me]
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._forking is None)
            self._inside[me] = 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        me = threading.get_ident()
        if self._inside[me] > 1:
            self._inside[me] -= 1
            return
        del self._inside[me]
        if self._forking is not None:
            with self._changed:
                self._changed.notify_all()

    def before_fork(self) -> None:
        me = threading.get_ident()
        self._changed.acquire()
        self._changed.wait_for(lambda: self._forking is None)
        self._forking = me
        self._changed.wait_for(lambda: self._inside.keys() <= {me}, FORK_WAIT_S)

    def after_fork(self) -> None:
        self._forking = None
        self._changed.notify_all()
        self._changed.release()

    def after_fork_in_child(self) -> None:
        me = threading.get_ident()
        self._changed = threading.Condition(threading.RLock())
        self._inside = {me: self._inside[me]} if me in self._inside else {}
        self._forking = None


unforked = _Unforked()
_registered: weakref.WeakSet[Forked] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    unforked.after_fork_in_child()
    for owner in list(_registered):
        owner.after_fork_in_child()


os.register_at_fork(
    before=unforked.before_fork, after_in_parent=unforked.after_fork, after_in_child=_after_fork_in_child
)

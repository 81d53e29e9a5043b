"""gRPC and forks: a forked process has none of gRPC's threads, and gRPC would wait for them for ever.

So a process that was forked while gRPC ran refuses to use it. gRPC runs for up to a second after its last connection or
server was closed; a fork waits for that, so that the new process may connect. If gRPC still runs then, somebody else
uses it, such as Ray that was started later, and the next fork does not wait for the same threads. gRPC's own handlers
of forks are off: if they run in that second, the fork may never return.
"""

from __future__ import annotations

import gc
import os
import time
import weakref
from contextlib import suppress
from pathlib import Path

from understudy.processes import forks

ADVICE = "start this process with multiprocessing's `spawn` or `forkserver`, and connect in it"
SHUTDOWN_WAIT_S = 5.0
POLL_S = 0.01
_TASKS = Path("/proc/self/task")  # only on Linux; elsewhere a fork does not wait
# The threads that gRPC has while it runs, and the one that ends them and holds gRPC's lock until it is through.
_NAMES = ("grpc_global_tim", "event_engine", "lifeguard", "grpc_shutdown")

os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")


class _State:
    """What this process does with gRPC."""

    def __init__(self) -> None:
        self.open: weakref.WeakSet[object] = weakref.WeakSet()  # connections and servers
        self.is_used = False
        self.ran_at_fork = False
        self.refused = False
        self._foreign: frozenset[str] = frozenset()  # threads of another copy of gRPC, such as Ray's
        self._lasting: frozenset[str] = frozenset()  # threads that a fork has waited for in vain

    def use(self, owner: object) -> None:
        check()
        if not self.is_used:
            self.is_used, self._foreign = True, _threads()
        self.open.add(owner)

    @property
    def runs(self) -> bool:
        return bool(self.open) or bool(self._own_threads())

    def _own_threads(self) -> frozenset[str]:
        return _threads() - self._foreign if self.is_used else frozenset()

    def before_fork(self) -> None:
        if not self.open and self._own_threads():
            gc.collect()  # a server that is closed and still garbage keeps gRPC running
            until = time.monotonic() + SHUTDOWN_WAIT_S
            while not self.open and not (threads := self._own_threads()) <= self._lasting:
                if time.monotonic() > until:
                    self._lasting = threads
                time.sleep(POLL_S)
        self.ran_at_fork = self.runs

    def after_fork_in_child(self) -> None:
        self.refused = self.refused or self.ran_at_fork
        self.open.clear()
        self.is_used = False


_state = _State()
os.register_at_fork(before=_state.before_fork, after_in_child=_state.after_fork_in_child)


def use(owner: object) -> None:
    """Call this before `owner` opens a connection or a server; raises in a process that must not."""
    _state.use(owner)


def unuse(owner: object) -> None:
    """`owner` has closed what it opened."""
    _state.open.discard(owner)


def check() -> None:
    """Raise if this process was forked while gRPC ran."""
    if _state.refused:
        raise forks.forked_error("gRPC, which was in use at the fork,", ADVICE)


def _threads() -> frozenset[str]:
    """The ids of gRPC's threads in this process."""
    found = set()
    with suppress(OSError):
        for task in _TASKS.iterdir():
            with suppress(OSError):  # it has ended
                if (task / "comm").read_text().strip() in _NAMES:
                    found.add(task.name)
    return frozenset(found)

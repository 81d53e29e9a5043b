"""Background write: writes to the disk in a thread, one write at a time, while its owner goes on.

    writes = BackgroundWrite("checkpoint")
    writes.start(partial(write, snapshot))     # waits for the write before, if there is one
    ...
    writes.wait()                              # before it is said that something was saved

| caller | blocks on | woken by |
|---|---|---|
| the thread | the disk, and whatever else the write waits for | their end |
| `start`, `wait` | the write under way | its end; every LOOK_S they call `waiting` |

A write that fails is raised, as the cause of a CheckpointError, by the next call of `check`, `start` or `wait`, and by
every one after it. The thread ends with the process: a write that is cut off is one that was killed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from understudy.training.runs.checkpoint import CheckpointError

LOOK_S = 0.5


class BackgroundWrite:
    """Writes of one owner, who calls every method in one thread."""

    def __init__(self, what: str, waiting: Callable[[], None] = lambda: None):
        """`what` is written, for errors; `waiting` is called again and again while the owner waits for a write."""
        self.waited_s = 0.0  # by the owner, in all
        self.is_waiting = False  # the owner, for a write
        self._what, self._waiting = what, waiting
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    @property
    def under_way(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def start(self, write: Callable[[], object]) -> None:
        """Begin a write, after the one before."""
        self.wait()
        self._thread = threading.Thread(target=self._run, args=(write,), name=f"write {self._what}", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise if a write has failed."""
        if self._failure is not None:
            raise CheckpointError(
                f"the last {self._what} was not written: {type(self._failure).__name__}: {self._failure}; those before "
                f"it are intact: mend the cause, such as a full disk, and resume the run"
            ) from self._failure

    def wait(self) -> None:
        """Wait until all that was begun is on the disk; raises if it is not."""
        if self._thread is not None:
            began, self.is_waiting = time.monotonic(), True
            self._thread.join(LOOK_S)
            while self._thread.is_alive():
                self._waiting()
                self._thread.join(LOOK_S)
            self._thread, self.is_waiting = None, False
            self.waited_s += time.monotonic() - began
        self.check()

    def _run(self, write: Callable[[], object]) -> None:
        try:
            write()
        except BaseException as error:  # noqa: BLE001 (raised again by `check`)
            self._failure = error

"""Stop: Ctrl-C and SIGTERM ask a command to stop at its next safe moment; a second signal quits at once.

with stop_on_signals() as stop:   # in the main thread of a command
    while work_is_left:
        stop.check()              # a safe moment: raises Stopped once a signal has arrived
        work()

Whoever catches Stopped saves, adds a sentence about what was saved and how to continue, and raises it again; the
command line prints the sentence. A process without signals of its own (a Ray actor) is stopped with `request`.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

GRACE_S = 10.0  # that an episode in progress has to end
SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(KeyboardInterrupt):
    """A signal ends a command. `sentence` says what was saved, or was not, and how to continue."""

    def __init__(self, number: int = signal.SIGINT, sentence: str = ""):
        super().__init__(sentence)
        self.number = number
        self.sentence = sentence

    @property
    def exit_code(self) -> int:
        """As a shell reports the signal: 130 for Ctrl-C, 143 for SIGTERM."""
        return 128 + self.number

    def __str__(self) -> str:
        return self.sentence


class Stopped(Interrupted):
    """Raised at a safe moment after the first signal."""


class QuitAtOnce(Interrupted):
    """Raised by the second signal, wherever the program is."""


class StopRequest:
    """Whether a command was asked to stop. Any thread may read it or make the request."""

    def __init__(self, *, grace_s: float = GRACE_S, ends_at_once: bool = False):
        """`ends_at_once`: the command has nothing to save, so it says nothing, and a second signal changes nothing."""
        self.describe_unsaved: Callable[[], str] = str  # what a command that quits at once has not saved, in words
        self._grace_s, self._ends_at_once = grace_s, ends_at_once
        self._number = signal.SIGINT
        self._requested_at: float | None = None

    @property
    def requested(self) -> bool:
        return self._requested_at is not None

    @property
    def overdue(self) -> bool:
        """Whether an episode that was in progress at the request has had its time to end."""
        return self._requested_at is not None and time.monotonic() - self._requested_at >= self._grace_s

    def request(self, number: signal.Signals = signal.SIGINT) -> None:
        """Ask the command to stop, as a signal does."""
        if self._requested_at is None:
            self._number, self._requested_at = number, time.monotonic()

    def check(self) -> None:
        """Raise Stopped if a request was made. Call this where the present state can be saved."""
        if self.requested:
            raise self.stopped()

    def check_overdue(self) -> None:
        """Raise Stopped if a request was made and the episode in progress has had its time to end."""
        if self.overdue:
            raise self.stopped()

    def stopped(self) -> Stopped:
        return Stopped(self._number)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        """Make the request; the second time, quit wherever the program is."""
        if self._ends_at_once:
            self.request(signal.Signals(number))
            return
        if self.requested:
            unsaved = self.describe_unsaved()
            raise QuitAtOnce(number, f"quit at once; {unsaved}" if unsaved else "")
        self.request(signal.Signals(number))
        _print("stopping at the next safe moment; a second Ctrl-C quits at once")


@contextmanager
def stop_on_signals(*, grace_s: float = GRACE_S, ends_at_once: bool = False) -> Iterator[StopRequest]:
    """A request that Ctrl-C and SIGTERM make within this block; only the main thread can receive signals."""
    stop = StopRequest(grace_s=grace_s, ends_at_once=ends_at_once)
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.signal(number, stop._on_signal) for number in SIGNALS}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _print(text: str) -> None:
    try:
        print(text, file=sys.stderr, flush=True)
    except (RuntimeError, ValueError, OSError):  # the signal came while something was printed, or nobody reads
        with suppress(OSError):
            os.write(2, f"{text}\n".encode())

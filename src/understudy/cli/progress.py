"""Progress of a long command: one line with what is done, what is left and the time left.

In a terminal the line is redrawn and fits its width; in a log file a line is written each 30 s.

| loop | takes from | blocks on | woken by |
|---|---|---|---|
| the command | - | nothing | - |
| `progress`, a thread | the command's newest numbers | EVERY_S, in a terminal REDRAW_S | the command's end |
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.text import Text

EVERY_S = 30.0  # between two lines in a log file
REDRAW_S = 0.25
MAX_BAR = 24  # columns
MIN_BAR = 6
MOST_STATUS = 100  # letters of one text in a log file


class ProgressLine:
    """Call it with the number that is done, the total and what else to show; `note` prints a line that stays.

    With `threaded` False it is drawn only when it is called: nothing else runs beside what a benchmark measures.
    """

    def __init__(self, console: Console, what: str, unit: str = "", *, threaded: bool = True):
        self.console = console
        self._what, self._unit = what, unit
        self._every_s = EVERY_S
        self._lock = threading.Lock()
        self._began = self._updated = time.monotonic()
        self._first: tuple[float, int] | None = None  # seconds and number of the first call
        self._done = 0
        self._total: int | None = None
        self._status: tuple[str, ...] = ()
        self._written = self._began  # when a log file got its last line
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._redraw, name="progress", daemon=True) if threaded else None
        self._live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None

    def __call__(self, done: int, total: int | None = None, status: str | Sequence[str] = ()) -> None:
        """Show that `done` of `total` are done; of the texts in `status`, as many as fit are shown in a terminal."""
        with self._lock:
            self._updated = time.monotonic()
            if self._first is None or done < self._first[1]:
                self._first = (self._updated, done)
            self._done, self._total = done, total
            self._status = (status,) if isinstance(status, str) else tuple(status)
        if self._thread is None:
            self._show()

    def advance(self, total: int) -> None:
        """Show that one more of `total` is done."""
        self(self._done + 1, total)

    def say(self, text: str) -> None:
        """Show a text beside the same numbers."""
        with self._lock:
            self._status = (text,)
        if self._thread is None:
            self._show()

    def note(self, text: str, style: str | None = None) -> None:
        """Print a line that stays."""
        self.console.print(Text(text, style=style or ""), soft_wrap=True)

    def __enter__(self) -> ProgressLine:
        if self._live is not None:
            self._live.__enter__()
        if self._thread is not None:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
        if self._live is not None:
            self._live.__exit__(kind, error, trace)

    def _redraw(self) -> None:
        wait_s = min(REDRAW_S, self._every_s) if self._live is not None else self._every_s
        while not self._ended.wait(wait_s):
            self._show()

    def _show(self) -> None:
        now = time.monotonic()
        with self._lock:
            left_s = self._left_s(now)
            done, total, status = self._done, self._total, self._status
        if self._live is not None:
            text = terminal_line(
                self._what,
                self._unit,
                done,
                total,
                left_s,
                status,
                width=self.console.width,
                elapsed_s=now - self._began,
            )
            self._live.update(Text(text, no_wrap=True, overflow="crop"), refresh=True)
        elif self._thread is not None or now - self._written >= self._every_s:
            self._written = now
            text = log_line(self._what, self._unit, done, total, left_s, status, elapsed_s=now - self._began)
            self.console.print(Text(text), soft_wrap=True)
            self.console.file.flush()

    def _left_s(self, now: float) -> float | None:
        """Seconds left at the mean speed of this process so far; None if it is not known, as of what follows the last
        of what is counted, such as an evaluation."""
        if self._first is None or self._total is None or not self._first[1] < self._done < self._total:
            return None
        seconds_each = (self._updated - self._first[0]) / (self._done - self._first[1])
        return max((self._total - self._done) * seconds_each - (now - self._updated), 0.0)


def terminal_line(
    what: str,
    unit: str,
    done: int,
    total: int | None,
    left_s: float | None,
    status: Sequence[str],
    *,
    width: int,
    elapsed_s: float,
) -> str:
    """The line of a terminal: numbers and time first, then a bar and whole texts of `status` as far as they fit."""
    parts = [f"{what}: " + _count(done, total, unit, "/"), _clock(elapsed_s)]
    if total is not None and done < total:
        parts.append(f"left {'-' if left_s is None else _clock(left_s)}")
    line, more = ", ".join(part for part in parts if part), [text for text in status if text]
    while more and len(line) + 2 + len(more[0]) < width:
        line += f"; {more.pop(0)}"
    room = width - 1 - len(line) - 1
    if total and room >= MIN_BAR:
        size = min(room, MAX_BAR)
        full = round(size * min(done / total, 1.0))
        line = f"{'━' * full}{'─' * (size - full)} {line}"
    return line if len(line) < width else line[: max(width - 2, 0)] + "…"


def log_line(
    what: str, unit: str, done: int, total: int | None, left_s: float | None, status: Sequence[str], *, elapsed_s: float
) -> str:
    """The line of a log file: everything, in words; a long status is cut."""
    line = f"{what}: {_count(done, total, unit, ' of ')}"
    if total:
        line += f" ({100 * done // total} %)"
    line += f", {_clock(elapsed_s)} so far"
    if left_s is not None:
        line += f", about {_clock(left_s)} left"
    shown = (text if len(text) <= MOST_STATUS else text[:MOST_STATUS] + "…" for text in status if text)
    return "; ".join([line, *shown])


def _count(done: int, total: int | None, unit: str, of: str) -> str:
    if total is None and not done:
        return "at work"
    count = f"{done:,}" if total is None else f"{done:,}{of}{total:,}"
    return f"{count} {unit}".rstrip()


def _clock(seconds: float) -> str:
    """Hours, minutes and seconds as 0:04:10."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"

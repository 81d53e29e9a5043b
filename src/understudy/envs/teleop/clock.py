"""PageClock: what the clock of a page says, told on this process's monotonic clock.

The server asks the page for its time. The answer was given between asking and hearing, so each question bounds the
offset between the clocks; the narrowest of the last ones is believed. A clock that jumps, as after a laptop slept,
contradicts it, and everything said before is forgotten.
"""

from __future__ import annotations

from collections import deque

WINDOW = 32  # questions that are remembered


class PageClock:
    """The offset to one page's clock, from questions and answers."""

    def __init__(self) -> None:
        self._bounds: deque[tuple[float, float]] = deque(maxlen=WINDOW)  # least and greatest offset, page - here
        self._round_trip_s = 0.0

    @property
    def known(self) -> bool:
        return bool(self._bounds)

    @property
    def round_trip_s(self) -> float:
        """Of the last question."""
        return self._round_trip_s

    @property
    def error_s(self) -> float:
        """How far off a told time can be, if the clocks run evenly."""
        low, high = self._best()
        return (high - low) / 2

    def answered(self, *, asked_s: float, page_s: float, heard_s: float) -> None:
        """A question was asked and its answer heard, here; in between the page's clock showed `page_s`."""
        low, high = page_s - heard_s, page_s - asked_s
        if self._bounds:
            best_low, best_high = self._best()
            if high < best_low or low > best_high:
                self._bounds.clear()
        self._bounds.append((low, high))
        self._round_trip_s = heard_s - asked_s

    def here(self, page_s: float) -> float:
        """A moment of the page's clock on this one."""
        low, high = self._best()
        return page_s - (low + high) / 2

    def _best(self) -> tuple[float, float]:
        return min(self._bounds, key=lambda bounds: bounds[1] - bounds[0])

"""PageClock: converts times of a page's clock to this process's monotonic clock.

The server pings the page for its time. The page replied between sending and receiving, so each ping bounds the offset
of the clocks; the narrowest bound of the last pings is used. A reply outside that bound means that the page's clock
jumped, for example because the laptop slept; then all earlier bounds are dropped.
"""

from __future__ import annotations

from collections import deque

WINDOW = 32  # pings that are remembered


class PageClock:
    """The offset to one page's clock, estimated from pings."""

    def __init__(self) -> None:
        self._bounds: deque[tuple[float, float]] = deque(maxlen=WINDOW)  # least and greatest offset, page - local
        self._round_trip_s = 0.0

    @property
    def known(self) -> bool:
        return bool(self._bounds)

    @property
    def round_trip_s(self) -> float:
        """Of the last ping."""
        return self._round_trip_s

    @property
    def error_s(self) -> float:
        """Largest error of a converted time, if both clocks run at the same rate."""
        low, high = self._best()
        return (high - low) / 2

    def add_reply(self, *, sent_s: float, page_s: float, received_s: float) -> None:
        """A ping was sent and its reply received at these local times; the page's clock showed `page_s` in between."""
        low, high = page_s - received_s, page_s - sent_s
        if self._bounds:
            best_low, best_high = self._best()
            if high < best_low or low > best_high:
                self._bounds.clear()
        self._bounds.append((low, high))
        self._round_trip_s = received_s - sent_s

    def to_local(self, page_s: float) -> float:
        """Convert a time of the page's clock to the local one."""
        low, high = self._best()
        return page_s - (low + high) / 2

    def _best(self) -> tuple[float, float]:
        return min(self._bounds, key=lambda bounds: bounds[1] - bounds[0])

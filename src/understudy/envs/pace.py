"""Pace: keeps a control loop at a fixed rate, and measures how well it was kept.

pace = Pace(20)
pace.begin()
while acting:
    step()
    pace.wait()
print(pace.report)
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

import numpy as np

from understudy.envs.world import WorldError

NUM_LATENESSES = 100_000  # of the last ticks, for the percentiles


@dataclass(frozen=True, kw_only=True)
class PaceReport:
    """How late the ticks were, in seconds. A deadline is missed when a step takes longer than the period."""

    hz: float  # requested rate
    num_ticks: int
    rate: float  # measured rate, in Hz
    late_p50_s: float
    late_p99_s: float
    late_max_s: float
    num_missed: int

    def __str__(self) -> str:
        return (
            f"{self.rate:.1f} of {self.hz:g} Hz over {self.num_ticks} ticks; late p50 {self.late_p50_s * 1e3:.2f} ms, "
            f"p99 {self.late_p99_s * 1e3:.2f} ms, max {self.late_max_s * 1e3:.2f} ms; "
            f"{self.num_missed} deadlines missed"
        )


class Pace:
    """Waits for the next tick of a clock that does not drift. Not thread-safe."""

    def __init__(self, hz: float):
        if not 0 < hz <= 10_000:
            raise WorldError(f"hz: expected a rate above 0 and up to 10000, got {hz:g}; 10 and 20 are usual")
        self.hz = hz
        self._period_s = 1.0 / hz
        self._late: deque[float] = deque(maxlen=NUM_LATENESSES)
        self._late_max_s = 0.0
        self._num_ticks = 0
        self._num_missed = 0
        self._ran_s = 0.0
        self._last_at = self._next_at = 0.0
        self.begin()

    def begin(self) -> None:
        """Restart the clock at the beginning of an episode or after a pause: the next tick is one period from now."""
        self._last_at = time.monotonic()
        self._next_at = self._last_at + self._period_s

    @property
    def remaining_s(self) -> float:
        """Seconds until the next tick; negative when it has passed."""
        return self._next_at - time.monotonic()

    def wait(self) -> None:
        """Sleep until the next tick. If it has passed, count a miss, return at once and restart the clock."""
        now = time.monotonic()
        due = self._next_at
        if now > due:
            self._num_missed += 1
            self._next_at = now
        else:
            time.sleep(due - now)
            now = time.monotonic()
        self._late.append(now - due)
        self._late_max_s = max(self._late_max_s, now - due)
        self._num_ticks += 1
        self._ran_s += now - self._last_at
        self._last_at = now
        self._next_at += self._period_s

    @property
    def num_missed(self) -> int:
        """Ticks that had passed when the step before them ended."""
        return self._num_missed

    @property
    def report(self) -> PaceReport:
        p50, p99 = np.percentile(np.array(self._late or [0.0]), (50, 99)).tolist()
        return PaceReport(
            hz=self.hz,
            num_ticks=self._num_ticks,
            rate=self._num_ticks / self._ran_s if self._ran_s else 0.0,
            late_p50_s=p50,
            late_p99_s=p99,
            late_max_s=self._late_max_s,
            num_missed=self._num_missed,
        )

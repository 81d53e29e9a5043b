"""Control: the loop between what clients ask for and the arm. Nothing but this loop touches the arm.

| loop | takes from | blocks on | woken by |
|---|---|---|---|
| `control`, one thread | the wish, orders | sleep; an order that the arm takes its time for | the clock |

A wish lives as long as its client shows that it lives. When that ends, the commanded pose stays where it has got to, at
most `max_lag_m` ahead of the arm.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np

from understudy.core import UnderstudyError
from understudy.robots.arm import Arm, ArmError, ArmState, Array
from understudy.robots.guard import Guard

logger = logging.getLogger(__name__)

NUM_LATENESSES = 4000  # kept for the report
MOST_TICKS_AT_ONCE = 2  # a loop that was late moves the commanded pose by no more than this


class BusyError(ArmError):
    """Not now: another client has the arm, it was stopped, or it is in an error state."""


@dataclass(frozen=True, kw_only=True)
class Health:
    """How the control loop is doing, since it began; lateness of the last few thousand ticks."""

    rate_hz: float  # wanted
    measured_hz: float
    num_ticks: int
    num_missed: int  # ticks that came a whole period late or more
    late_p50_s: float
    late_p99_s: float
    late_max_s: float
    num_expired: int  # wishes whose client fell silent before the arm was there
    engaged: bool
    fault: str | None
    client: str | None  # who has the arm


class Control:
    """Drives an arm from `start` to `stop`."""

    def __init__(self, arm: Arm, *, rate_hz: float = 200.0):
        if not 10 <= rate_hz <= 1000:
            raise ArmError(f"rate_hz: expected 10 to 1000, got {rate_hz:g}; 200 is usual")
        self.arm = arm
        self.guard = Guard(arm.limits, arm.home)
        self.rate_hz = rate_hz
        self.state: ArmState = arm.state()
        self._commanded = self.state.pose.copy()
        self._lock = threading.Lock()  # of what follows
        self._wish: Array | None = None
        self._client = ""
        self._beat_at = -np.inf
        self._engaged = True
        self._fault: str | None = None
        self._orders: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        self._late: deque[float] = deque(maxlen=NUM_LATENESSES)
        self._num_ticks = self._num_missed = self._num_expired = 0
        self._began_at = time.monotonic()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="control", daemon=True)

    # --- what clients ask for; none of it waits ---

    def aim(self, pose: Array, client: str) -> None:
        """Make a pose the wish of a client."""
        with self._lock:
            self._take(client)
            self._wish = self.guard.clamped(pose)

    def beat(self, client: str, *, quietly: bool = False) -> None:
        """A sign of life. Quietly: that of somebody else is not an error, and counts for nothing."""
        with self._lock:
            if quietly and client != self._client:
                return
            self._take(client)

    def order(self, what: Callable[[], Any], client: str | None = None) -> Future[Any]:
        """Have something done to the arm by the loop. A client's order is also a sign of its life."""
        if client is not None:
            with self._lock:
                self._take(client)
        future: Future[Any] = Future()
        self._orders.put((what, future))
        return future

    def engage(self, on: bool) -> None:
        """Take wishes, or take none and stand still; anyone may stop the arm."""
        with self._lock:
            self._engaged, self._wish = on, None

    def clear(self) -> Future[Any]:
        """Have the arm recover, and forget the fault."""
        return self.order(self._recover)

    def _take(self, client: str) -> None:
        now = time.monotonic()
        if self._fault is not None:
            raise BusyError(f"the arm is stopped: {self._fault}; look at it, then POST /clearerr")
        if not self._engaged:
            raise BusyError("the arm is stopped; POST /startimp first")
        if client != self._client and self._wish is not None and now - self._beat_at <= self.arm.limits.heartbeat_s:
            raise BusyError(
                f"client {self._client or 'without a name'!r} has the arm; "
                f"wait until it has been silent for {self.arm.limits.heartbeat_s:g} s"
            )
        if client != self._client:
            self._client, self._wish = client, None
        self._beat_at = now

    # --- lifecycle ---

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    @property
    def health(self) -> Health:
        late = np.array(list(self._late) or [0.0])
        p50, p99 = np.percentile(late, (50, 99)).tolist()
        with self._lock:
            return Health(
                rate_hz=self.rate_hz,
                measured_hz=self._num_ticks / (time.monotonic() - self._began_at),
                num_ticks=self._num_ticks,
                num_missed=self._num_missed,
                late_p50_s=p50,
                late_p99_s=p99,
                late_max_s=float(late.max()),
                num_expired=self._num_expired,
                engaged=self._engaged,
                fault=self._fault,
                client=self._client if self._wish is not None else None,
            )

    # --- the loop ---

    def _run(self) -> None:
        period = 1.0 / self.rate_hz
        self._began_at = last = due = time.monotonic()
        while not self._stop.is_set():
            now = time.monotonic()
            if now < due:
                time.sleep(due - now)
                now = time.monotonic()
            self._late.append(now - due)
            self._num_ticks += 1
            if now - due >= period:
                self._num_missed += 1
                due = now
            due += period
            try:
                self._tick(now, min(now - last, MOST_TICKS_AT_ONCE * period))
            except Exception as error:  # noqa: BLE001 (whatever the arm raises, clients are told and the loop goes on)
                self._fail(str(error) if isinstance(error, UnderstudyError) else repr(error))
            last = now
            self._obey()

    def _tick(self, now: float, dt_s: float) -> None:
        self.state = state = self.arm.state()
        objection = self.guard.objection(state)
        if objection is not None:
            self._fail(objection)
        with self._lock:
            if self._wish is not None and now - self._beat_at > self.arm.limits.heartbeat_s:
                self._wish = None
                self._num_expired += 1
            wish = self._wish
        if np.isfinite(state.pose).all():
            self._commanded = self.guard.next(self._commanded, wish, state.pose, dt_s)
            self.arm.move(self._commanded)

    def _fail(self, why: str) -> None:
        with self._lock:
            self._wish = None
            if self._fault is None:
                self._fault = why
                logger.warning("stopped: %s", why)

    def _recover(self) -> None:
        self.arm.recover()
        with self._lock:
            self._fault = None

    def _obey(self) -> None:
        while True:
            try:
                what, future = self._orders.get_nowait()
            except queue.Empty:
                return
            try:
                future.set_result(what())
            except Exception as error:  # noqa: BLE001 (the arm's own; whoever gave the order is told)
                future.set_exception(error if isinstance(error, ArmError) else ArmError(f"the arm failed: {error!r}"))

"""Control: the loop that drives the arm to the target of a client. Only this loop calls the arm.

| loop | takes from | blocks on | woken by |
|---|---|---|---|
| `control`, one thread | the target, queued commands | sleep; a command that takes the arm long | the clock |

A target is dropped when its client sends no heartbeat for `heartbeat_s`. The commanded pose then stays where it is, at
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

LATENESS_WINDOW = 4000  # ticks over which lateness is reported
MAX_TICKS_AT_ONCE = 2  # a loop that was late moves the commanded pose by no more than this
HISTORY_S = 10.0  # of what was measured, kept for clients that want all of it


class BusyError(ArmError):
    """The arm cannot be driven now: another client has it, it was stopped, or it is in an error state."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Measurement:
    """What the arm measured in one tick of the control loop."""

    tick: int
    monotonic_s: float
    state: ArmState

    @property
    def age_s(self) -> float:
        return time.monotonic() - self.monotonic_s


@dataclass(frozen=True, kw_only=True)
class ControlHealth:
    """How the control loop has run since it started; lateness is that of the last LATENESS_WINDOW ticks."""

    rate_hz: float  # requested
    measured_hz: float
    num_ticks: int
    num_missed: int  # ticks that came a whole period late or more
    late_p50_s: float
    late_p99_s: float
    late_max_s: float
    num_expired: int  # targets whose client fell silent before the arm reached them
    engaged: bool
    fault: str | None
    client: str | None  # the one that drives the arm


class Control:
    """Drives an arm from `start` to `stop`."""

    def __init__(self, arm: Arm, *, rate_hz: float = 200.0):
        if not 10 <= rate_hz <= 1000:
            raise ArmError(f"rate_hz: expected 10 to 1000, got {rate_hz:g}; 200 is usual")
        self.arm = arm
        self.guard = Guard(arm.limits, arm.home)
        self.rate_hz = rate_hz
        self.measured = Measurement(tick=0, monotonic_s=time.monotonic(), state=arm.state())
        self._history: deque[Measurement] = deque([self.measured], maxlen=round(HISTORY_S * rate_hz))
        self._commanded = self.measured.state.pose.copy()
        self._lock = threading.Lock()  # guards the attributes below
        self._target: Array | None = None
        self._client = ""
        self._heartbeat_at = -np.inf
        self._engaged = True
        self._fault: str | None = None
        self._commands: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        self._late: deque[float] = deque(maxlen=LATENESS_WINDOW)
        self._num_ticks = self._num_missed = self._num_expired = 0
        self._began_at = time.monotonic()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="control", daemon=True)

    # --- called for clients; none of these blocks ---

    @property
    def state(self) -> ArmState:
        return self.measured.state

    def measured_after(self, tick: int) -> list[Measurement]:
        """What was measured after a tick, in order; of the last HISTORY_S seconds."""
        with self._lock:
            return [measured for measured in self._history if measured.tick > tick]

    def set_target(self, pose: Array, client: str) -> None:
        """Drive to this pose [7] for a client, as long as it sends heartbeats."""
        with self._lock:
            self._acquire(client)
            self._target = self.guard.clamp(pose)

    def heartbeat(self, client: str, *, only_owner: bool = False) -> None:
        """Keep the client's target alive. With `only_owner`, the call of any other client is ignored, not refused."""
        with self._lock:
            if only_owner and client != self._client:
                return
            self._acquire(client)

    def submit(self, command: Callable[[], Any], client: str | None = None) -> Future[Any]:
        """Run a command on the arm in the control loop; counts as a heartbeat of the client, if one is given."""
        if client is not None:
            with self._lock:
                self._acquire(client)
        future: Future[Any] = Future()
        self._commands.put((command, future))
        return future

    def engage(self) -> None:
        """Accept targets again after `disengage`."""
        with self._lock:
            self._engaged, self._target = True, None

    def disengage(self) -> None:
        """Drop the target, stand still and refuse new targets; any client may do this."""
        with self._lock:
            self._engaged, self._target = False, None

    def clear(self) -> Future[Any]:
        """Let the arm leave its error state, and clear the fault."""
        return self.submit(self._recover)

    def _acquire(self, client: str) -> None:
        now = time.monotonic()
        if self._fault is not None:
            raise BusyError(f"the arm is stopped: {self._fault}; look at it, then POST /clearerr")
        if not self._engaged:
            raise BusyError("the arm is stopped; POST /startimp first")
        if (
            client != self._client
            and self._target is not None
            and now - self._heartbeat_at <= self.arm.limits.heartbeat_s
        ):
            raise BusyError(
                f"client {self._client or 'without a name'!r} has the arm; "
                f"wait until it has been silent for {self.arm.limits.heartbeat_s:g} s"
            )
        if client != self._client:
            self._client, self._target = client, None
        self._heartbeat_at = now

    # --- lifecycle ---

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    @property
    def health(self) -> ControlHealth:
        late = np.array(list(self._late) or [0.0])
        p50, p99 = np.percentile(late, (50, 99)).tolist()
        with self._lock:
            return ControlHealth(
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
                client=self._client if self._target is not None else None,
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
                self._tick(now, min(now - last, MAX_TICKS_AT_ONCE * period))
            except Exception as error:  # noqa: BLE001 (an error of the arm becomes the fault that clients see)
                self._fail(str(error) if isinstance(error, UnderstudyError) else repr(error))
            last = now
            self._run_commands()

    def _tick(self, now: float, dt_s: float) -> None:
        state = self.arm.state()
        self.measured = Measurement(tick=self._num_ticks, monotonic_s=now, state=state)
        violation = self.guard.violation(state)
        if violation is not None:
            self._fail(violation)
        with self._lock:
            self._history.append(self.measured)
            if self._target is not None and now - self._heartbeat_at > self.arm.limits.heartbeat_s:
                self._target = None
                self._num_expired += 1
            target = self._target
        if np.isfinite(state.pose).all():
            self._commanded = self.guard.next(self._commanded, target, state.pose, dt_s)
            self.arm.move(self._commanded)

    def _fail(self, reason: str) -> None:
        with self._lock:
            self._target = None
            if self._fault is None:
                self._fault = reason
                logger.warning("stopped: %s", reason)

    def _recover(self) -> None:
        self.arm.recover()
        with self._lock:
            self._fault = None

    def _run_commands(self) -> None:
        while True:
            try:
                command, future = self._commands.get_nowait()
            except queue.Empty:
                return
            try:
                future.set_result(command())
            except Exception as error:  # noqa: BLE001 (an error of the arm; the caller gets it)
                future.set_exception(error if isinstance(error, ArmError) else ArmError(f"the arm failed: {error!r}"))

"""OperatorInput: the latest input of a teleoperation device, until it expires, as the control loop reads it.

What a device reports expires: a hand that is not heard of for `expiry_s` has let go. A short tap that nobody read is
kept until the next reading, so that it is not lost between two steps. Any thread may call.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping

from understudy.core import Tree
from understudy.core.spec import describe
from understudy.envs.teleop.axes import Axes, DeviceError
from understudy.envs.teleop.takeover import Reading

EXPIRY_S = 0.3


class OperatorInput:
    """One pair of hands on one set of axes.

    `to_the_end`: from the first act of an episode the person is in control to its end, and what is not pushed rests.
    Otherwise the person is in control while something is pushed or held.
    """

    def __init__(self, axes: Axes, *, expiry_s: float = EXPIRY_S, to_the_end: bool = False):
        if not 0.05 <= expiry_s <= 5.0:
            raise DeviceError(f"expiry_s: expected 0.05 to 5 seconds, got {describe(expiry_s)}; 0.3 is usual")
        self._axes = axes
        self._expiry_s = expiry_s
        self._to_the_end = to_the_end
        self._lock = threading.Lock()
        self._pushes: Mapping[str, float] = {}
        self._active = False  # as last reported; it may have expired since
        self._closed = False
        self._toggled = False  # by the person, and not read yet
        self._heard_s = float("-inf")  # when the newest report was made
        self._changed_s: float | None = None  # when the oldest change was made that is not executed yet
        self._tap: tuple[Mapping[str, float], float] | None = None  # pushes let go of before they were read; made when
        self._verdict: bool | None = None
        self._begun = False  # the person has acted in this episode
        self._read: Mapping[str, float] = {}  # pushes of the last reading
        self._latency_s: float | None = None

    @property
    def driving(self) -> bool:
        """Whether the person is in control now."""
        held = self._active and time.monotonic() - self._heard_s <= self._expiry_s
        return held or (self._to_the_end and self._begun)

    @property
    def pushes(self) -> Mapping[str, float]:
        """What the last reading was made of."""
        return self._read

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def latency_s(self) -> float | None:
        """From the last change of the person's hands to its reading."""
        return self._latency_s

    # --- what a device reports

    def put(self, pushes: Mapping[str, float], *, active: bool, made_s: float) -> bool:
        """The hands as they were at `made_s` on the monotonic clock; repeated while they are held.

        False if that is too long ago: then, whatever it says, nothing is held now.
        """
        with self._lock:
            changed = active and (not self._active or pushes != self._pushes)
            if changed and (self._changed_s is None or (not self._active and self._tap is None)):
                self._changed_s = made_s
            if self._active and not active and self._changed_s is not None:
                self._tap = (self._pushes, made_s)
            self._pushes, self._active, self._heard_s = dict(pushes), active, made_s
            return time.monotonic() - made_s < self._expiry_s

    def release(self) -> None:
        """The hands are off, for whatever reason; nothing they did before counts."""
        with self._lock:
            self._pushes, self._active = {}, False
            self._changed_s = self._tap = None

    def toggle_grip(self) -> None:
        with self._lock:
            self._closed, self._toggled = not self._closed, True

    def mark_outcome(self, success: bool) -> None:
        """The person says that the episode succeeded, or failed."""
        with self._lock:
            self._verdict = success

    def follow(self, action: Tree) -> None:
        """Somebody else acted: the grip is as they left it, so that taking over drops nothing."""
        with self._lock:
            if self._axes.has_grip and not self._toggled:
                self._closed = self._axes.closed(action)

    # --- what the control loop calls

    def begin(self) -> None:
        """An episode begins: with open fingers, and nothing said about it."""
        with self._lock:
            self._verdict, self._closed = None, False
            self._changed_s = self._tap = None
            self._begun = False

    def read(self) -> Reading:
        with self._lock:
            now_s = time.monotonic()
            self._toggled = False
            pushes, active, heard_s = self._pushes, self._active, self._heard_s
            if self._tap is not None and not active:
                (pushes, heard_s), active = self._tap, True
            active = active and now_s - heard_s <= self._expiry_s
            made_s = self._changed_s if active else None
            if active or not self._active:  # else it is held, but long on its way, and not executed yet
                self._changed_s = self._tap = None
            if not active:
                pushes, active = {}, self._to_the_end and self._begun
            verdict, self._verdict = self._verdict, None
            self._begun, self._read = self._begun or active, pushes
            if not active:
                return Reading(verdict=verdict)
            if made_s is not None:
                self._latency_s = now_s - made_s
            return Reading(action=self._axes.action(pushes, closed=self._closed), since_s=made_s, verdict=verdict)

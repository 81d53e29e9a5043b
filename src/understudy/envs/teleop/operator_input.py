"""OperatorInput: the latest input of a teleoperation device, as the control loop reads it.

Input expires: after `expiry_s` without a report, the device counts as released. A tap shorter than a control step is
kept until the next reading, so that it is not lost. Any thread may call.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Mapping
from typing import Literal, TypeAlias

from understudy.core import Tree
from understudy.core.spec import describe
from understudy.envs.teleop.axes import Axes, DeviceError
from understudy.envs.teleop.takeover import Reading

EXPIRY_S = 0.3

InputEvent: TypeAlias = Literal["grip", "success", "failure", "discard"]  # the operator gives a command


class OperatorInput:
    """The input of one operator for one action.

    With `to_the_end`, the operator stays in control from the first input to the end of the episode, and axes that are
    not pushed rest. Otherwise the operator is in control only while something is pushed or held.
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
        self._toggled = False  # by the operator, and not read yet
        self._reported_s = float("-inf")  # when the newest report was made
        self._changed_s: float | None = None  # when the oldest change was made that was not read yet
        self._tap: tuple[Mapping[str, float], float] | None = None  # pushes released unread, and their time
        self._verdict: bool | None = None
        self._discard = False
        self._begun = False  # the operator has acted in this episode
        self._read: Mapping[str, float] = {}  # pushes of the last reading
        self._latency_s: float | None = None

    @property
    def to_the_end(self) -> bool:
        """Whether the operator stays in control to the end of the episode: it is a demonstration."""
        return self._to_the_end

    @property
    def driving(self) -> bool:
        """Whether the operator is in control now."""
        held = self._active and time.monotonic() - self._reported_s <= self._expiry_s
        return held or (self._to_the_end and self._begun)

    @property
    def pushes(self) -> Mapping[str, float]:
        """The pushes of the last reading."""
        return self._read

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def latency_s(self) -> float | None:
        """From the last change of the input to its reading."""
        return self._latency_s

    # --- called by the device

    def put(
        self, pushes: Mapping[str, float], *, active: bool, made_s: float, events: Collection[InputEvent] = ()
    ) -> None:
        """Report the input as it was at `made_s` on the monotonic clock, with what happened since the last report;
        repeat it while something is held.

        A report older than `expiry_s` counts as released, and its events are dropped.
        """
        with self._lock:
            changed = active and (not self._active or pushes != self._pushes)
            if changed and (self._changed_s is None or (not self._active and self._tap is None)):
                self._changed_s = made_s
            if self._active and not active and self._changed_s is not None:
                self._tap = (self._pushes, made_s)
            self._pushes, self._active, self._reported_s = dict(pushes), active, made_s
            if time.monotonic() - made_s < self._expiry_s:
                for event in events:
                    self._apply(event)

    def release(self) -> None:
        """Drop all input that was not read yet: the device is released or gone."""
        with self._lock:
            self._pushes, self._active = {}, False
            self._changed_s = self._tap = None

    def _apply(self, event: InputEvent) -> None:
        if event == "grip":
            self._closed, self._toggled = not self._closed, True
        elif event == "discard":
            self._discard = self._to_the_end and self._begun
        else:
            self._verdict = event == "success"

    def follow_grip(self, action: Tree) -> None:
        """Take over the grip of an action of the policy, so that a takeover does not drop the object."""
        with self._lock:
            if self._axes.has_grip and not self._toggled:
                self._closed = self._axes.closed(action)

    # --- called by the control loop

    def begin(self) -> None:
        """An episode begins: the grip is open, and there is no verdict."""
        with self._lock:
            self._verdict, self._closed, self._discard = None, False, False
            self._changed_s = self._tap = None
            self._begun = False

    def read(self) -> Reading:
        with self._lock:
            now_s = time.monotonic()
            self._toggled = False
            pushes, active, reported_s = self._pushes, self._active, self._reported_s
            if self._tap is not None and not active:
                (pushes, reported_s), active = self._tap, True
            active = active and now_s - reported_s <= self._expiry_s
            made_s = self._changed_s if active else None
            if active or not self._active:  # otherwise it is held, but its reports arrive too late
                self._changed_s = self._tap = None
            if not active:
                pushes, active = {}, self._to_the_end and self._begun
            verdict, self._verdict = self._verdict, None
            self._begun, self._read = self._begun or active, pushes
            if not active:
                return Reading(verdict=verdict)
            if made_s is not None:
                self._latency_s = now_s - made_s
            discard, self._discard = self._discard, False
            return Reading(
                action=self._axes.action(pushes, closed=self._closed), since_s=made_s, verdict=verdict, discard=discard
            )

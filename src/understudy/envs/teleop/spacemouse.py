"""SpaceMouseDevice: a 3Dconnexion SpaceMouse; pushing or turning its cap takes over from the policy.

    loop              takes from        blocks on          woken by
    control loop      OperatorInput     nothing            -
    reading thread    the USB device    5 ms at a time     its own clock

The cap reports many times a second while it is pushed, and once when it is back at rest. If the reports stop without
that, because the cable was pulled or the battery is empty, the last report expires.
"""

from __future__ import annotations

import importlib
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from understudy.core import Source, StepSpec
from understudy.core.closeable import Closeable
from understudy.core.spec import describe
from understudy.envs.teleop.axes import Axes, DeviceError
from understudy.envs.teleop.key_bindings import past_dead_zone
from understudy.envs.teleop.operator_input import EXPIRY_S, InputEvent, OperatorInput
from understudy.envs.teleop.takeover import Reading

CAP = ("x", "y", "z", "roll", "pitch", "yaw")  # right, away, up; and rotations about these by the right-hand rule
POLL_S = 0.005
LONG_PRESS_S = 1.0


class SpaceMouseDevice(Closeable):
    """A SpaceMouse, read from construction to `close`.

    The cap pushes the axes of the action that have the names in CAP. The first button toggles the grip. The operator is
    in control while the cap is pushed beyond `dead_zone` or the first button is pressed. A short press of the second
    button marks the episode as a success, one of a second or more as a failure. `speed` (up to 1) is the size of a full
    push. `names`, `high_closes`, `expiry_s` and `to_the_end` are as in BrowserDevice.
    """

    source = Source.HUMAN

    def __init__(
        self,
        step_spec: StepSpec,
        *,
        names: Sequence[str] | None = None,
        high_closes: bool = True,
        speed: float = 0.5,
        dead_zone: float = 0.1,
        expiry_s: float = EXPIRY_S,
        to_the_end: bool = False,
    ):
        if not 0 < speed <= 1:
            raise DeviceError(f"speed: expected more than 0 and up to 1, got {describe(speed)}")
        if not 0 <= dead_zone < 1:
            raise DeviceError(f"dead_zone: expected 0 or more and less than 1, got {describe(dead_zone)}")
        self._axes = Axes.of(step_spec.action, names=names, high_closes=high_closes)
        if not set(self._axes.names) & set(CAP):
            raise DeviceError(f"names: expected some of {', '.join(CAP)}, got {', '.join(self._axes.names)}")
        self._speed, self._dead_zone = speed, dead_zone
        self._operator_input = OperatorInput(self._axes, expiry_s=expiry_s, to_the_end=to_the_end)
        self._mouse = _open()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._read_reports, name="spacemouse", daemon=True)
        self._thread.start()

    @property
    def connected(self) -> bool:
        """Whether the device can still be read."""
        return self._thread.is_alive()

    def begin(self) -> None:
        """An episode begins: the grip counts as open."""
        self._operator_input.begin()

    def read(self) -> Reading:
        return self._operator_input.read()

    def close(self) -> None:
        self._ended.set()
        self._thread.join()
        self._mouse.close()
        self._operator_input.release()

    def _read_reports(self) -> None:
        """Pass every report to the OperatorInput until the device is gone."""
        report_s = -1.0
        before, pressed_s = (False, False), 0.0
        gone = _hid_error()
        while not self._ended.is_set():
            try:
                state = self._mouse.read()  # the next report, or the last state if there is none
            except gone:
                return
            if state.t == report_s:
                self._ended.wait(POLL_S)
                continue
            report_s, now_s = state.t, time.monotonic()
            grip, verdict = map(bool, [*state.buttons, 0, 0][:2])
            events: list[InputEvent] = ["grip"] if grip and not before[0] else []
            if verdict and not before[1]:
                pressed_s = now_s
            if before[1] and not verdict:
                events.append("success" if now_s - pressed_s < LONG_PRESS_S else "failure")
            before = grip, verdict
            cap = {name: getattr(state, name) for name in CAP}
            pushed = pushes(cap, self._axes, dead_zone=self._dead_zone, speed=self._speed)
            active = any(pushed.values()) or (grip and self._axes.has_grip)
            self._operator_input.put(pushed, active=active, made_s=now_s, events=events)


def pushes(cap: Mapping[str, float], axes: Axes, *, dead_zone: float, speed: float) -> dict[str, float]:
    """How far the cap pushes each axis of the action; the values of `cap` are from -1 to 1."""
    return {name: speed * past_dead_zone(cap[name], dead_zone) for name in axes.pushed if name in CAP}


def _open() -> Any:
    try:
        library = importlib.import_module("pyspacemouse")
    except (ImportError, OSError) as error:
        raise DeviceError(
            f"a SpaceMouse needs pyspacemouse ({error}); run `pip install 'understudy-robotics[spacemouse]'`"
        ) from None
    try:
        return library.open(axis_convention=library.AxisConvention.HID_Z_UP)
    except (RuntimeError, AttributeError, OSError) as error:
        raise DeviceError(
            f"no SpaceMouse can be opened ({error}); plug it in, install libhidapi-hidraw0, and let users read it: "
            f"the udev rule is in docs/teleoperation.md"
        ) from None


def _hid_error() -> type[Exception]:
    found: type[Exception] = importlib.import_module("easyhid").HIDException
    return found

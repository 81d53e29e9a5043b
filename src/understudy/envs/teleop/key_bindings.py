"""KeyBindings: which key, stick or button pushes which axis, or gives which command.

The page only reports what is held. Keys have the names of `KeyboardEvent.code` (a position on the keyboard, whatever
its letter); the parts of a gamepad are those of the standard layout of the Gamepad API.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from understudy.envs.teleop.axes import Axes, DeviceError
from understudy.envs.teleop.operator_input import InputEvent

SPEEDS = {"Digit1": 0.25, "Digit2": 0.5, "Digit3": 1.0}
HOLD, TOGGLE, SUCCESS, FAILURE = "Space", "KeyG", "Enter", "Backspace"
DISCARD = "Digit0"  # far from the keys that move
DEAD_ZONE = 0.15  # of sticks and triggers

# axis: (key for less, key for more), with labels for an operator who stands behind the robot
_STANDARD_KEYS = {
    "x": (("KeyA", "left"), ("KeyD", "right")),
    "y": (("KeyS", "nearer"), ("KeyW", "away")),
    "z": (("KeyQ", "down"), ("KeyE", "up")),
    "roll": (("KeyU", "roll −"), ("KeyO", "roll +")),
    "pitch": (("KeyK", "pitch −"), ("KeyI", "pitch +")),
    "yaw": (("KeyL", "yaw −"), ("KeyJ", "yaw +")),
}
_ARROWS = {"ArrowLeft": "KeyA", "ArrowRight": "KeyD", "ArrowDown": "KeyS", "ArrowUp": "KeyW"}
# pairs for axes with other names
_OTHERS = tuple((f"Key{less}", f"Key{more}") for less, more in zip("ASDFHJKL", "QWERYUIO", strict=True))

# Buttons of the standard gamepad, by their index.
_PAD_GRIP, _PAD_HOLD, _PAD_SPEED, _PAD_FAILURE, _PAD_SUCCESS = 0, 1, 3, 8, 9
_PAD_NAMES = ("left stick ↔", "left stick ↕", "triggers", "bumpers", "right stick ↕", "right stick ↔")  # x, y, z, ...
NUM_STICKS, NUM_BUTTONS = 4, 17


@dataclass(frozen=True, kw_only=True)
class Held:
    """The keys, sticks and buttons that are held at one moment."""

    keys: frozenset[str] = frozenset()
    sticks: tuple[float, ...] = (0.0,) * NUM_STICKS  # left x, y, right x, y; right and down are positive
    buttons: tuple[float, ...] = (0.0,) * NUM_BUTTONS  # 0 to 1

    def button(self, index: int) -> bool:
        return self.buttons[index] > 0.5


@dataclass(frozen=True, kw_only=True)
class KeyBindings:
    """The key bindings of an action: `pairs` has the keys for less and for more of each axis but the grip."""

    axes: Axes
    pairs: dict[str, tuple[str, str]]
    labels: dict[str, str]  # key: what it does
    pad_parts: dict[str, int] = field(default_factory=dict)  # axis: index into _PAD_NAMES

    @staticmethod
    def of(axes: Axes) -> KeyBindings:
        pushed = axes.pushed
        if all(name in _STANDARD_KEYS for name in pushed):
            known = {name: _STANDARD_KEYS[name] for name in pushed}
            pad = {name: list(_STANDARD_KEYS).index(name) for name in pushed}
        elif len(pushed) > len(_OTHERS):
            raise DeviceError(
                f"action: expected up to {len(_OTHERS)} axes, one pair of keys each, got {len(pushed)}; "
                f"drive a part of them, with a wrapper that fills in the rest"
            )
        else:
            known = {
                name: ((less, f"{name} −"), (more, f"{name} +"))
                for name, (less, more) in zip(pushed, _OTHERS, strict=False)
            }
            pad = {name: index for index, name in enumerate(pushed[: len(_PAD_NAMES)])}
        return KeyBindings(
            axes=axes,
            pairs={name: (less[0], more[0]) for name, (less, more) in known.items()},
            labels={key: label for pair in known.values() for key, label in pair},
            pad_parts=pad,
        )

    def pushes(self, held: Held) -> dict[str, float]:
        """How far each axis is pushed, at full speed."""
        keys = {_ARROWS.get(key, key) for key in held.keys} if self._arrows else held.keys
        parts = _pad_parts(held)
        found = {}
        for name, (less, more) in self.pairs.items():
            by_pad = parts[self.pad_parts[name]] if name in self.pad_parts else 0.0
            found[name] = min(1.0, max(-1.0, (more in keys) - (less in keys) + by_pad))
        return found

    def active(self, held: Held) -> bool:
        """Whether the operator is in control: a key that moves the robot is held, or the hold key."""
        moving = {HOLD, *self.labels}
        moving |= {TOGGLE} if self.axes.has_grip else set()
        moving |= _ARROWS.keys() if self._arrows else set()
        parts = _pad_parts(held)
        return (
            not moving.isdisjoint(held.keys)
            or any(parts[index] for index in self.pad_parts.values())
            or held.button(_PAD_HOLD)
            or (self.axes.has_grip and held.button(_PAD_GRIP))
        )

    def events(self, before: Held, after: Held) -> Iterator[InputEvent]:
        """The commands given by keys that were pressed between two moments."""
        down = after.keys - before.keys
        pressed = [after.button(index) and not before.button(index) for index in range(NUM_BUTTONS)]
        if self.axes.has_grip and (TOGGLE in down or pressed[_PAD_GRIP]):
            yield "grip"
        if SUCCESS in down or pressed[_PAD_SUCCESS]:
            yield "success"
        if FAILURE in down or pressed[_PAD_FAILURE]:
            yield "failure"
        if DISCARD in down:
            yield "discard"

    def speed(self, speed: float, before: Held, after: Held) -> float:
        """The speed after the keys that were pressed between two moments; a gamepad's button selects the next one."""
        for key, chosen in SPEEDS.items():
            if key in after.keys - before.keys:
                return chosen
        if after.button(_PAD_SPEED) and not before.button(_PAD_SPEED):
            return next((chosen for chosen in SPEEDS.values() if chosen > speed), min(SPEEDS.values()))
        return speed

    @property
    def _arrows(self) -> bool:
        """Whether the arrow keys push x and y."""
        return self.pairs.get("x") == ("KeyA", "KeyD") and self.pairs.get("y") == ("KeyS", "KeyW")

    def describe(self, *, can_discard: bool = False) -> dict[str, Any]:
        """What the page needs to draw and explain the controls; `can_discard` in a recording of demonstrations."""
        return {
            "axes": [
                {
                    "name": name,
                    "less": {"key": less, "label": self.labels[less]},
                    "more": {"key": more, "label": self.labels[more]},
                    "pad": _PAD_NAMES[self.pad_parts[name]] if name in self.pad_parts else None,
                }
                for name, (less, more) in self.pairs.items()
            ],
            "arrows": list(_ARROWS) if self._arrows else [],
            "grip": TOGGLE if self.axes.has_grip else None,
            "hold": HOLD,
            "success": SUCCESS,
            "failure": FAILURE,
            "discard": DISCARD if can_discard else None,
            "speeds": SPEEDS,
        }


def past_dead_zone(value: float, dead_zone: float) -> float:
    """0 within the dead zone, then linear up to 1 or down to -1."""
    size = (abs(value) - dead_zone) / (1.0 - dead_zone)
    return 0.0 if size <= 0 else min(size, 1.0) * (1.0 if value > 0 else -1.0)


def _pad_parts(held: Held) -> tuple[float, ...]:
    """The six analog parts of a gamepad in the order of _PAD_NAMES, each from -1 to 1."""
    left_x, left_y, right_x, right_y = held.sticks
    bumper_left, bumper_right, trigger_left, trigger_right = held.buttons[4:8]
    return tuple(
        past_dead_zone(value, DEAD_ZONE)
        for value in (left_x, -left_y, trigger_right - trigger_left, bumper_right - bumper_left, -right_y, -right_x)
    )

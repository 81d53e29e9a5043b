"""What a page sends, checked: anybody who reached the socket may send anything."""

from __future__ import annotations

import json
import math
from typing import Any

from understudy.envs.teleop.key_bindings import NUM_BUTTONS, NUM_STICKS, Held

MAX_KEYS = 32  # held at once


class RefusedMessage(Exception):
    """A page said something that this one's page does not say."""


def parsed(message: str | bytes) -> dict[str, Any]:
    try:
        parsed = json.loads(message)
    except (ValueError, RecursionError):
        parsed = None
    if not isinstance(parsed, dict):
        raise RefusedMessage("expected a JSON object")
    return parsed


def number(message: dict[str, Any], name: str) -> float:
    value = message.get(name)
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise RefusedMessage(f"{name}: expected a number")
    return float(value)


def held_in(message: dict[str, Any]) -> Held:
    keys = message.get("keys")
    if not isinstance(keys, list) or len(keys) > MAX_KEYS or not all(isinstance(key, str) for key in keys):
        raise RefusedMessage(f"keys: expected up to {MAX_KEYS} names")
    return Held(
        keys=frozenset(keys),
        sticks=_numbers(message, "sticks", NUM_STICKS),
        buttons=_numbers(message, "buttons", NUM_BUTTONS),
    )


def _numbers(message: dict[str, Any], name: str, size: int) -> tuple[float, ...]:
    """So many numbers from -1 to 1; zeros if there is no gamepad."""
    values = message.get(name)
    if values is None:
        return (0.0,) * size
    if not isinstance(values, list) or len(values) != size:
        raise RefusedMessage(f"{name}: expected {size} numbers")
    if not all(isinstance(value, int | float) and -1.0 <= value <= 1.0 for value in values):
        raise RefusedMessage(f"{name}: expected numbers from -1 to 1")
    return tuple(map(float, values))

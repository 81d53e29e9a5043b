"""Axes: what the numbers of an action mean to an operator, and how pushes of a device become an action.

A push is a number from -1 to 1 per axis: 0 is rest, 1 is the upper bound of the spec. The grip is not pushed: it is
open or closed, and stays so until it is toggled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from understudy.core import ArraySpec, Spec, Tree, UnderstudyError
from understudy.core import tree as trees

GRIP = "grip"
# The usual axes of an action by its size; the option `names` overrides them.
USUAL = {
    2: ("x", "y"),
    3: ("x", "y", "z"),
    4: ("x", "y", "z", GRIP),
    6: ("x", "y", "z", "roll", "pitch", "yaw"),
    7: ("x", "y", "z", "roll", "pitch", "yaw", GRIP),
}


class DeviceError(UnderstudyError):
    """A device cannot be used: it does not fit the action, is missing, or access is denied."""


@dataclass(frozen=True, kw_only=True)
class Axes:
    """The axes of one action, in order. `high_closes`: the grip is closed at its upper bound."""

    names: tuple[str, ...]
    path: str  # of the action's only leaf; '' if the action is a bare array
    leaf: ArraySpec
    high_closes: bool = True

    @staticmethod
    def of(action: Spec, *, names: Sequence[str] | None = None, high_closes: bool = True) -> Axes:
        """The axes of an action's spec, by its size or by `names`; a DeviceError if no device can drive it."""
        if len(action.flat) != 1:
            raise DeviceError(
                f"action: expected one array, got {', '.join(action.flat)}; a device drives actions of one array"
            )
        ((path, leaf),) = action.flat.items()
        where = trees.join("action", path)
        if leaf.ragged or len(leaf.shape) != 1 or not leaf.dtype.startswith("float"):
            raise DeviceError(f"{where}: expected floats of one dimension, got {leaf}; a device cannot make others")
        size = leaf.fixed_shape[0]
        chosen = tuple(names) if names is not None else USUAL.get(size, tuple(f"axis {i + 1}" for i in range(size)))
        if len(chosen) != size or len(set(chosen)) != size:
            raise DeviceError(f"names: expected {size} different ones for {where}, got {', '.join(chosen) or 'none'}")
        return Axes(names=chosen, path=path, leaf=leaf, high_closes=high_closes)

    @property
    def pushed(self) -> tuple[str, ...]:
        """All axes but the grip."""
        return tuple(name for name in self.names if name != GRIP)

    @property
    def has_grip(self) -> bool:
        return GRIP in self.names

    def action(self, pushes: Mapping[str, float], *, closed: bool) -> Tree:
        """The action for these pushes, clipped to the bounds; an axis without a push rests."""
        values = []
        for name, (low, high, rest) in zip(self.names, self._bounds, strict=True):
            if name == GRIP:
                values.append(high if closed == self.high_closes else low)
            else:
                push = pushes.get(name, 0.0)
                value = rest + push * (high - rest if push > 0 else rest - low)
                values.append(min(high, max(low, value)))
        return trees.unflatten({self.path: np.array(values, self.leaf.dtype)})

    def closed(self, action: Tree) -> bool:
        """Whether an action closes the grip."""
        index = self.names.index(GRIP)
        low, high, _ = self._bounds[index]
        return bool((trees.flatten(action)[self.path][index] > (low + high) / 2) == self.high_closes)

    @cached_property
    def _bounds(self) -> list[tuple[float, float, float]]:
        """For each axis: low, high and rest. A missing bound counts as -1 or 1; rest is 0, clipped to the bounds."""
        low, high = (np.broadcast_to(limit, self.leaf.fixed_shape).astype(float) for limit in self.leaf.limits)
        low = np.where(np.isfinite(low), low, np.minimum(-1.0, high))
        high = np.where(np.isfinite(high), high, np.maximum(1.0, low))
        return list(zip(low.tolist(), high.tolist(), np.clip(0.0, low, high).tolist(), strict=True))


NO_AXES = Axes(names=(), path="", leaf=ArraySpec(shape=(0,), dtype="float32"))  # for an action that cannot be driven

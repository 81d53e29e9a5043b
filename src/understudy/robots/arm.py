"""Arm: the interface of an arm, real or simulated, to its server. Five methods to implement."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

import numpy as np

from understudy.core import UnderstudyError

Array: TypeAlias = np.ndarray[Any, Any]


class ArmError(UnderstudyError):
    """The arm, or the server in front of it, cannot do what was asked."""


@dataclass(frozen=True, kw_only=True)
class ArmLimits:
    """The box, the speeds and the lag that the server enforces for the tool point, whatever clients ask for."""

    low: tuple[float, float, float]  # the box, in the arm's base frame, in metres
    high: tuple[float, float, float]
    max_turn_rad: float = 1.2  # how far the tool may be turned from its home orientation
    max_speed: float = 0.25  # m/s; the "reduced speed" of ISO 10218-1
    max_turn_speed: float = 1.0  # rad/s
    max_lag_m: float = 0.02  # the commanded point may be so far ahead of the arm, which bounds the force on an obstacle
    max_lag_rad: float = 0.2
    heartbeat_s: float = 0.12  # the arm stops when its client sends no heartbeat for so long

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            numbers = np.asarray(value, float)
            if not np.isfinite(numbers).all() or (numbers.ndim == 0 and numbers <= 0):
                raise ArmError(f"limits/{name}: expected finite numbers, and a rate or length above 0, got {value}")
        if not all(low < high for low, high in zip(self.low, self.high, strict=True)):
            raise ArmError(f"limits: expected low below high on each axis, got {self.low} and {self.high}")
        if self.max_turn_rad >= np.pi / 2:  # below it, the straight way between two orientations stays inside
            raise ArmError(f"limits/max_turn_rad: expected less than pi/2, got {self.max_turn_rad}")


@dataclass(frozen=True, kw_only=True, eq=False)
class ArmState:
    """What the arm measures at one moment, in its base frame unless stated otherwise."""

    pose: Array  # [7] tool point x, y, z in metres, and its quaternion x, y, z, w
    vel: Array  # [6] of the tool point: m/s, rad/s
    force: Array  # [3] external force on the tool point, in the tool's frame, N
    torque: Array  # [3] Nm
    q: Array  # [joints] rad
    dq: Array  # [joints] rad/s
    jacobian: Array  # [6, joints]
    gripper: float  # 0 closed, 1 open


class Arm(abc.ABC):
    """An arm with its own Cartesian controller. All methods are called from one thread, and none may block for long."""

    limits: ArmLimits
    home: Array  # [7] a pose inside the box; allowed orientations are measured from it
    simulated: bool = False  # whether nothing real moves

    @abc.abstractmethod
    def state(self) -> ArmState:
        """What the arm measures now; called a few hundred times a second."""

    @abc.abstractmethod
    def move(self, pose: Array) -> None:
        """Move the tool point to this pose [7], which is close to the last one; called after each `state`."""

    @abc.abstractmethod
    def grip(self, opening: float) -> None:
        """Start to move the fingers: 0 closes them, 1 opens them. An object between them is held."""

    @abc.abstractmethod
    def recover(self) -> None:
        """Leave the error state that the arm's own safety controller may have entered."""

    @abc.abstractmethod
    def close(self) -> None:
        """Stop the arm and release it."""

    # --- optional ---

    def tune(self, values: Mapping[str, float]) -> list[str]:
        """Change parameters of the controller; returns the names that this arm does not have."""
        return list(values)

    def reset_joints(self) -> None:  # noqa: B027 (most arms need none)
        """At home, move all joints to their home angles. This one may block until the arm is there."""

"""Guard: keeps targets, the commanded pose and the measured state inside the limits of an arm. Pure functions."""

from __future__ import annotations

import numpy as np

from understudy.core.rotation import between, turned
from understudy.robots.arm import ArmError, ArmLimits, ArmState, Array

# The commanded pose stays inside the limits by these margins, so that the arm that follows it does too.
INSET_M = 0.005
SHARE = 0.8  # of the maximum speed, and of the maximum turn from home
TURN_SHARE = 0.6  # of the maximum turning speed: contacts turn the hand as well
TRIP_FACTOR = 1.5  # an arm that exceeds its speed limit by this factor is stopped


class Guard:
    """The limits of one arm, applied."""

    def __init__(self, limits: ArmLimits, home: Array):
        self.limits = limits
        self.home = np.asarray(home, float)
        self._low = np.asarray(limits.low) + INSET_M
        self._high = np.asarray(limits.high) - INSET_M
        if not (np.all(self._low <= self.home[:3]) and np.all(self.home[:3] <= self._high)):
            raise ArmError(f"home: expected a point inside {limits.low} to {limits.high}, got {self.home[:3].tolist()}")

    def clamp(self, target: Array) -> Array:
        """The nearest allowed pose: inside the box, and not too far from the home orientation."""
        position = np.clip(target[:3], self._low, self._high)
        turn = _limit_length(between(self.home[3:], target[3:]), SHARE * self.limits.max_turn_rad)
        return np.concatenate([position, turned(self.home[3:], turn)])

    def next(self, commanded: Array, target: Array | None, measured: Array, dt_s: float) -> Array:
        """The commanded pose after `dt_s`: towards the target at limited speed, and never far ahead of the arm.

        Without a target it stays, unless somebody pushes the arm away.
        """
        position, orientation = commanded[:3], commanded[3:]
        if target is not None:
            position = position + _limit_length(target[:3] - position, SHARE * self.limits.max_speed * dt_s)
            turn = _limit_length(between(orientation, target[3:]), TURN_SHARE * self.limits.max_turn_speed * dt_s)
            orientation = turned(orientation, turn)
        ahead = _limit_length(position - measured[:3], self.limits.max_lag_m)
        turned_ahead = _limit_length(between(measured[3:], orientation), self.limits.max_lag_rad)
        position = measured[:3] + ahead
        inside = np.clip(position, self._low, self._high)
        if np.linalg.norm(inside - measured[:3]) <= self.limits.max_lag_m:  # else the arm itself is outside
            position = inside
        return np.concatenate([position, turned(measured[3:], turned_ahead)])

    def violation(self, state: ArmState) -> str | None:
        """Why the arm must be stopped, or None."""
        if not all(np.isfinite(part).all() for part in (state.pose, state.vel, state.q)):
            return "the arm reports numbers that are not finite"
        for part, most, unit in (
            (state.vel[:3], self.limits.max_speed, "m/s"),
            (state.vel[3:], self.limits.max_turn_speed, "rad/s"),
        ):
            speed = float(np.linalg.norm(part))
            if speed > TRIP_FACTOR * most:
                return f"the arm moved at {speed:.2f} {unit}, and {most:g} is its limit"
        return None


def _limit_length(vector: Array, length: float) -> Array:
    size = float(np.linalg.norm(vector))
    return vector if size <= length else vector * (length / size)

"""Guard: from what a client wishes to the next small step of the commanded pose. No clock, no thread."""

from __future__ import annotations

import numpy as np

from understudy.core.rotation import between, turned
from understudy.robots.arm import ArmError, ArmLimits, ArmState, Array

# The commanded pose keeps inside the limits by this much, so that the arm that follows it does, too.
INSET_M = 0.005
SHARE = 0.8  # of the speed, and of how far the tool may be turned
TURN_SHARE = 0.6  # of the turning speed: what the fingers touch turns the hand, too
TRIP_SHARE = 1.5  # an arm that is faster than its limit by this factor does not do what it is told


class Guard:
    """The rules of one arm."""

    def __init__(self, limits: ArmLimits, home: Array):
        self.limits = limits
        self.home = np.asarray(home, float)
        self._low = np.asarray(limits.low) + INSET_M
        self._high = np.asarray(limits.high) - INSET_M
        if not (np.all(self._low <= self.home[:3]) and np.all(self.home[:3] <= self._high)):
            raise ArmError(f"home: expected a point inside {limits.low} to {limits.high}, got {self.home[:3].tolist()}")

    def clamped(self, wish: Array) -> Array:
        """The nearest pose that is allowed: into the box, and towards the home orientation."""
        position = np.clip(wish[:3], self._low, self._high)
        turn = _at_most(between(self.home[3:], wish[3:]), SHARE * self.limits.max_turn_rad)
        return np.concatenate([position, turned(self.home[3:], turn)])

    def next(self, commanded: Array, wish: Array | None, measured: Array, dt_s: float) -> Array:
        """The commanded pose after `dt_s`: towards the wish at limited speed, and never far ahead of the arm.

        Without a wish it stays; only an arm that is pushed away takes it along.
        """
        position, orientation = commanded[:3], commanded[3:]
        if wish is not None:
            position = position + _at_most(wish[:3] - position, SHARE * self.limits.max_speed * dt_s)
            turn = _at_most(between(orientation, wish[3:]), TURN_SHARE * self.limits.max_turn_speed * dt_s)
            orientation = turned(orientation, turn)
        ahead = _at_most(position - measured[:3], self.limits.max_lag_m)
        turned_ahead = _at_most(between(measured[3:], orientation), self.limits.max_lag_rad)
        position = measured[:3] + ahead
        inside = np.clip(position, self._low, self._high)
        if np.linalg.norm(inside - measured[:3]) <= self.limits.max_lag_m:  # else the arm itself is outside
            position = inside
        return np.concatenate([position, turned(measured[3:], turned_ahead)])

    def objection(self, state: ArmState) -> str | None:
        """Why this arm must not be driven on, if it must not."""
        if not all(np.isfinite(part).all() for part in (state.pose, state.vel, state.q)):
            return "the arm reports numbers that are not finite"
        for part, most, unit in (
            (state.vel[:3], self.limits.max_speed, "m/s"),
            (state.vel[3:], self.limits.max_turn_speed, "rad/s"),
        ):
            speed = float(np.linalg.norm(part))
            if speed > TRIP_SHARE * most:
                return f"the arm moved at {speed:.2f} {unit}, and {most:g} is its limit"
        return None


def _at_most(vector: Array, length: float) -> Array:
    size = float(np.linalg.norm(vector))
    return vector if size <= length else vector * (length / size)

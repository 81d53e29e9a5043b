"""Quaternions as x, y, z, w, and rotation vectors (axis times angle)."""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import numpy as np

Array: TypeAlias = np.ndarray[Any, Any]


def multiply(a: Array, b: Array) -> Array:
    """The rotation b followed by a."""
    ax, ay, az, aw = a.tolist()
    bx, by, bz, bw = b.tolist()
    return np.array(
        [
            aw * bx + ax * bw + ay * bz - az * by,
            aw * by - ax * bz + ay * bw + az * bx,
            aw * bz + ax * by - ay * bx + az * bw,
            aw * bw - ax * bx - ay * by - az * bz,
        ]
    )


def inverse(q: Array) -> Array:
    return q * (-1.0, -1.0, -1.0, 1.0)


def from_vector(v: Array) -> Array:
    angle = math.sqrt(float(v @ v))
    share = 0.5 if angle < 1e-9 else math.sin(angle / 2) / angle
    return np.array([*(v * share).tolist(), math.cos(angle / 2)])


def to_vector(q: Array) -> Array:
    """The rotation vector, with an angle of at most pi."""
    x, y, z, w = q.tolist()
    size = math.sqrt(x * x + y * y + z * z)
    if size < 1e-12:
        return np.zeros(3)
    angle = 2.0 * math.atan2(size, abs(w))
    return np.array([x, y, z]) * (math.copysign(angle, w) / size)


def between(start: Array, end: Array) -> Array:
    """The rotation vector, in the fixed frame, that turns start into end."""
    return to_vector(multiply(end, inverse(start)))


def turned(q: Array, vector: Array) -> Array:
    """The quaternion after a turn in the fixed frame, with length 1 again."""
    found = multiply(from_vector(vector), q)
    return np.asarray(found / np.linalg.norm(found))


def to_euler(q: Array) -> Array:
    """Angles about the fixed x, y and z axes, in this order."""
    x, y, z, w = q.tolist()
    return np.array(
        [
            math.atan2(2 * (w * x + y * z), 1 - 2 * (x * x + y * y)),
            math.asin(max(-1.0, min(1.0, 2 * (w * y - z * x)))),
            math.atan2(2 * (w * z + x * y), 1 - 2 * (y * y + z * z)),
        ]
    )

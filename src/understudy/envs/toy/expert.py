"""The toy table's scripted expert. It needs only the current state, so it can take over at any step."""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import numpy as np

from understudy.envs.toy.physics import (
    FINGER,
    HALF_BLOCK,
    HOLD_OPENING,
    MOVE_STEP,
    NOTHING,
    Table,
)
from understudy.envs.toy.tasks import Goal
from understudy.envs.world import WorldError

Move: TypeAlias = tuple[float, float, float, float]  # target x, y, z, and the speed of closing

TRAVEL_Z = 0.16  # above everything that stands on the table
CLOSE, OPEN = 1.0, -1.0


def choose_action(
    table: Table, goal: Goal, *, noise: float = 0.0, rng: np.random.Generator | None = None
) -> np.ndarray[Any, Any]:  # [4] float32
    """The expert's action. `noise` is the standard deviation of the noise on the three speeds, so that
    demonstrations differ; the grip has no noise."""
    x, y, z, grip = _PLANS[goal.kind](table, goal)
    speeds = [(to - at) / MOVE_STEP for to, at in zip((x, y, z), table.gripper, strict=True)]
    if noise:
        if rng is None:
            raise WorldError("rng: noise needs a random generator, got None; pass np.random.default_rng(seed)")
        largest = max(1.0, *map(abs, speeds))  # move in a straight line before noise is added
        speeds = [speed / largest + noise * rng.normal() for speed in speeds]
    return np.clip(np.array([*speeds, grip], np.float32), -1.0, 1.0)


def progress(table: Table, goal: Goal) -> float:
    """Progress of the task: minus the remaining distance in metres, plus 1 for a held block."""
    if goal.kind == "press":
        return -math.dist(table.gripper[:2], table.button) - table.gripper[2]
    block = table.blocks[goal.block]
    reach = -math.dist(table.gripper, block)
    if goal.kind == "push":
        return reach - 10.0 * math.dist(block[:2], table.zone)
    if table.held != goal.block:
        return reach
    if goal.kind == "pick":
        return 1.0 + block[2]
    target = table.plate if goal.kind == "place" else table.blocks[goal.other][:2]
    return 1.0 - math.dist(block[:2], target)


def _pick(table: Table, goal: Goal) -> Move:
    if table.held == goal.block:
        return (table.gripper[0], table.gripper[1], TRAVEL_Z, CLOSE)
    return _grasp(table, goal.block)


def _place(table: Table, goal: Goal) -> Move:
    x, y = table.plate if goal.kind == "place" else table.blocks[goal.other][:2]
    return _carry(table, x, y) if table.held == goal.block else _grasp(table, goal.block)


def _push(table: Table, goal: Goal) -> Move:
    """Push from behind with closed fingers, first along x, then along y."""
    if table.held != NOTHING:
        return _stay(table, OPEN)
    block, tip = table.blocks[goal.block], table.gripper
    errors = [table.zone[i] - block[i] for i in (0, 1)]
    axis = 0 if abs(errors[0]) > 0.02 else 1
    side = 1.0 if errors[axis] > 0 else -1.0
    contact = HALF_BLOCK + (2 * FINGER[0] if axis == 0 else FINGER[1])
    behind = [block[0], block[1]]
    behind[axis] -= side * (contact + 0.02)
    is_behind = (tip[axis] - block[axis]) * side <= -contact + 0.005
    if is_behind and abs(tip[1 - axis] - block[1 - axis]) < 0.025 and tip[2] < 0.045 and table.opening < 0.1:
        to = [block[0], block[1]]
        to[axis] = table.zone[axis] - side * contact
        return (to[0], to[1], 0.015, CLOSE)
    return _above(table, behind[0], behind[1], 0.015, CLOSE)


def _press(table: Table, goal: Goal) -> Move:
    del goal
    return _above(table, table.button[0], table.button[1], 0.0, CLOSE)


def _touch(table: Table, goal: Goal) -> Move:
    x, y, z = table.blocks[goal.block]
    return _above(table, x, y, z + HALF_BLOCK, CLOSE)


_PLANS = {"pick": _pick, "place": _place, "stack": _place, "push": _push, "press": _press, "touch": _touch}


# --- parts of the plans ---


def _grasp(table: Table, block: int) -> Move:
    """Approach a block from above with open fingers and close them."""
    x, y, z = table.blocks[block]
    tip = table.gripper
    if table.held != NOTHING:
        return _stay(table, OPEN)
    beside = max(abs(tip[0] - x), abs(tip[1] - y))
    if tip[2] < z and beside < 0.018 and table.opening > HOLD_OPENING - 1e-9:
        return (x, y, z - 0.01, CLOSE)
    if table.opening < 0.95 and tip[2] < z + HALF_BLOCK:
        return (tip[0], tip[1], TRAVEL_Z, OPEN)
    return _above(table, x, y, z - 0.01, OPEN)


def _carry(table: Table, x: float, y: float) -> Move:
    """Move the held block above x, y, lower it until it stands, and release it."""
    block, tip = table.blocks[table.held], table.gripper
    to_x, to_y = x + tip[0] - block[0], y + tip[1] - block[1]
    if max(abs(block[0] - x), abs(block[1] - y)) < 0.02 and block[2] - HALF_BLOCK < table.support(table.held) + 0.004:
        return _stay(table, OPEN)
    return _above(table, to_x, to_y, 0.0, CLOSE)


def _above(table: Table, x: float, y: float, z: float, grip: float) -> Move:
    """Move up, sideways and down; sideways only above all obstacles."""
    tip = table.gripper
    beside = max(abs(tip[0] - x), abs(tip[1] - y))
    if beside > 0.03 and tip[2] < TRAVEL_Z - 0.025:
        return (tip[0], tip[1], TRAVEL_Z, grip)
    if beside > 0.015:
        return (x, y, max(tip[2], TRAVEL_Z) if beside > 0.03 else tip[2], grip)
    return (x, y, z, grip)


def _stay(table: Table, grip: float) -> Move:
    x, y, z = table.gripper
    return (x, y, z, grip)

"""The toy table's physics: a gripper and blocks that are grasped, pushed and stacked, computed in plain floats.

Units are metres; x points right, y away from the front camera, z up; the table's top is z = 0. Boxes never rotate, and
motion along the axes is executed one after the other, so that a push is a comparison of intervals.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

Point: TypeAlias = list[float]  # x, y, z
Box: TypeAlias = tuple[Sequence[float], Sequence[float]]  # centre, half of its size

HALF_BLOCK = 0.03
MOVE_STEP = 0.03  # distance of one step at full speed
GRIP_STEP = 0.25  # per step, of an opening from 0 to 1
FALL_STEP = 0.04

GRIPPER_LOW, GRIPPER_HIGH = (-0.30, -0.25, 0.005), (0.30, 0.25, 0.25)
TABLE_REACH = (0.28, 0.23)  # limit of a block's centre

HALF_GAP = 0.05  # from the middle to the inner side of a finger when open
FINGER = (0.008, 0.012, 0.045)  # half sizes; a gripper's position is the middle of its finger tips
HOLD_OPENING = HALF_BLOCK / HALF_GAP  # opening at which the fingers touch a block
RELEASE_OPENING = 0.05  # further opening until the block is released
GRASP_REACH = 0.02  # largest offset from a block's centre at which it is grasped

PLATE_RADIUS = 0.05
HALF_ZONE = 0.05
BUTTON_RADIUS, BUTTON_TOP, BUTTON_PRESSED = 0.03, 0.03, 0.015

NOTHING = -1
SLACK = 1e-6  # boxes that touch do not overlap


@dataclass(kw_only=True, slots=True)
class Table:
    """The state of the table; `act` advances it by one step."""

    gripper: Point
    opening: float = 1.0
    held: int = NOTHING  # which block
    blocks: list[Point]
    plate: tuple[float, float]
    zone: tuple[float, float]
    button: tuple[float, float]

    def act(self, dx: float, dy: float, dz: float, grip: float) -> None:
        """Advance one step with speeds from -1 to 1; a positive `grip` closes."""
        self._grip(grip)
        self._slide(0, dx * MOVE_STEP)
        self._slide(1, dy * MOVE_STEP)
        self._lift(dz * MOVE_STEP)
        self._fall()

    @property
    def pressed(self) -> bool:
        """Whether a finger tip presses the button."""
        x, y = self.gripper[0] - self.button[0], self.gripper[1] - self.button[1]
        return x * x + y * y < BUTTON_RADIUS**2 and self.gripper[2] <= BUTTON_PRESSED

    def resting(self, block: int) -> bool:
        """Whether a block lies on the table itself and is not held."""
        return self.held != block and self.blocks[block][2] <= HALF_BLOCK + SLACK

    def stacked(self, block: int, below: int) -> bool:
        """Whether a block lies on another, centred above it, and neither is held."""
        top, under = self.blocks[block], self.blocks[below]
        beside = max(abs(top[0] - under[0]), abs(top[1] - under[1]))
        height = abs(top[2] - under[2] - 2 * HALF_BLOCK)
        return self.held not in (block, below) and beside < HALF_BLOCK and height < SLACK

    def touched(self, block: int) -> bool:
        """Whether a finger is at the block or within 4 mm of it."""
        centre = self.blocks[block]
        return any(
            all(abs(at[i] - centre[i]) < half[i] + HALF_BLOCK + 0.004 for i in range(3)) for at, half in self.fingers()
        )

    def fingers(self) -> tuple[Box, Box]:
        """The left and the right finger."""
        x, y, z = self.gripper
        away, middle = self.opening * HALF_GAP + FINGER[0], z + FINGER[2]
        return ((x - away, y, middle), FINGER), ((x + away, y, middle), FINGER)

    def support(self, block: int) -> float:
        """Height of the surface below a block: the top of another block, or the table."""
        x, y, z = self.blocks[block]
        height = 0.0
        for index, other in enumerate(self.blocks):
            if index != block and other[2] + HALF_BLOCK > height and other[2] < z and _over(other, x, y):
                height = other[2] + HALF_BLOCK
        return height

    # --- stages of a step ---

    def _grip(self, grip: float) -> None:
        before, after = self.opening, min(1.0, max(0.0, self.opening - grip * GRIP_STEP))
        if self.held != NOTHING:
            if after > HOLD_OPENING + RELEASE_OPENING:
                self.held, self.opening = NOTHING, after
            return
        self.opening = after
        if before >= HOLD_OPENING > after:
            self._grasp()

    def _grasp(self) -> None:
        x, y, z = self.gripper
        for index, block in enumerate(self.blocks):
            deep = -HALF_BLOCK - SLACK <= z - block[2] <= HALF_BLOCK / 2
            if deep and abs(block[0] - x) < GRASP_REACH and abs(block[1] - y) < GRASP_REACH:
                block[0] = x  # closing fingers centre the block
                self.held, self.opening = index, HOLD_OPENING
                return

    def _slide(self, axis: int, way: float) -> None:
        before = self.gripper[axis]
        after = min(GRIPPER_HIGH[axis], max(GRIPPER_LOW[axis], before + way))
        way = after - before
        if way == 0.0:
            return
        self.gripper[axis] = after
        pushers: list[Box] = list(self.fingers())
        left = [abs(way)] * len(self.blocks)  # remaining distance that each block may be pushed
        if self.held != NOTHING:
            self.blocks[self.held][axis] += way
            pushers.append((self.blocks[self.held], _BLOCK))
            left[self.held] = 0.0
        while pushers:  # pushed blocks push others
            pusher = pushers.pop()
            for index, block in enumerate(self.blocks):
                if left[index] > 0.0 and block is not pusher[0] and _overlap(pusher, block, 3):
                    depth = pusher[1][axis] + HALF_BLOCK - (block[axis] - pusher[0][axis]) * (1.0 if way > 0 else -1.0)
                    push = min(depth, left[index])
                    left[index] -= push
                    reach = TABLE_REACH[axis]
                    block[axis] = min(reach, max(-reach, block[axis] + (push if way > 0 else -push)))
                    pushers.append((block, _BLOCK))

    def _lift(self, way: float) -> None:
        before = self.gripper[2]
        after = min(GRIPPER_HIGH[2], max(GRIPPER_LOW[2], before + way))
        if after < before:
            after = max(after, min(before, self._floor()))
        self.gripper[2] = after
        if self.held != NOTHING:
            self.blocks[self.held][2] += after - before

    def _floor(self) -> float:
        """Lowest height of the gripper: where a finger or the held block touches something."""
        floor = GRIPPER_LOW[2]
        for index, block in enumerate(self.blocks):
            if index == self.held:
                floor = max(floor, self.support(index) + HALF_BLOCK - block[2] + self.gripper[2])
            elif any(_overlap(finger, block, 2) for finger in self.fingers()):
                floor = max(floor, block[2] + HALF_BLOCK)
        return floor

    def _fall(self) -> None:
        for index in sorted(range(len(self.blocks)), key=lambda index: self.blocks[index][2]):
            if index != self.held:
                block = self.blocks[index]
                block[2] = max(self.support(index) + HALF_BLOCK, block[2] - FALL_STEP)


_BLOCK = (HALF_BLOCK, HALF_BLOCK, HALF_BLOCK)


def _overlap(box: Box, block: Point, num_axes: int) -> bool:
    at, half = box
    for axis in range(num_axes):  # noqa: SIM110 (a loop takes half the time of a generator in `all`)
        if abs(at[axis] - block[axis]) >= half[axis] + HALF_BLOCK - SLACK:
            return False
    return True


def _over(other: Point, x: float, y: float) -> bool:
    reach = 2 * HALF_BLOCK - SLACK
    return abs(other[0] - x) < reach and abs(other[1] - y) < reach

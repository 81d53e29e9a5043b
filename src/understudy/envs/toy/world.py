"""ToyTable: pick-and-place in numpy, with two cameras and ten tasks; deterministic, fast, no graphics driver.

An action is four speeds from -1 to 1: x, y, z of the gripper, and grip (positive closes). The reward is 1 in the step
that succeeds, which ends the episode, and 0 otherwise.
"""

from __future__ import annotations

import zlib
from functools import cache
from typing import Any, Literal

import numpy as np

from understudy.core import ArraySpec, Spec, StepSpec, Tree
from understudy.core.spec import describe
from understudy.envs.suite import Task
from understudy.envs.toy import expert
from understudy.envs.toy.physics import HALF_BLOCK, NOTHING, PLATE_RADIUS, Table
from understudy.envs.toy.render import Renderer
from understudy.envs.toy.tasks import STATE_NAMES, SUITE, TASKS, Goal
from understudy.envs.world import ExpertAction, World, WorldError

LIFTED_Z = 0.08  # the height of a picked block's underside


class ToyTable(World):
    """A gripper over a table with three blocks, a plate, a zone and a button."""

    suite = SUITE
    simulated = True
    state_names = STATE_NAMES  # of the numbers in observation["state"]: metres; opening and held are 0 to 1
    camera_names = ("front", "wrist")

    table: Table  # the true state, from the first reset on
    goal: Goal

    def __init__(self, *, size: int = 64, cameras: bool = True, state: Literal["all", "task"] = "all"):
        """`size` is the side of both cameras' images in pixels; without cameras, only the state is observed. With
        state="task", the numbers of objects that do not belong to the task are zero."""
        if state not in ("all", "task"):
            raise WorldError(f"state: expected 'all' or 'task', got {describe(state)}")
        self._task_state_only = state == "task"
        self._state_mask = np.ones(len(STATE_NAMES), np.float32)  # 0 for hidden numbers
        if type(size) is not int or not 16 <= size <= 512:
            raise WorldError(f"size: expected 16 to 512 pixels, got {describe(size)}; 64 and 128 are usual")
        fields: dict[str, ArraySpec] = {}
        self._renderer = Renderer(size) if cameras else None
        if cameras:
            fields = {name: ArraySpec(shape=(size, size, 3), dtype="uint8") for name in self.camera_names}
        fields["state"] = ArraySpec(shape=(len(STATE_NAMES),), dtype="float32")
        self.step_spec = StepSpec(
            observation=Spec(fields), action=Spec(ArraySpec(shape=(4,), dtype="float32", low=-1.0, high=1.0))
        )

    def begin(self, task: Task, start: int, rng: np.random.Generator) -> None:
        """The start index alone determines the state; `rng` is not used."""
        del rng
        self.goal = TASKS[task.name][1]
        if self._task_state_only:
            self._state_mask = np.array([name.split("_")[0] in self.goal.names for name in STATE_NAMES], np.float32)
        self.table = start_state(task.name, start)

    def advance(self, action: Tree) -> tuple[float, bool, bool, dict[str, Any]]:
        self.table.act(*np.asarray(action).tolist())
        success = succeeded(self.table, self.goal)
        return float(success), success or failed(self.table, self.goal), False, {"success": success}

    def observe(self) -> Tree:
        state = np.array(_numbers(self.table), np.float32) * self._state_mask
        if self._renderer is None:
            return {"state": state}
        return {"front": self._renderer.front(self.table), "wrist": self._renderer.wrist(self.table), "state": state}

    def expert_action(self, *, noise: float = 0.0, rng: np.random.Generator | None = None) -> ExpertAction:
        action = expert.choose_action(self.table, self.goal, noise=noise, rng=rng)
        return ExpertAction(action=action, progress=expert.progress(self.table, self.goal))

    def close(self) -> None:
        """Nothing to release."""


def script(
    world: ToyTable, *, noise: float = 0.0, rng: np.random.Generator | None = None
) -> np.ndarray[Any, Any]:  # [4] float32
    """The scripted expert's action; the same as `world.expert_action(...).action`."""
    return expert.choose_action(world.table, world.goal, noise=noise, rng=rng)


def succeeded(table: Table, goal: Goal) -> bool:
    """Whether the goal is reached."""
    if goal.kind == "press":
        return table.pressed
    if goal.kind == "touch":
        return table.touched(goal.block)
    if goal.kind == "stack":
        return table.stacked(goal.block, goal.other)
    x, y, z = table.blocks[goal.block]
    if goal.kind == "pick":
        return table.held == goal.block and z - HALF_BLOCK >= LIFTED_Z
    if goal.kind == "place":
        return table.resting(goal.block) and np.hypot(x - table.plate[0], y - table.plate[1]).item() < PLATE_RADIUS
    return table.resting(goal.block) and max(abs(x - table.zone[0]), abs(y - table.zone[1])) < HALF_BLOCK


def failed(table: Table, goal: Goal) -> bool:
    """Whether the goal can no longer be reached: a block to be pushed was grasped."""
    return goal.kind == "push" and table.held == goal.block


def start_state(task: str, start: int) -> Table:
    """The table at a start of a task; the same for the same task and index."""
    gripper, *blocks, plate, zone, button = _start_positions(task, start)
    return Table(
        gripper=[*gripper],
        blocks=[[x, y, HALF_BLOCK] for x, y in blocks],
        plate=(plate[0], plate[1]),
        zone=(zone[0], zone[1]),
        button=(button[0], button[1]),
    )


@cache
def _start_positions(task: str, start: int) -> tuple[tuple[float, ...], ...]:
    """Start positions of gripper, blocks and targets: the first random draw in which nothing is in the way."""
    rng = np.random.default_rng([zlib.crc32(task.encode()), start])
    goal = TASKS[task][1]
    gripper = tuple(rng.uniform((-0.2, -0.15, 0.16), (0.2, 0.15, 0.24)).tolist())
    while True:
        draws = rng.uniform((-0.22, -0.17), (0.22, 0.17), (100, 6, 2))
        gaps = np.abs(draws[:, :, None] - draws[:, None]).max(axis=-1) + np.eye(6)
        for positions in draws[gaps.min(axis=(1, 2)) > 0.11].tolist():
            if goal.kind != "push" or _free_way(positions[:3], goal.block, positions[4]):
                return (gripper, *map(tuple, positions))


def _free_way(blocks: list[list[float]], block: int, zone: list[float]) -> bool:
    """Whether a block can be pushed along x and then along y without hitting another."""
    x, y = blocks[block]
    for index, (other_x, other_y) in enumerate(blocks):
        along_x = min(x, zone[0]) - 0.14 < other_x < max(x, zone[0]) + 0.14 and abs(other_y - y) < 0.08
        along_y = min(y, zone[1]) - 0.14 < other_y < max(y, zone[1]) + 0.14 and abs(other_x - zone[0]) < 0.08
        if index != block and (along_x or along_y):
            return False
    return True


def _numbers(table: Table) -> list[float]:
    """The state in the order of STATE_NAMES."""
    blocks = [number for block in table.blocks for number in block]
    return [
        *table.gripper,
        table.opening,
        float(table.held != NOTHING),
        *blocks,
        *table.plate,
        *table.zone,
        *table.button,
    ]

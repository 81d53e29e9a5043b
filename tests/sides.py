"""A world in which a dot is to go to the side that it is told, and chance succeeds about as often as not; for tests."""

from __future__ import annotations

from typing import Any

import numpy as np

from understudy.core import ArraySpec, Spec, StepSpec, Tree
from understudy.envs import Suite, Task, World

SIZE = 16
SIDES = {"left": -1.0, "right": 1.0}


class SidesWorld(World):
    """Task number i is to go left if i is even, else right; the first of an action's `numbers` moves. The dot is seen
    in a picture of 16 x 16 pixels."""

    simulated = True

    def __init__(self, *, tasks: int = 2, num_starts: int = 10, max_steps: int = 6, numbers: int = 1):
        self.step_spec = StepSpec(
            observation=Spec({"camera": ArraySpec(shape=(SIZE, SIZE, 3), dtype="uint8")}),
            action=Spec(ArraySpec(shape=(numbers,), dtype="float32", low=-1.0, high=1.0)),
        )
        names = [(f"{side}-{index}", side) for index, side in zip(range(tasks), tuple(SIDES) * tasks, strict=False)]
        self.suite = Suite(
            name="sides",
            tasks=tuple(
                Task(name=name, instruction=f"go {side}", num_starts=num_starts, max_steps=max_steps)
                for name, side in names
            ),
        )

    def begin(self, task: Task, start: int, rng: np.random.Generator) -> None:
        self._side = SIDES[task.name.partition("-")[0]]
        self._place = 0.2 * (start / max(task.num_starts - 1, 1) - 0.5)

    def advance(self, action: Tree) -> tuple[float, bool, bool, dict[str, Any]]:
        self._place += float(action[0])
        success = self._place * self._side > 1.0
        return float(success), success, False, {"success": success}

    def observe(self) -> Tree:
        picture = np.zeros((SIZE, SIZE, 3), np.uint8)
        column = int(np.clip((self._place / 3.0 + 0.5) * SIZE, 0, SIZE - 1))
        picture[4:12, column] = 255
        return {"camera": picture}

    def close(self) -> None:
        """Nothing to let go of."""

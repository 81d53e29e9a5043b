"""A world that waits: each step takes a fixed time and no CPU, and episodes have different lengths. For scheduling."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from understudy.core import ArraySpec, Spec, StepSpec, Tree
from understudy.envs import Suite, Task, World


class WaitingWorld(World):
    """Episodes of 10 to 60 steps that succeed every second time. Later tasks have longer ones."""

    simulated = True

    def __init__(self, *, tasks: int = 1, step_ms: float = 40.0):
        self._step_s = step_ms / 1000
        self.step_spec = StepSpec(
            observation=Spec({"camera": ArraySpec(shape=(16, 16, 3), dtype="uint8")}),
            action=Spec(ArraySpec(shape=(1,), dtype="float32", low=-1.0, high=1.0)),
        )
        self.suite = Suite(
            name="waiting",
            tasks=tuple(
                Task(name=f"wait-{index}", instruction=f"wait {index}", num_starts=20, max_steps=60)
                for index in range(tasks)
            ),
        )

    def begin(self, task: Task, start: int, rng: np.random.Generator) -> None:
        slow = 1 + int(task.name.rpartition("-")[2]) % 3
        self._left = int(rng.integers(10, 20 * slow + 1))
        self._good = bool(rng.integers(2))

    def advance(self, action: Tree) -> tuple[float, bool, bool, dict[str, Any]]:
        time.sleep(self._step_s)
        self._left -= 1
        success = self._good and self._left <= 0
        return float(success), success, self._left <= 0 and not success, {"success": success}

    def observe(self) -> Tree:
        return {"camera": np.zeros((16, 16, 3), np.uint8)}

    def close(self) -> None:
        """Nothing to let go of."""

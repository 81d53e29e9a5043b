"""Worlds for tests: one that is nothing but numbers, and one that counts as a robot."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from understudy.core import ArraySpec, Spec, StepSpec
from understudy.core.tree import Tree
from understudy.envs import Suite, Task, ToyTable, World


class CountingWorld(World):
    """Sees the episode's seed and the number of the step; succeeds when the last action was above 0.5."""

    simulated = True

    def __init__(self, max_steps: int = 10):
        self.step_spec = StepSpec(
            observation=Spec({"seed": ArraySpec(shape=(), dtype="int64"), "step": ArraySpec(shape=(), dtype="int64")}),
            action=Spec(ArraySpec(shape=(1,), dtype="float32", low=-1, high=1)),
        )
        task = Task(name="count", instruction="count to the end", num_starts=10, max_steps=max_steps)
        self.suite = Suite(name="counting", tasks=(task,))
        self.executed: list[float] = []
        self.fails_at: int | None = None  # a step that raises

    def begin(self, task: Task, start: int, rng: np.random.Generator) -> None:
        self._seed = int(rng.integers(2**40))
        self._step = 0
        self.executed = []

    def advance(self, action: Tree) -> tuple[float, bool, bool, dict[str, Any]]:
        if self._step == self.fails_at:
            raise RuntimeError("the simulator broke")
        self.executed.append(float(action[0]))
        self._step += 1
        return float(self._step), False, False, {"success": float(action[0]) > 0.5}

    def observe(self) -> Tree:
        return {"seed": np.array(self._seed), "step": np.array(self._step)}

    def close(self) -> None:
        """Nothing to let go of."""


class RealTimeWorld(CountingWorld):
    """Says of itself that it keeps a rate and is never the same twice."""

    deterministic = False
    hz = 25.0


class RealTable(ToyTable):
    """The toy table as a robot would be: it does not say that it is simulated."""

    simulated = False
    executed: ClassVar[list[Tree]] = []  # actions of all tables of this process

    def advance(self, action: Tree) -> tuple[float, bool, bool, dict[str, Any]]:
        self.executed.append(action)
        return super().advance(action)

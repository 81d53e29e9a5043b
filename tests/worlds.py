"""Worlds for tests: one that is nothing but numbers, one with sensors in threads, and one that counts as a robot."""

from __future__ import annotations

import threading
import time
from typing import Any, ClassVar

import numpy as np

from understudy.core import ArraySpec, Sensor, Sensors, Spec, StepSpec
from understudy.core.tree import Tree
from understudy.envs import Suite, Task, ToyTable, World
from understudy.envs.world import ExpertAction


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


class SensingWorld(World):
    """A camera and a faster arm, each in a thread of its own, as a robot has them. A step takes 30 ms."""

    deterministic = False
    simulated = True

    def __init__(self, *, forgets_extras: bool = False) -> None:
        rates = {"camera": 50.0, "joints": 200.0}
        self._sensors = Sensors({"camera": Sensor(hz=50), "joints": Sensor(hz=200, keep_all=True)})
        spec = StepSpec(
            observation=Spec(
                {"camera": ArraySpec(shape=(4, 4, 3), dtype="uint8"), "joints": ArraySpec(shape=(2,), dtype="float32")}
            ),
            action=Spec(ArraySpec(shape=(1,), dtype="float32", low=-1, high=1)),
        )
        self.step_spec = self._sensors.timed_spec(spec)
        task = Task(name="sense", instruction="sense the world", num_starts=1, max_steps=5)
        self.suite = Suite(name="sensing", tasks=(task,))
        self._forgets_extras = forgets_extras
        self._closed = threading.Event()
        self._threads = [threading.Thread(target=self._give, args=(name, hz)) for name, hz in rates.items()]
        for thread in self._threads:
            thread.start()

    def _give(self, name: str, hz: float) -> None:
        like = self.step_spec.observation.flat[name].zero()
        number = 0
        while not self._closed.wait(1 / hz):
            number += 1
            self._sensors.put(name, np.full_like(like, number % 256))

    def begin(self, task: Task, start: int, rng: np.random.Generator) -> None:
        self._sensors.wait()
        self._sensors.begin()
        self._seen = self._sensors.read()

    def refresh(self) -> None:
        self._sensors.begin()
        self._seen = self._sensors.read()

    def advance(self, action: Tree) -> tuple[float, bool, bool, dict[str, Any]]:
        time.sleep(0.03)
        self._seen = self._sensors.read()
        return 1.0, False, False, {"success": float(action[0]) > 0.5}

    def observe(self) -> Tree:
        return {name: value.copy() for name, value in self._seen.observation.items()}

    def extras(self) -> Tree:
        return {} if self._forgets_extras else self._seen.extras

    def labels(self) -> dict[str, str]:
        return self._sensors.labels()

    def expert_action(self, *, noise: float = 0.0, rng: np.random.Generator | None = None) -> ExpertAction:
        return ExpertAction(action=np.ones(1, np.float32), progress=0.0)

    def close(self) -> None:
        self._closed.set()
        for thread in self._threads:
            thread.join()


class RealTable(ToyTable):
    """The toy table as a robot would be: it does not say that it is simulated."""

    simulated = False
    executed: ClassVar[list[Tree]] = []  # actions of all tables of this process

    def advance(self, action: Tree) -> tuple[float, bool, bool, dict[str, Any]]:
        self.executed.append(action)
        return super().advance(action)

"""A toy table whose workers fail and dawdle, for tests. It imports no torch, since its workers are started often."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np

from understudy.core import Tree
from understudy.envs import Task, ToyTable, WorldFactory

ROOT = Path(__file__).resolve().parents[4]


class FaultyTable(ToyTable):
    """Breaks down in the middle of some episodes, each time it begins them until it has done so `times`, and takes its
    time in others. Which, and how, the episode's own seed decides; what it has done is in files of `place`."""

    def __init__(
        self,
        *,
        place: str = "",
        share: float = 0.0,
        times: int = 1,
        slow_s: float = 0.0,
        faults: str = "kill,hang,raise,exit,nan",
    ):
        super().__init__(cameras=False)
        self._place, self._share, self._times, self._slow_s = Path(place), share, times, slow_s
        self._faults = faults.split(",")

    def begin(self, task: Task, start: int, rng: np.random.Generator) -> None:
        super().begin(task, start, rng)
        self._left = int(rng.integers(12)) if rng.random() < self._share else -1
        self._fault = self._faults[int(rng.integers(len(self._faults)))]
        self._pause_s = float(rng.random()) * self._slow_s
        self._mark = f"{task.name}-{start}-{int(rng.integers(2**40))}"
        self._first = start == 0

    def advance(self, action: Tree) -> tuple[float, bool, bool, dict[str, Any]]:
        reward, terminated, truncated, info = super().advance(action)
        time.sleep(self._pause_s)
        self._left -= 1
        if self._left == -1 and len(list(self._place.glob(f"{self._mark}.*"))) < self._times:
            (self._place / f"{self._mark}.{time.monotonic_ns()}").touch()
            reward = self._break_down(reward)
        return reward, terminated, truncated, info

    def _break_down(self, reward: float) -> float:
        if self._fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self._fault == "hang":
            time.sleep(10_000)
        if self._fault == "raise":
            raise RuntimeError("the simulator broke")
        if self._fault == "exit":
            os._exit(3)
        if self._fault == "wait":  # for a file; only where the start is the first
            while self._first and not (self._place / "go").exists():
                time.sleep(0.01)
            return reward
        return float("nan")


def faulty(**options: Any) -> WorldFactory:
    return WorldFactory(
        factory="tests.unit.training.collection.faulty_worlds:FaultyTable",
        options=options,
        env={"PYTHONPATH": str(ROOT)},
    )

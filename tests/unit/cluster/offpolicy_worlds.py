"""Worlds of RLPD that hang or die, for tests of the cluster."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np

from understudy.core import Tree
from understudy.envs import Task, ToyTable

HANG_S = 3600.0
NUM_STEPS = 150  # before the first one hangs


class HangsOnce(ToyTable):
    """The first instance hangs in the middle of a step."""

    def __init__(self, *, flag: str):
        super().__init__(cameras=False)
        self.choose("touch_purple")
        self._flag = Path(flag)
        self._num_calls = 0

    def advance(self, action: Tree) -> tuple[float, bool, bool, dict[str, Any]]:
        self._num_calls += 1
        if self._num_calls > NUM_STEPS and not self._flag.exists():
            self._flag.touch()
            time.sleep(HANG_S)
        return super().advance(action)


class DiesOnce(ToyTable):
    """The first instance is killed in the middle of an episode, when a part of it is on the shard already."""

    def __init__(self, *, flag: str):
        super().__init__(cameras=False)
        self.choose("touch_purple")
        self._flag = Path(flag)
        self._at = 0

    def begin(self, task: Task, start: int, rng: np.random.Generator) -> None:
        self._at = 0
        super().begin(task, start, rng)

    def advance(self, action: Tree) -> tuple[float, bool, bool, dict[str, Any]]:
        self._at += 1
        if self._at == 80 and not self._flag.exists():
            self._flag.touch()
            time.sleep(1.0)  # so that the first 50 are delivered
            os.kill(os.getpid(), signal.SIGKILL)
        return super().advance(action)

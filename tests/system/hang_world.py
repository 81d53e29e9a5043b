"""A world that stands still in the middle of a step as long as a file is there."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from understudy.core import Tree
from understudy.envs.toy import ToyTable


class HangWorld(ToyTable):
    """The toy table; `hang` is the file."""

    def __init__(self, *, hang: str, **options: Any):
        super().__init__(**options)
        self._hang = Path(hang)

    def step(self, action: Tree) -> tuple[Tree, float, bool, bool, dict[str, Any]]:
        self.wait_for_the_arm()
        return super().step(action)

    def wait_for_the_arm(self) -> None:
        while self._hang.exists():
            time.sleep(0.05)

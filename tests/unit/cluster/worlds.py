"""Worlds that hang, for tests of the cluster."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.sides import SidesWorld

from understudy.core import Tree

HANG_S = 20.0  # less than after which a simulator is given up


class Named(SidesWorld):
    """Its suite has the name that its environment variable says."""

    def __init__(self) -> None:
        super().__init__()
        self.suite = replace(self.suite, name=os.environ.get("SIDES_NAME", self.suite.name))


class HangsOnce(SidesWorld):
    """The first step of the first instance takes long."""

    def __init__(self, *, flag: str):
        super().__init__()
        self._flag = Path(flag)

    def advance(self, action: Tree) -> tuple[float, bool, bool, dict[str, Any]]:
        if not self._flag.exists():
            self._flag.touch()
            time.sleep(HANG_S)
        return super().advance(action)

"""Progress: how long maintenance of a store reports how far it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

ProgressCallback: TypeAlias = Callable[[int, int], None]  # segments finished, segments in all

"""Tests wait for what comes true, and not for a time that should be enough."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

LIMIT_S = 300.0  # the machine may be busy


def wait_for(
    condition: Callable[[], T], timeout_s: float = LIMIT_S, *, every_s: float = 0.01, logs: Path | None = None
) -> T:
    """What the condition says once it is true; in vain, the ends of the `*.log` in the directory `logs` are shown."""
    end_s = time.monotonic() + timeout_s
    while not (found := condition()):
        if time.monotonic() > end_s:
            files = [] if logs is None else sorted(logs.glob("*.log"))
            said = "\n".join(f"{file.name}: {file.read_text()[-2000:]}" for file in files)
            raise AssertionError(f"not true after {timeout_s:g} s\n{said}")
        time.sleep(every_s)
    return found

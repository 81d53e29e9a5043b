"""Makes every Python process with this directory on its path late: it starts late, and so do half of its threads; a
sync of a file may take long. Python imports a module of this name by itself when it starts."""

import os
import random
import threading
import time
from collections.abc import Callable
from typing import Any

START_S, THREAD_S, SYNC_S = 1.0, 0.7, 0.4  # at most
SLOW_SYNCS = 0.01  # the share of them

_random = random.Random()
_sleep = time.sleep  # before a test replaces it
_run = threading.Thread.run


def _late(most_s: float, share: float) -> None:
    if _random.random() < share:
        _sleep(_random.uniform(0, most_s))


def _run_late(self: threading.Thread) -> None:
    _late(THREAD_S, 0.5)
    _run(self)


def _slow(sync: Callable[[Any], None]) -> Callable[[Any], None]:
    def slow(file: Any) -> None:
        _late(SYNC_S, SLOW_SYNCS)
        sync(file)

    return slow


_late(START_S, 0.5)
threading.Thread.run = _run_late  # type: ignore[method-assign]
os.fsync, os.fdatasync = _slow(os.fsync), _slow(os.fdatasync)

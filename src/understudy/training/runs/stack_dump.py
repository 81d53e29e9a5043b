"""Stack dump: where each thread of this process is, as text. Shows where a stuck process hangs.

A simulator or policy in a subprocess writes its stacks itself, when it is sent SIGUSR1 (processes/child_main.py).
"""

from __future__ import annotations

import sys
import threading
import traceback
from types import FrameType

MAX_CHARACTERS = 50_000


def dump_stacks() -> str:
    """The stack of every thread, the main thread first. The calling thread is left out."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    found = [pair for pair in sys._current_frames().items() if pair[0] != threading.get_ident()]
    found.sort(key=lambda pair: (pair[0] != main, names.get(pair[0], "")))
    return "\n".join(_stack(names.get(ident, str(ident)), frame) for ident, frame in found)[:MAX_CHARACTERS]


def _stack(name: str, frame: FrameType) -> str:
    return f"thread {name}\n{''.join(traceback.format_stack(frame))}"

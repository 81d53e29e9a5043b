"""Runs an `understudy` command that gets a signal at one moment of its work, for tests of stopping.

A moment is a call of `Health.progress`: every step, update, batch and step of an evaluation is one. So the moment does
not depend on how fast the machine is. The signal is a real one, to this process.

python -m tests.system.stop_process MOMENT SIGNAL WORDS...      # MOMENT 0: no signal, only counts
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from understudy.training.runs.health import Health


@dataclass
class Moments:
    """How many moments there were, and how long the command went on after the signal."""

    count: int = 0
    sent_at: float | None = None


@contextmanager
def signal_at(moment: int, number: signal.Signals = signal.SIGINT) -> Iterator[Moments]:
    """Within, this process gets a signal at a moment (from 1); with 0 the moments are only counted."""
    moments, original = Moments(), Health.progress

    def progress(health: Health, *args: Any, **kwargs: Any) -> None:
        original(health, *args, **kwargs)
        moments.count += 1
        if moments.count == moment:
            moments.sent_at = time.monotonic()
            os.kill(os.getpid(), number)

    Health.progress = progress  # type: ignore[method-assign]
    try:
        yield moments
    finally:
        Health.progress = original  # type: ignore[method-assign]


def main() -> int:
    from understudy.cli import main as understudy

    with signal_at(int(sys.argv[1]), signal.Signals[sys.argv[2]]) as moments:
        code = understudy(sys.argv[3:])
    took_s = -1.0 if moments.sent_at is None else time.monotonic() - moments.sent_at
    print(f"moments {moments.count} took {took_s:.3f}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())

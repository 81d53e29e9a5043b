"""Runs tests on a machine that is late at every turn, to find those that fail by chance on a busy one.

    python -m tests.late -n 4 -m "not serial and not nightly" tests/system tests/unit/service

Processes, threads and syncs begin late (sitecustomize.py), and one process after another is stopped for a moment.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

STOPS_S = (0.1, 0.3, 0.8)
PAUSE_S = 0.6  # at most, between two stops


def main() -> int:
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(Path(__file__).parent)]))
    with subprocess.Popen(
        [sys.executable, "-m", "pytest", *sys.argv[1:]], env={**os.environ, "PYTHONPATH": path}
    ) as run:
        while run.poll() is None:
            stop_one(run.pid)
            time.sleep(random.uniform(0.1, PAUSE_S))
    return run.returncode


def stop_one(root: int) -> None:
    """Stop a process that `root` has started, directly or not, and let it go on after a moment."""
    parents = dict(filter(None, map(running, Path("/proc").glob("[0-9]*"))))
    found, new = set[int](), {root}
    while new:
        new = {pid for pid, parent in parents.items() if parent in new} - found
        found |= new
    if found:
        pid = random.choice(sorted(found))
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
            time.sleep(random.choice(STOPS_S))
            os.kill(pid, signal.SIGCONT)


def running(entry: Path) -> tuple[int, int] | None:
    """The id and the parent of a process; None if it has ended or is stopped already, perhaps by a test."""
    try:
        state, parent, *_ = (entry / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if state in "TZX" else (int(entry.name), int(parent))


if __name__ == "__main__":
    sys.exit(main())

"""Health: each process of a run reports what it is doing in a small file, for people and for the dashboard.

    with Health(run.path / HEALTH, role="learner", name="rlpd") as health:
        health.progress("learning", update=7)

The main loop calls `progress`, which only stores its arguments. A thread writes them to `<role>-<name>.json` every
HEARTBEAT_S seconds. After PROGRESS_TIMEOUT_S without progress it adds the stacks of all threads, which show where the
process hangs. A killed process leaves a file whose heartbeat is old; `read_health` tells the cases apart.

| loop | takes from | blocks on | woken by |
|---|---|---|---|
| heartbeat | what `progress` stored | the clock | every HEARTBEAT_S; `close` |

One time limit suits all activities: every step and every update is progress, in evaluations too, and a loop that waits
calls `progress` each time it polls. A single call that takes longer (a large checkpoint, the first start of a
simulator) shows its stack meanwhile, which is not an error.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import resource
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TypeAlias
from urllib.parse import quote

from understudy import __version__
from understudy.durable import files
from understudy.training.runs.stack_dump import dump_stacks

logger = logging.getLogger(__name__)

HEALTH = "health"  # the directory's name, inside that of a run or a store
HEARTBEAT_S = 2.0  # between two writes of the file
PROGRESS_TIMEOUT_S = 30.0  # without progress, after which a process counts as stuck
HEARTBEAT_TIMEOUT_S = 15.0  # without a heartbeat, after which a process counts as silent
RATE_S = 10.0  # the window over which steps and updates per second are measured

# Further values for the file; called from the heartbeat thread.
ExtraStatus: TypeAlias = Callable[[], Mapping[str, Any]]


class Health:
    """What one process is doing. Without a directory nothing is written, and `now` still answers.

    `start` creates the file, and `close` writes its last state. As a context manager it also records the error that
    ended the process.
    """

    def __init__(
        self,
        directory: Path | None,
        *,
        role: str,
        name: str,
        heartbeat_s: float = HEARTBEAT_S,
        progress_timeout_s: float = PROGRESS_TIMEOUT_S,
    ):
        self.path = None if directory is None else directory / f"{role}-{quote(name, safe='')}.json"
        self.page: str | None = None  # address of the web page on which a person can watch or drive
        self._role, self._name = role, name
        self._heartbeat_s, self._progress_timeout_s = heartbeat_s, progress_timeout_s
        self._started_s = time.time()
        self._doing = "starting"
        self._at = time.monotonic()
        self._step: int | None = None
        self._update: int | None = None
        self._version: int | None = None
        self._extra: list[ExtraStatus] = []
        self._past: deque[tuple[float, int, int]] = deque()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self._warned = False  # that the file cannot be written

    def progress(
        self, doing: str, step: int | None = None, update: int | None = None, policy_version: int | None = None
    ) -> None:
        """Report that work was completed, or that the caller polled again. Costs less than a microsecond."""
        self._doing = doing
        self._at = time.monotonic()
        if step is not None:
            self._step = step
        if update is not None:
            self._update = update
        if policy_version is not None:
            self._version = policy_version

    def now(self) -> dict[str, Any]:
        """The present content of the file."""
        return self._now("running")

    def add(self, extra: ExtraStatus) -> None:
        """Add these values at each heartbeat; the function must be fast and safe to call from another thread."""
        self._extra.append(extra)

    # ---- from start to end

    def start(self) -> Health:
        if self.path is not None and self._thread is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._write(self._now("running"))
            self._thread = threading.Thread(target=self._heartbeat, name="health", daemon=True)
            self._thread.start()
        return self

    def close(self, error: BaseException | None = None) -> None:
        """Write the last state: ended, or failed with an error."""
        if self._thread is None:
            return
        self._closed.set()
        self._thread.join()
        self._thread = None
        failed = error is not None and not isinstance(error, KeyboardInterrupt | SystemExit)
        self._write(self._now("failed" if failed else "ended", error))

    def __enter__(self) -> Health:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(error)

    # ---- the thread

    def _heartbeat(self) -> None:
        while not self._closed.wait(self._heartbeat_s):
            self._write(self._now("running"))

    def _now(self, state: str, error: BaseException | None = None) -> dict[str, Any]:
        now, wall_s = time.monotonic(), time.time()
        idle_s = max(now - self._at, 0.0)  # another thread may have made progress in between
        status: dict[str, Any] = {
            "role": self._role,
            "name": self._name,
            "state": state,
            "pid": os.getpid(),
            "host": platform.node(),
            "version": __version__,
            "started_s": self._started_s,
            "beat_s": wall_s,
            "progress_s": wall_s - idle_s,
            "stuck_after_s": self._progress_timeout_s,
            "doing": self._doing,
            "step": self._step,
            "update": self._update,
            "policy_version": self._version,
            "page": self.page,
            "memory_bytes": _memory_bytes(),
            **self._rates(now),
            "error": None if error is None else f"{type(error).__name__}: {error}",
            "stack": None,
        }
        if state == "running":
            for extra in self._extra:
                status |= extra()
            if idle_s > self._progress_timeout_s:
                status["stack"] = dump_stacks()
        return status

    def _rates(self, now: float) -> dict[str, float | None]:
        """Steps and updates per second over the last RATE_S."""
        past = self._past
        past.append((now, self._step or 0, self._update or 0))
        while len(past) > 2 and now - past[1][0] >= RATE_S:
            past.popleft()
        since, step, update = past[0]
        if now - since < self._heartbeat_s / 2:
            return {"steps_per_s": None, "updates_per_s": None}
        steps, updates = past[-1][1] - step, past[-1][2] - update
        return {"steps_per_s": steps / (now - since), "updates_per_s": updates / (now - since)}

    def _write(self, status: Mapping[str, Any]) -> None:
        """Replace the file. A full disk must not end the run, so errors are only logged."""
        assert self.path is not None
        try:
            files.write_atomically(self.path, json.dumps(status).encode())
        except OSError as error:
            if not self._warned:
                logger.warning("%s: cannot be written (%s); the run continues without it", self.path, error)
            self._warned = True


def _memory_bytes() -> int:
    """The resident memory now; where the system does not report it, the peak so far."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    except (OSError, IndexError, ValueError):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


# ---- reading

ProcessState: TypeAlias = Literal["running", "stuck", "silent", "gone", "ended", "failed"]


@dataclass(frozen=True, kw_only=True)
class ProcessStatus:
    """The state of a process, derived from its health file and the clock.

    running; stuck (no progress, see the stack); silent (no heartbeat: stopped, swapped out, or on a machine that cannot
    be reached); gone (killed: there is no such process); ended; failed.
    """

    state: ProcessState
    silent_s: float  # seconds since the last heartbeat
    idle_s: float  # seconds without progress at the last heartbeat
    content: Mapping[str, Any]  # of the health file


def read_health(directory: Path) -> list[ProcessStatus]:
    """The status of every process with a health file in a directory, by file name. Unreadable files are skipped."""
    found = []
    for path in sorted(directory.glob("*.json")):
        try:
            found.append(_status(json.loads(path.read_text()), time.time()))
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return found


def _status(content: Mapping[str, Any], now_s: float) -> ProcessStatus:
    silent_s = max(now_s - float(content["beat_s"]), 0.0)
    idle_s = max(float(content["beat_s"]) - float(content["progress_s"]), 0.0)
    state: ProcessState
    if content["state"] in ("ended", "failed"):
        state = "failed" if content["state"] == "failed" else "ended"
    elif content["host"] == platform.node() and not _is_alive(int(content["pid"])):
        state = "gone"
    elif silent_s > HEARTBEAT_TIMEOUT_S:
        state = "silent"
    else:
        state = "stuck" if idle_s > float(content["stuck_after_s"]) else "running"
    return ProcessStatus(state=state, silent_s=silent_s, idle_s=idle_s, content=content)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it exists and belongs to another user
        return True
    return True

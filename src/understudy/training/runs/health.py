"""Health: what a process is doing now, in a small file beside the run, for people and for the page that watches.

    with Health(run.path / HEALTH, role="learner", name="rlpd") as health:
        health.progress("learning", update=7)

The main loop calls `progress`, which only remembers. A thread of its own puts it into `<role>-<name>.json` every
BEAT_S seconds. If there was no progress for STUCK_S, it adds the stacks of all threads: a hang shows where it hangs. A
process that is killed leaves a file whose beat is old; `look` reads the files and says which is which.

| loop | takes from | blocks on | woken by |
|---|---|---|---|
| beat | what `progress` remembered | the clock | each BEAT_S; the end |

One limit is enough for all that is done, since every step and every update is progress, in evaluations too, and whoever
waits says so each time it looks. What takes longer in one go (a big checkpoint, a first simulator) shows its stack for
that long, and is no error.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import resource
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Literal, TypeAlias
from urllib.parse import quote

from understudy import __version__

logger = logging.getLogger(__name__)

HEALTH = "health"  # the directory, in that of a run or a store
BEAT_S = 2.0
STUCK_S = 30.0  # without progress
SILENT_S = 15.0  # without a beat: several were missed, also on a busy machine
RATE_S = 10.0  # over which rates are taken
MAX_STACK = 50_000  # characters

# What else there is to say; called from the thread that beats.
Facts: TypeAlias = Callable[[], Mapping[str, Any]]


class Health:
    """What one process is doing. Without a directory it is kept to itself.

    `start` begins the file, and `close` ends it. As a context manager it tells of the error that ended it, too.
    """

    def __init__(
        self, directory: Path | None, *, role: str, name: str, beat_s: float = BEAT_S, stuck_s: float = STUCK_S
    ):
        self.path = None if directory is None else directory / f"{role}-{quote(name, safe='')}.json"
        self.page: str | None = None  # where a person can see or drive what this process does
        self._role, self._name = role, name
        self._beat_s, self._stuck_s = beat_s, stuck_s
        self._started_s = time.time()
        self._doing = "starting"
        self._at = time.monotonic()
        self._step: int | None = None
        self._update: int | None = None
        self._version: int | None = None
        self._facts: list[Facts] = []
        self._past: deque[tuple[float, int, int]] = deque()
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._told = False  # of a file that cannot be written

    def progress(
        self, doing: str, step: int | None = None, update: int | None = None, policy_version: int | None = None
    ) -> None:
        """Something was done, or is looked for again. Costs less than a microsecond."""
        self._doing = doing
        self._at = time.monotonic()
        if step is not None:
            self._step = step
        if update is not None:
            self._update = update
        if policy_version is not None:
            self._version = policy_version

    def now(self) -> dict[str, Any]:
        """What the file would say."""
        return self._now("running")

    def add(self, facts: Facts) -> None:
        """Ask this too at each beat; it must be fast, and safe to call from another thread."""
        self._facts.append(facts)

    # ---- from start to end

    def start(self) -> Health:
        if self.path is not None and self._thread is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._write(self._now("running"))
            self._thread = threading.Thread(target=self._beat, name="health", daemon=True)
            self._thread.start()
        return self

    def close(self, error: BaseException | None = None) -> None:
        """The last word: it ended, or failed with an error."""
        if self._thread is None:
            return
        self._over.set()
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

    def _beat(self) -> None:
        while not self._over.wait(self._beat_s):
            self._write(self._now("running"))

    def _now(self, state: str, error: BaseException | None = None) -> dict[str, Any]:
        now, wall_s = time.monotonic(), time.time()
        idle_s = now - self._at
        said: dict[str, Any] = {
            "role": self._role,
            "name": self._name,
            "state": state,
            "pid": os.getpid(),
            "host": platform.node(),
            "version": __version__,
            "started_s": self._started_s,
            "beat_s": wall_s,
            "progress_s": wall_s - idle_s,
            "stuck_after_s": self._stuck_s,
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
            for facts in self._facts:
                said |= facts()
            if idle_s > self._stuck_s:
                said["stack"] = stacks()
        return said

    def _rates(self, now: float) -> dict[str, float | None]:
        """Steps and updates a second, over the last RATE_S."""
        past = self._past
        past.append((now, self._step or 0, self._update or 0))
        while len(past) > 2 and now - past[1][0] >= RATE_S:
            past.popleft()
        since, step, update = past[0]
        if now - since < self._beat_s / 2:
            return {"steps_per_s": None, "updates_per_s": None}
        steps, updates = past[-1][1] - step, past[-1][2] - update
        return {"steps_per_s": steps / (now - since), "updates_per_s": updates / (now - since)}

    def _write(self, said: Mapping[str, Any]) -> None:
        """Replace the file. A disk that is full must not end a run that could go on."""
        assert self.path is not None
        new = self.path.with_name(f".{self.path.name}.new")
        try:
            new.write_text(json.dumps(said))
            new.replace(self.path)
        except OSError as error:
            if not self._told:
                logger.warning("%s: cannot be written (%s); the run goes on without it", self.path, error)
            self._told = True


def stacks() -> str:
    """Where each thread of this process is, the main one first; the one that asks is left out."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    found = [pair for pair in sys._current_frames().items() if pair[0] != threading.get_ident()]
    found.sort(key=lambda pair: (pair[0] != main, names.get(pair[0], "")))
    return "\n".join(_stack(names.get(ident, str(ident)), frame) for ident, frame in found)[:MAX_STACK]


def _stack(name: str, frame: FrameType) -> str:
    return f"thread {name}\n{''.join(traceback.format_stack(frame))}"


def _memory_bytes() -> int:
    """Now in memory; where the system does not say that, the most that ever was."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    except (OSError, IndexError, ValueError):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


# ---- whoever watches

State: TypeAlias = Literal["running", "stuck", "silent", "gone", "ended", "failed"]


@dataclass(frozen=True, kw_only=True)
class Seen:
    """A process as its file and the clock tell: running; stuck (no progress, see the stack); silent (no beat: stopped,
    swapped out, or on a machine that cannot be reached); gone (killed: there is no such process); ended; failed."""

    state: State
    silent_s: float  # since its last beat
    idle_s: float  # without progress, when it last beat
    said: Mapping[str, Any]


def look(directory: Path) -> list[Seen]:
    """The processes that have a file here, by name. A file that makes no sense is left out."""
    found = []
    for path in sorted(directory.glob("*.json")):
        try:
            said = json.loads(path.read_text())
            found.append(_seen(said, time.time()))
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return found


def _seen(said: Mapping[str, Any], now_s: float) -> Seen:
    silent_s = max(now_s - float(said["beat_s"]), 0.0)
    idle_s = max(float(said["beat_s"]) - float(said["progress_s"]), 0.0)
    state: State
    if said["state"] in ("ended", "failed"):
        state = "failed" if said["state"] == "failed" else "ended"
    elif said["host"] == platform.node() and not _is_there(int(said["pid"])):
        state = "gone"
    elif silent_s > SILENT_S:
        state = "silent"
    else:
        state = "stuck" if idle_s > float(said["stuck_after_s"]) else "running"
    return Seen(state=state, silent_s=silent_s, idle_s=idle_s, said=said)


def _is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it is somebody else's
        return True
    return True

"""Cluster file: what the driver of a run on many machines writes, read without trust in a single field of it.

`cluster.json` is replaced as a whole every two seconds, `cluster.jsonl` grows by a line an event. Either may be
missing, damaged, cut off, of another version, or left behind by a driver that is gone: what makes no sense gets its
default, and what is no entry at all is left out.
"""

from __future__ import annotations

import json
import os
import platform
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar

from understudy.cluster.status import EVENTS, NOW
from understudy.training.runs.health import HEARTBEAT_TIMEOUT_S

MAX_BYTES = 64 * 2**20  # a thousand stacks
TAIL_BYTES = 2**20  # of the events, from the end
MAX_STACK = 50_000  # characters

Made = TypeVar("Made", "Node", "Role", "Shard", "Counts", "Event", "_Top")
State: TypeAlias = Literal["running", "silent", "gone", "ended", "failed"]


@dataclass(frozen=True, kw_only=True)
class Node:
    """A machine."""

    id: str = ""
    host: str = ""
    address: str = ""
    alive: bool = False
    cpus: float = 0.0
    free_cpus: float = 0.0
    gpus: float = 0.0
    free_gpus: float = 0.0
    memory_bytes: int = 0
    seen_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Role:
    """A process that has something to do: a learner, a rollout worker, a shard."""

    role: str = ""
    name: str = ""
    node: str | None = None
    pid: int | None = None
    state: str = "starting"
    doing: str = ""
    since_s: float = 0.0
    restarts: int = 0
    error: str | None = None
    stack: str | None = None


@dataclass(frozen=True, kw_only=True)
class Shard:
    """A store of the run."""

    name: str = ""
    node: str | None = None
    address: str = ""
    path: str = ""
    state: str = "gone"
    steps: int = 0
    commit: int = 0
    lost_steps: int = 0


@dataclass(frozen=True, kw_only=True)
class Counts:
    """What went wrong and was mended, since the run began."""

    restarts: int = 0
    reissued: int = 0
    fenced: int = 0
    nodes_lost: int = 0


@dataclass(frozen=True, kw_only=True)
class Event:
    """A line of the log."""

    time_s: float = 0.0
    what: str = ""
    name: str = ""
    text: str = ""
    stack: str | None = None


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """All of it, as the driver saw it last."""

    updated_s: float
    pid: int | None
    host: str
    address: str
    said: str  # by the driver: running, ended or failed
    error: str | None
    config: Mapping[str, Any]
    nodes: tuple[Node, ...]
    roles: tuple[Role, ...]
    shards: tuple[Shard, ...]
    counts: Counts

    @property
    def silent_s(self) -> float:
        """Since the driver wrote it."""
        return max(time.time() - self.updated_s, 0.0)

    @property
    def state(self) -> State:
        """How the driver is: a process of this machine that is not there is gone, one that writes no more is silent."""
        if self.said in ("ended", "failed"):
            return "failed" if self.said == "failed" else "ended"
        if self.pid is not None and self.host == platform.node() and not _is_there(self.pid):
            return "gone"
        return "silent" if self.silent_s > HEARTBEAT_TIMEOUT_S else "running"


def _is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True


class ClusterFile:
    """The file of a run; parsed again only when it has changed."""

    def __init__(self, run: Path):
        self._path, self._events = run / NOW, run / EVENTS
        self._lock = threading.Lock()
        self._stamp: tuple[int, int, int] | None = None
        self._found: Cluster | None = None
        self.problem: str | None = None  # why there is nothing, though there is a file

    @property
    def exists(self) -> bool:
        return self._path.is_file()

    def read(self) -> Cluster | None:
        """The cluster; None if there is no file, or none that makes sense."""
        with self._lock:
            try:
                with self._path.open("rb") as file:
                    said = os.fstat(file.fileno())
                    stamp = said.st_ino, said.st_size, said.st_mtime_ns
                    if stamp != self._stamp:
                        self._found, self.problem = _parse(file.read(MAX_BYTES + 1))
                        self._stamp = stamp
            except FileNotFoundError:
                self._stamp, self._found, self.problem = None, None, None
            except OSError as error:
                self._stamp, self._found, self.problem = None, None, f"it cannot be read ({error.strerror})"
            return self._found

    def events(self, most: int) -> tuple[list[Event], bool]:
        """The newest, newest first; and whether there are older ones."""
        try:
            with self._events.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(size - TAIL_BYTES, 0))
                lines = file.read(TAIL_BYTES).split(b"\n")
        except OSError:
            return [], False
        cut = size > TAIL_BYTES
        found = [event for line in lines[1 if cut else 0 :] if (event := _event(line)) is not None]
        return found[: -most - 1 : -1], cut or len(found) > most


def _event(line: bytes) -> Event | None:
    try:
        return make(Event, json.loads(line))
    except (ValueError, RecursionError):
        return None


def _parse(data: bytes) -> tuple[Cluster | None, str | None]:
    if len(data) > MAX_BYTES:
        return None, f"it has more than {MAX_BYTES // 2**20} MB"
    try:
        said = json.loads(data)
    except (ValueError, RecursionError):
        return None, "it is not JSON: damaged, or not written by this program"
    if not isinstance(said, Mapping):
        return None, "it is JSON, but not an object"
    top = make(_Top, said)
    assert top is not None
    found = Cluster(
        updated_s=top.updated_s,
        pid=top.pid,
        host=top.host,
        address=top.address,
        said=top.state,
        error=top.error,
        config=said["config"] if isinstance(said.get("config"), Mapping) else {},
        nodes=_all(Node, said, "nodes"),
        roles=_all(Role, said, "roles"),
        shards=_all(Shard, said, "shards"),
        counts=make(Counts, said.get("counts")) or Counts(),
    )
    return found, None


@dataclass(frozen=True, kw_only=True)
class _Top:
    updated_s: float = 0.0
    pid: int | None = None
    host: str = ""
    address: str = ""
    state: str = "running"
    error: str | None = None


def _all(kind: type[Made], said: Mapping[str, Any], name: str) -> tuple[Made, ...]:
    there = said.get(name)
    if not isinstance(there, list):
        return ()
    return tuple(made for one in there if (made := make(kind, one)) is not None)


def _text(value: Any) -> str | None:
    return value[:MAX_STACK] if isinstance(value, str) else None


def _whole(value: Any) -> int | None:
    found = _number(value)
    return None if found is None or not found.is_integer() else int(value)


def _number(value: Any) -> float | None:
    fits = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 2**63  # so it is finite
    return float(value) if fits else None


_FITS: dict[str, Callable[[Any], Any]] = {
    "str": _text,
    "int": _whole,
    "float": _number,
    "bool": lambda value: value if isinstance(value, bool) else None,
}


def make(kind: type[Made], said: Any) -> Made | None:
    """One entry from what was said; a field that is missing or does not fit has its default."""
    if not isinstance(said, Mapping):
        return None
    found = {one.name: _FITS[str(one.type).removesuffix(" | None")](said.get(one.name)) for one in fields(kind)}
    return kind(**{name: value for name, value in found.items() if value is not None})

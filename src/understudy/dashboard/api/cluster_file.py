"""Cluster file: the status that the driver of a run on a cluster writes, read without trust in any field of it.

The driver replaces `cluster.json` every two seconds and appends a line to `cluster.jsonl` for each event. Either file
may be missing, damaged, cut off, of another version, or left behind by a driver that is gone. A field that is missing
or of a wrong type gets its default, and an entry that is no object is left out.
"""

from __future__ import annotations

import json
import os
import platform
import threading
import time
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar

from understudy.cluster.status import EVENTS_FILE, STATUS_FILE, ClusterStatus, Event
from understudy.training.runs.health import HEARTBEAT_TIMEOUT_S

MAX_BYTES = 64 * 2**20  # a thousand stacks
TAIL_BYTES = 2**20  # of the events, from the end
MAX_TEXT = 50_000  # characters, as of a stack

Entry = TypeVar("Entry")
DriverState: TypeAlias = Literal["running", "silent", "gone", "ended", "failed"]


@dataclass(frozen=True, kw_only=True)
class Cluster(ClusterStatus):
    """The status that the driver wrote last, and whether the driver still lives."""

    @property
    def silent_s(self) -> float:
        """Seconds since the driver wrote it."""
        return max(time.time() - self.updated_s, 0.0)

    @property
    def driver_state(self) -> DriverState:
        """A driver is gone if its process is not on this machine any more, and silent if it has stopped to write."""
        if self.state in ("ended", "failed"):
            return "failed" if self.state == "failed" else "ended"
        if self.pid is not None and self.host == platform.node() and not _is_alive(self.pid):
            return "gone"
        return "silent" if self.silent_s > HEARTBEAT_TIMEOUT_S else "running"


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True


class ClusterFile:
    """The status file of a run; parsed again only when it has changed."""

    def __init__(self, run: Path):
        self._path, self._events = run / STATUS_FILE, run / EVENTS_FILE
        self._lock = threading.Lock()
        self._stamp: tuple[int, int, int] | None = None
        self._found: Cluster | None = None
        self.problem: str | None = None  # why a file that exists cannot be used

    @property
    def exists(self) -> bool:
        return self._path.is_file()

    def read(self) -> Cluster | None:
        """The status; None if there is no file, or none that can be used."""
        with self._lock:
            try:
                with self._path.open("rb") as file:
                    stat = os.fstat(file.fileno())
                    stamp = stat.st_ino, stat.st_size, stat.st_mtime_ns
                    if stamp != self._stamp:
                        self._found, self.problem = _parse(file.read(MAX_BYTES + 1))
                        self._stamp = stamp
            except FileNotFoundError:
                self._stamp, self._found, self.problem = None, None, None
            except OSError as error:
                self._stamp, self._found, self.problem = None, None, f"it cannot be read ({error.strerror})"
            return self._found

    def events(self, most: int) -> tuple[list[Event], bool]:
        """The newest events, newest first; and whether there are older ones."""
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
        return read_untrusted(Event, json.loads(line))
    except (ValueError, RecursionError):
        return None


def _parse(data: bytes) -> tuple[Cluster | None, str | None]:
    if len(data) > MAX_BYTES:
        return None, f"it has more than {MAX_BYTES // 2**20} MB"
    try:
        found = read_untrusted(Cluster, json.loads(data))
    except (ValueError, RecursionError):
        return None, "it is not JSON: damaged, or not written by this program"
    return found, "it is JSON, but not an object" if found is None else None


# ---- values of a file that may hold anything


def read_untrusted(kind: type[Entry], value: object) -> Entry | None:
    """A dataclass from parsed JSON; None if that is no object. A field that does not fit gets its default."""
    if not isinstance(value, Mapping):
        return None
    readers = _readers(typing.cast(Any, kind))
    found = {name: read(value.get(name)) for name, read in readers.items()}
    return kind(**{name: field for name, field in found.items() if field is not None})


@cache
def _readers(kind: type) -> dict[str, Callable[[Any], Any]]:
    return {name: _reader(hint) for name, hint in typing.get_type_hints(kind).items()}


def _reader(hint: Any) -> Callable[[Any], Any]:
    """A function from a parsed value to a field of this type, or None if the value does not fit."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is types.UnionType:  # X | None
        return _reader(inner[0])
    if origin is tuple:
        return lambda value: _entries(inner[0], value)
    if is_dataclass(hint):
        return lambda value: read_untrusted(typing.cast(type, hint), value)
    return _SCALARS[origin or hint]


def _entries(kind: type[Entry], value: object) -> tuple[Entry, ...]:
    found = value if isinstance(value, list) else []
    return tuple(entry for one in found if (entry := read_untrusted(kind, one)) is not None)


def _integer(value: Any) -> int | None:
    found = _number(value)
    return None if found is None or not found.is_integer() else int(value)


def _number(value: Any) -> float | None:
    fits = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 2**63  # so it is finite
    return float(value) if fits else None


_SCALARS: dict[Any, Callable[[Any], Any]] = {
    str: lambda value: value[:MAX_TEXT] if isinstance(value, str) else None,
    int: _integer,
    float: _number,
    bool: lambda value: value if isinstance(value, bool) else None,
    Mapping: lambda value: value if isinstance(value, Mapping) else None,
}

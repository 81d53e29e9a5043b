"""Curves: follows a run's metrics file while it grows, in bounded memory.

A resumed run removes the lines after its checkpoint, and a new run replaces the file. In both cases the file became
shorter or its last known bytes changed, and it is read again from the start.
"""

from __future__ import annotations

import json
import math
import os
import threading
from collections import deque
from pathlib import Path
from typing import Any, BinaryIO

from understudy.dashboard.api.rollout_groups import RolloutGroups

MAX_BINS = 400  # of a curve; when there are more, neighbours are merged
MAX_EVALUATIONS = 500
MAX_KINDS = 20  # of lines
MAX_TASKS = 1000  # of an evaluation
BLOCK_BYTES = 2**20
MAX_LINE_BYTES = 8 * 2**20
MARK_BYTES = 256  # the last ones that were read; if they change, the file was rewritten


class Bins:
    """Means of numbers over steps, in a bounded number of bins of equally many lines."""

    def __init__(self, most: int = MAX_BINS):
        self._most = most
        self._size = 1  # lines in a bin
        self._bins: list[_Bin] = []

    def add(self, step: int, update: int, values: dict[str, float]) -> None:
        if not self._bins or self._bins[-1].lines >= self._size:
            if len(self._bins) >= self._most:
                self._size *= 2
                pairs = zip(self._bins[::2], self._bins[1::2], strict=True)
                self._bins = [one.merged(other) for one, other in pairs]
            if not self._bins or self._bins[-1].lines >= self._size:
                self._bins.append(_Bin())
        self._bins[-1].add(step, update, values)

    def to_json(self) -> dict[str, Any]:
        """Columns: `step`, `update`, and the mean of each number, None where a bin has none."""
        names = sorted({name for one in self._bins for name in one.sums})
        return {
            "step": [one.step for one in self._bins],
            "update": [one.update for one in self._bins],
            "values": {name: [one.mean(name) for one in self._bins] for name in names},
        }


class _Bin:
    __slots__ = ("lines", "step", "sums", "update")

    def __init__(self) -> None:
        self.lines, self.step, self.update = 0, 0, 0
        self.sums: dict[str, tuple[float, int]] = {}

    def add(self, step: int, update: int, values: dict[str, float]) -> None:
        self.lines += 1
        self.step, self.update = step, update
        for name, value in values.items():
            total, number = self.sums.get(name, (0.0, 0))
            self.sums[name] = (total + value, number + 1)

    def merged(self, later: _Bin) -> _Bin:
        both = _Bin()
        both.lines, both.step, both.update = self.lines + later.lines, later.step, later.update
        both.sums = dict(self.sums)
        for name, (total, number) in later.sums.items():
            before, count = both.sums.get(name, (0.0, 0))
            both.sums[name] = (before + total, count + number)
        return both

    def mean(self, name: str) -> float | None:
        total, number = self.sums.get(name, (0.0, 0))
        return total / number if number else None


class MetricsFollower:
    """The content of a metrics file so far. Any number of threads may call `follow`."""

    def __init__(self, path: Path):
        self.path = path
        self._lock = threading.Lock()
        self._content = _Content()

    def follow(self) -> dict[str, Any]:
        """Read the new lines; returns curves by kind of line, last lines, evaluations and rollout groups."""
        with self._lock:
            try:
                with self.path.open("rb") as file:
                    inode = os.fstat(file.fileno()).st_ino
                    if not self._content.is_continued_by(file, inode):
                        self._content = _Content(inode)
                    self._content.read(file)
            except OSError:
                self._content = _Content()
            return self._content.to_json()


class _Content:
    """The lines of one file, up to an offset."""

    def __init__(self, inode: int = 0) -> None:
        self._inode = inode
        self._offset = 0
        self._mark = b""  # the last bytes before the offset
        self._skipping = False  # a line that is too long
        self._num_damaged = 0
        self._bins: dict[str, Bins] = {}  # by kind of line
        self._last: dict[str, dict[str, Any]] = {}
        self._evaluations: deque[dict[str, Any]] = deque(maxlen=MAX_EVALUATIONS)
        self._groups = RolloutGroups()

    def to_json(self) -> dict[str, Any]:
        return {
            "curves": {kind: bins.to_json() for kind, bins in self._bins.items()},
            "last": dict(self._last),
            "evaluations": list(self._evaluations),
            "rollout_groups": self._groups.to_json(),
            "num_damaged": self._num_damaged,
        }

    def is_continued_by(self, file: BinaryIO, inode: int) -> bool:
        """Whether the file still begins with the lines that were read."""
        if inode != self._inode:
            return False
        file.seek(self._offset - len(self._mark))
        return file.read(len(self._mark)) == self._mark

    def read(self, file: BinaryIO) -> None:
        """Read the complete lines after the offset."""
        file.seek(self._offset)
        rest = b""
        while block := file.read(BLOCK_BYTES):
            *lines, rest = (rest + block).split(b"\n")
            for line in lines:
                self._offset += len(line) + 1
                self._mark = (self._mark + line + b"\n")[-MARK_BYTES:]
                if not self._skipping:
                    self._add_line(line)
                self._skipping = False
            if len(rest) > MAX_LINE_BYTES:
                self._offset += len(rest)
                self._mark = rest[-MARK_BYTES:]
                self._num_damaged += not self._skipping
                self._skipping, rest = True, b""

    def _add_line(self, text: bytes) -> None:
        try:
            line = json.loads(text)
            kind, step, update = str(line["kind"]), int(line["step"]), int(line["update"])
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            self._num_damaged += 1
            return
        numbers = {
            name: float(value)
            for name, value in line.items()
            if name not in ("step", "update", "batch_digest")
            and isinstance(value, int | float)
            and math.isfinite(value)
        }
        if kind not in self._bins and len(self._bins) >= MAX_KINDS:
            return
        if kind == "collection":
            numbers |= self._groups.add(line)
        self._bins.setdefault(kind, Bins()).add(step, update, numbers)
        episodes = line.pop("episode_results", None)
        self._last[kind] = line
        if kind == "evaluation":
            iteration = self._groups.num_iterations  # the last one before the evaluation
            self._evaluations.append({**line, "iteration": iteration, "tasks": _by_task(episodes)})


def _by_task(episodes: Any) -> dict[str, list[int]]:
    """Successes and episodes of each task."""
    found: dict[str, list[int]] = {}
    for episode in episodes if isinstance(episodes, list) else ():
        if isinstance(episode, dict) and len(found) < MAX_TASKS:
            counts = found.setdefault(str(episode.get("task")), [0, 0])
            counts[0] += bool(episode.get("success"))
            counts[1] += 1
    return found

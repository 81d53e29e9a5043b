"""Curves: a run's metrics file, followed while it grows, in bounded memory.

A file that became shorter, or whose last known line is no longer there, belongs to a run that was resumed (it takes
back the lines behind its checkpoint) or begun anew: it is read again from the start.
"""

from __future__ import annotations

import json
import math
import os
import threading
from collections import deque
from pathlib import Path
from typing import Any

from understudy.dashboard.api.rollout_groups import Practice

MAX_BINS = 400  # of a curve; when there are more, neighbours are merged
MAX_EVALUATIONS = 500
BLOCK_BYTES = 2**20
MAX_LINE_BYTES = 8 * 2**20
MARK_BYTES = 256  # before the place up to which it was read; if they change, the file was rewritten


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
    """What a metrics file says so far. Any number of threads may `follow`."""

    def __init__(self, path: Path):
        self.path = path
        self._lock = threading.Lock()
        self._begin()

    def _begin(self) -> None:
        self._offset = 0
        self._mark = b""
        self._inode = 0
        self._skipping = False  # a line that is too long
        self._num_damaged = 0
        self._bins: dict[str, Bins] = {}  # by kind of line
        self._last: dict[str, dict[str, Any]] = {}
        self._evaluations: deque[dict[str, Any]] = deque(maxlen=MAX_EVALUATIONS)
        self._practice = Practice()

    def follow(self) -> dict[str, Any]:
        """Take in what is new; returns all that is known: curves by kind of line, last lines, evaluations, groups."""
        with self._lock:
            try:
                with self.path.open("rb") as file:
                    if not self._goes_on(file):
                        self._begin()
                    self._inode = os.fstat(file.fileno()).st_ino
                    file.seek(self._offset)
                    self._read(file)
            except OSError:
                self._begin()
            return {
                "curves": {kind: bins.to_json() for kind, bins in self._bins.items()},
                "last": dict(self._last),
                "evaluations": list(self._evaluations),
                "practice": self._practice.to_json(),
                "num_damaged": self._num_damaged,
            }

    def _goes_on(self, file: Any) -> bool:
        if os.fstat(file.fileno()).st_ino != self._inode:
            return False
        file.seek(self._offset - len(self._mark))
        return bool(file.read(len(self._mark)) == self._mark)

    def _read(self, file: Any) -> None:
        rest = b""
        while block := file.read(BLOCK_BYTES):
            *lines, rest = (rest + block).split(b"\n")
            for line in lines:
                self._offset += len(line) + 1
                self._mark = (self._mark + line + b"\n")[-MARK_BYTES:]
                if not self._skipping:
                    self._take(line)
                self._skipping = False
            if len(rest) > MAX_LINE_BYTES:
                self._offset += len(rest)
                self._mark = rest[-MARK_BYTES:]
                self._num_damaged += not self._skipping
                self._skipping, rest = True, b""

    def _take(self, line: bytes) -> None:
        try:
            said = json.loads(line)
            kind, step, update = str(said["kind"]), int(said["step"]), int(said["update"])
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            self._num_damaged += 1
            return
        numbers = {
            name: float(value)
            for name, value in said.items()
            if isinstance(value, int | float) and name not in ("step", "update", "batch") and math.isfinite(value)
        }
        if kind not in self._bins and len(self._bins) >= 20:
            return
        if kind == "collection":
            numbers |= self._practice.add(said)
        self._bins.setdefault(kind, Bins()).add(step, update, numbers)
        trials = said.pop("trials", None)
        self._last[kind] = said
        if kind == "evaluation":
            iteration = self._practice.num_iterations  # after which it was
            self._evaluations.append({**said, "iteration": iteration, "tasks": _by_task(trials)})


def _by_task(trials: Any) -> dict[str, list[int]]:
    """Successes and episodes of each task."""
    found: dict[str, list[int]] = {}
    for trial in trials if isinstance(trials, list) else ():
        if isinstance(trial, dict) and len(found) < 1000:
            tally = found.setdefault(str(trial.get("task")), [0, 0])
            tally[0] += bool(trial.get("success"))
            tally[1] += 1
    return found

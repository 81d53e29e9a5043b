"""Bench of the store: the cost of a durable commit, compared with the system calls that any durable store needs.

Three ways bring the same steps to the same disk, in turns, so that other load on the machine affects all of them:

- bare: one pwrite of the user's bytes and one fdatasync for each commit, into a file that has its size already;
- `Store.commit` of a ready-made chunk;
- `Writer.append`, step by step, with its checks and copies, and a commit with the last step.
"""

from __future__ import annotations

import os
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from understudy.core import EpisodeInfo, Step, StepSpec, UnderstudyError
from understudy.core.episode import stack
from understudy.core.examples import random_steps, robot_spec
from understudy.replay.format.chunk import Chunk, Part
from understudy.replay.write.store import Store

# The bare file gets its size as a hole or with its blocks reserved; which is faster depends on the file system.
SPARSE, RESERVED = "bare, sparse", "bare, reserved"
COMMIT = "Store.commit"
APPEND = "Writer.append"
WAYS = (SPARSE, RESERVED, COMMIT, APPEND)


@dataclass(frozen=True, kw_only=True)
class BenchConfig:
    """Where and how much to measure."""

    directory: Path
    rounds: int
    commits: int  # of each way, in each round
    commit_steps: int

    def __post_init__(self) -> None:
        for name in ("rounds", "commits", "commit_steps"):
            if getattr(self, name) < 1:
                raise UnderstudyError(f"{name}: expected at least 1, got {getattr(self, name)}")

    @property
    def num_turns(self) -> int:
        return self.rounds * len(WAYS)


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Of one commit: the mean of a turn, or the median of the turns."""

    wall_s: float
    cpu_s: float  # of this process, with the system's work for it


@dataclass(frozen=True, kw_only=True)
class BenchResult:
    """What was measured, round by round."""

    commit_bytes: int  # of observations and actions
    rounds: Mapping[str, tuple[Cost, ...]]  # by way

    def cost(self, way: str) -> Cost:
        """The median over the rounds."""
        found = self.rounds[way]
        return Cost(wall_s=statistics.median(c.wall_s for c in found), cpu_s=statistics.median(c.cpu_s for c in found))

    @property
    def bare(self) -> str:
        """The faster of the bare ways."""
        return min(SPARSE, RESERVED, key=lambda way: self.cost(way).wall_s)

    def ratio(self, way: str) -> float:
        """Bare time divided by the time of a way, within each round; the median over the rounds."""
        return statistics.median(
            bare.wall_s / cost.wall_s for bare, cost in zip(self.rounds[self.bare], self.rounds[way], strict=True)
        )


def measure(config: BenchConfig, on_turn: Callable[[], None]) -> BenchResult:
    """Measure all ways in turns; `on_turn` is called after each of the `num_turns`."""
    spec = robot_spec()
    steps = [replace(step, terminated=False) for step in random_steps(spec, config.commit_steps, seed=0)[0]]
    rows = [spec.row(step) for step in steps]
    columns = {path: stack([row[path] for row in rows], leaf) for path, leaf in spec.columns.items()}
    user = b"".join(columns[path].tobytes() for path in columns if path.startswith(("observation", "action")))
    ways: dict[str, Callable[[], Cost]] = {
        SPARSE: lambda: _bare(config, user, reserve=False),
        RESERVED: lambda: _bare(config, user, reserve=True),
        COMMIT: lambda: _commit(config, spec, columns),
        APPEND: lambda: _append(config, spec, steps),
    }
    rounds: dict[str, list[Cost]] = {way: [] for way in WAYS}
    for _ in range(config.rounds):
        for way in WAYS:
            rounds[way].append(ways[way]())
            on_turn()
    return BenchResult(commit_bytes=len(user), rounds={way: tuple(costs) for way, costs in rounds.items()})


def _bare(config: BenchConfig, user: bytes, *, reserve: bool) -> Cost:
    path = config.directory / "bare"
    size_bytes = config.commits * len(user)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        if reserve:
            os.posix_fallocate(fd, 0, size_bytes)
        else:
            os.ftruncate(fd, size_bytes)
        os.fsync(fd)

        def run() -> None:
            for offset in range(0, size_bytes, len(user)):
                if os.pwrite(fd, user, offset) != len(user):
                    raise UnderstudyError(f"{path}: the system wrote less than it was given; free some space")
                os.fdatasync(fd)

        return _timed(config, run)
    finally:
        os.close(fd)
        path.unlink()


def _commit(config: BenchConfig, spec: StepSpec, columns: Mapping[str, Any]) -> Cost:
    num_rows = config.commit_steps
    parts = [
        Part(episode=0, first_index=first, num_rows=num_rows, state="open", info=EpisodeInfo())
        for first in range(0, config.commits * num_rows, num_rows)
    ]
    chunks = [
        Chunk(writer="bench", incarnation="bench", seq=seq, spec=spec, columns=columns, parts=(part,))
        for seq, part in enumerate(parts)
    ]

    def run() -> None:
        for chunk in chunks:
            store.commit(chunk)

    with _fresh_store(config) as store:
        store.begin_writer("bench", "bench")
        return _timed(config, run)


def _append(config: BenchConfig, spec: StepSpec, steps: list[Step]) -> Cost:
    def run() -> None:
        for _ in range(config.commits):
            for step in steps:
                writer.append(step)

    with _fresh_store(config) as store:
        writer = store.writer("bench", spec, commit_steps=config.commit_steps)
        writer.begin()
        return _timed(config, run)


@contextmanager
def _fresh_store(config: BenchConfig) -> Iterator[Store]:
    path = config.directory / "store"
    try:
        with Store.open(path) as store:
            yield store
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _timed(config: BenchConfig, run: Callable[[], None]) -> Cost:
    wall, cpu = time.perf_counter(), time.process_time()
    run()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return Cost(wall_s=wall / config.commits, cpu_s=cpu / config.commits)

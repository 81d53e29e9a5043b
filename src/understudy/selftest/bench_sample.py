"""Bench of sampling: batches of transitions from a store, compared with the most that memory and disk can give.

- warm: ours against `numpy.take` from arrays in memory into arrays that are there already, CPU time;
- cold: ours against threads that `preadv` the same number of frames from the same files, nothing else, wall time, with
  the files out of the page cache on both sides;
- hidden: the fraction of the sampling time that a Prefetch hides from a consumer that keeps one core busy.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from understudy.core import Step, UnderstudyError
from understudy.core.examples import robot_spec
from understudy.core.tree import flatten
from understudy.replay.format.paths import segment_files
from understudy.replay.format.segment import read_layout
from understudy.replay.read.reader import Reader
from understudy.replay.read.view import EVERYTHING
from understudy.replay.sample.prefetch import Prefetch
from understudy.replay.sample.sampler import Sampler
from understudy.replay.write.store import Store

Array = np.ndarray[Any, Any]

CAMERAS = ("wrist_1", "wrist_2")
NUM_THREADS = 4
EPISODE_STEPS = 100


@dataclass(frozen=True, kw_only=True)
class SampleBenchConfig:
    """How much to measure."""

    directory: Path
    steps: int
    batch_size: int
    rounds: int

    def __post_init__(self) -> None:
        if self.steps < EPISODE_STEPS or self.batch_size < 1 or self.rounds < 1:
            raise UnderstudyError(
                f"bench sample: expected steps from {EPISODE_STEPS}, batch_size and rounds from 1, got {self.steps}, "
                f"{self.batch_size} and {self.rounds}"
            )


@dataclass(frozen=True, kw_only=True)
class SampleBenchResult:
    """Medians over the rounds, for one batch."""

    warm_cpu_s: float
    take_cpu_s: float
    cold_wall_s: float
    bare_wall_s: float
    hidden: float  # fraction of the sampling time

    @property
    def warm_ratio(self) -> float:
        return self.warm_cpu_s / self.take_cpu_s

    @property
    def cold_ratio(self) -> float:
        return self.bare_wall_s / self.cold_wall_s


def measure_sampling(config: SampleBenchConfig, on_phase: Callable[[str], None]) -> SampleBenchResult:
    """Fill a store and measure; `on_phase` is called with the name of each phase."""
    path = config.directory / "store"
    on_phase("writing the store")
    _fill(path, config.steps)
    on_phase("warm")
    warm, take = _warm(path, config)
    on_phase("cold")
    cold, bare = _cold(path, config)
    on_phase("prefetch")
    return SampleBenchResult(
        warm_cpu_s=warm, take_cpu_s=take, cold_wall_s=cold, bare_wall_s=bare, hidden=_hidden(path, config)
    )


def _fill(path: Path, num_steps: int) -> None:
    frames = np.random.default_rng(0).integers(0, 256, (64, 128, 128, 3), np.uint8)
    state, action = np.zeros(20, np.float32), np.zeros(7, np.float32)

    def see(number: int) -> dict[str, Any]:
        return {"wrist_1": frames[number % 64], "wrist_2": frames[number * 7 % 64], "state": state}

    with Store.open(path) as store:
        writer = store.writer("bench", robot_spec())
        for episode in range(num_steps // EPISODE_STEPS):
            writer.begin()
            for index in range(EPISODE_STEPS):
                last = index == EPISODE_STEPS - 1
                writer.append(Step(observation=see(episode + index), action=action, reward=0.0, truncated=last))
            writer.end(see(episode))


def _warm(path: Path, config: SampleBenchConfig) -> tuple[float, float]:
    """CPU seconds of a batch of ours, and of the same by numpy from memory."""
    memory = {name: np.zeros((config.steps, 128, 128, 3), np.uint8) for name in CAMERAS}
    small = {name: np.zeros((config.steps, size), np.float32) for name, size in (("state", 20), ("action", 7))}
    columns: dict[str, Array] = {**memory, **small}
    for array in columns.values():
        array[...] = 1  # zeros take no memory until they are written
    size = config.batch_size
    into = {name: [np.empty((size, *a.shape[1:]), a.dtype) for _ in range(2)] for name, a in columns.items()}
    rng = np.random.default_rng(1)

    def take() -> None:
        rows = rng.integers(0, config.steps - 1, size)
        for name, array in columns.items():
            np.take(array, rows, axis=0, out=into[name][0], mode="clip")
            if name != "action":
                np.take(array, rows + 1, axis=0, out=into[name][1], mode="clip")

    with Reader(path) as reader:
        sampler = Sampler(reader, EVERYTHING, batch_size=size, num_threads=NUM_THREADS)
        total = sampler.follow()
        batch = sampler.make()
        for _ in range(max(4 * total // size, 1)):  # until nearly every frame was read once
            sampler.sample(batch)
        ours, theirs = [], []
        for _ in range(config.rounds):
            ours.append(_cpu(lambda: sampler.sample(batch)))
            theirs.append(_cpu(take))
        sampler.close()
    return statistics.median(ours), statistics.median(theirs)


def _cpu(run: Callable[[], Any], times: int = 10) -> float:
    started = time.process_time()
    for _ in range(times):
        run()
    return (time.process_time() - started) / times


def _cold(path: Path, config: SampleBenchConfig) -> tuple[float, float]:
    """Wall seconds of a batch of ours, and of bare threaded reads of as many pairs of frames, both from disk."""
    files = [(os.open(file, os.O_RDONLY), read_layout(file)) for file in segment_files(path)]
    size = config.batch_size
    out = np.ones((len(CAMERAS), 2, size, 128, 128, 3), np.uint8)  # observation and next observation of each camera
    rng = np.random.default_rng(2)
    rows = min(layout.capacity for _, layout in files) // 2

    def read(items: Array) -> None:
        for item in items:
            fd, layout = files[int(item) % len(files)]
            for camera, name in enumerate(CAMERAS):
                for later in range(2):
                    offset = layout.columns[f"observation/{name}"].at(int(picked[item]) + later)
                    os.preadv(fd, [out[camera, later, item].data], offset)

    ours, bare = [], []
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        for number in range(config.rounds):
            _drop_cache(path)
            picked = rng.integers(0, rows, size)
            started = time.perf_counter()
            list(pool.map(read, np.array_split(np.arange(size), NUM_THREADS)))
            bare.append(time.perf_counter() - started)
            with Reader(path) as reader:
                sampler = Sampler(reader, EVERYTHING, batch_size=size, seed=number, num_threads=NUM_THREADS)
                sampler.follow()
                batch = sampler.make()
                sampler.sample(size=64)  # maps the segments, once for each
                for array in (*flatten(batch.observation).values(), *flatten(batch.next_observation).values()):
                    array[...] = 1  # as on the bare side, its memory is there
                _drop_cache(path)
                started = time.perf_counter()
                sampler.sample(batch)
                ours.append(time.perf_counter() - started)
                sampler.close()
    for fd, _ in files:
        os.close(fd)
    return statistics.median(ours), statistics.median(bare)


def _drop_cache(path: Path) -> None:
    """Drop the segments from the page cache."""
    for file in segment_files(path):
        fd = os.open(file, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def _hidden(path: Path, config: SampleBenchConfig) -> float:
    """The fraction of the sampling time that a consumer with one busy core does not wait for."""
    weights = np.random.default_rng(3).normal(size=(256, 256))

    def consume(until_s: float = 0.03) -> None:
        deadline = time.perf_counter() + until_s
        while time.perf_counter() < deadline:
            np.dot(weights[:64], weights)  # releases the interpreter lock, as training does

    def turn() -> None:
        next(ahead)
        consume()

    shares = []
    with Reader(path) as reader, Reader(path) as other:
        sampler = Sampler(reader, EVERYTHING, batch_size=config.batch_size, num_threads=NUM_THREADS)
        sampler.follow()
        batch = sampler.make()
        with Prefetch(Sampler(other, EVERYTHING, batch_size=config.batch_size, num_threads=NUM_THREADS)) as ahead:
            for _ in range(20):
                sampler.sample(batch)
                next(ahead)
            for _ in range(config.rounds):
                alone = _wall(lambda: sampler.sample(batch))
                working = _wall(consume)
                both = _wall(turn)
                shares.append(1 - max(both - working, 0.0) / alone)
        sampler.close()
    return statistics.median(shares)


def _wall(run: Callable[[], Any], times: int = 10) -> float:
    started = time.perf_counter()
    for _ in range(times):
        run()
    return (time.perf_counter() - started) / times

"""What a batch costs as a store grows from ten thousand steps to a hundred million, and what the index takes.

    python benchmarks/index_growth.py --sizes 10000 100000 1000000 10000000 100000000

Stores of small rows (four numbers seen, two done) in episodes of 100 rows are filled and kept open together; then each
gives batches of 256 transitions in turn. Beside each, `numpy.take` of the same fields from arrays in memory of the same
size: random rows of many columns cost more as they leave the processor's caches, whoever takes them.

Writes docs/benchmarks/index_growth.json and docs/images/index_growth.svg.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np

from understudy.core import EpisodeInfo
from understudy.core.examples import small_spec
from understudy.replay import Reader, Store
from understudy.replay.format.chunk import Chunk, Part
from understudy.replay.read.view import DEMO
from understudy.replay.sample.sampler import Sampler

ROOT = Path(__file__).parents[1]
SPEC = small_spec()
EPISODE_ROWS = 100
CHUNK_EPISODES = 50
BATCH_SIZE = 256


def fill(path: Path, num_steps: int) -> None:
    """Write `num_steps` rows in chunks that are made once."""
    rows = EPISODE_ROWS * CHUNK_EPISODES
    rng = np.random.default_rng(0)
    columns: dict[str, Any] = {
        name: np.zeros((rows, *leaf.fixed_shape), leaf.dtype) for name, leaf in SPEC.columns.items()
    }
    columns["observation"][...] = rng.normal(size=columns["observation"].shape)
    columns["is_step"][...] = True
    last = np.arange(EPISODE_ROWS - 1, rows, EPISODE_ROWS)
    columns["is_step"][last] = False
    columns["truncated"][last - 1] = True
    columns["source"][...] = np.arange(rows) // 25 % 4 == 2  # a human for a quarter of the steps
    with Store.open(path) as store:
        store.begin_writer("fill", "fill")
        for seq in range(max(num_steps // rows, 1)):
            parts = tuple(
                Part(
                    episode=seq * CHUNK_EPISODES + n,
                    first_index=0,
                    num_rows=EPISODE_ROWS,
                    state="ended",
                    info=EpisodeInfo(),
                )
                for n in range(CHUNK_EPISODES)
            )
            store.commit(Chunk(writer="fill", incarnation="fill", seq=seq, spec=SPEC, columns=columns, parts=parts))
            if seq % 1000 == 0:
                print(f"  {path.name}: {seq * rows:,} rows", flush=True)


def measure(sizes: list[int], work: Path, rounds: int) -> list[dict[str, float]]:
    samplers = {}
    points: dict[int, dict[str, float]] = {}
    for size in sizes:
        path = work / f"steps-{size}"
        print(f"filling {size:,} steps", flush=True)
        fill(path, size)
        reader = Reader(path)
        started = time.perf_counter()
        sampler = Sampler(reader, DEMO, batch_size=BATCH_SIZE, seed=1)
        count = sampler.follow()
        points[size] = {
            "steps": size,
            "in_view": count,
            "open_s": time.perf_counter() - started,
            "index_bytes_per_step": (sampler.step_index.num_bytes + sampler.index.num_bytes) / size,
        }
        samplers[size] = (sampler, sampler.make())
    ways: dict[tuple[str, int], Callable[[], Any]] = {}
    for size, (sampler, batch) in samplers.items():
        ways["batch_cpu_ms", size] = partial(sampler.sample, batch)
        ways["take_cpu_ms", size] = taking(size)
    costs: dict[tuple[str, int], list[float]] = {way: [] for way in ways}
    for way in ways.values():
        for _ in range(200):
            way()
    for _ in range(rounds):
        for key, way in ways.items():
            started = time.process_time()
            for _ in range(20):
                way()
            costs[key].append((time.process_time() - started) / 20)
    for (name, size), found in costs.items():
        points[size][name] = statistics.median(found) * 1e3
    return list(points.values())


def taking(size: int) -> Callable[[], None]:
    """The fields of a batch of transitions by numpy from memory, and nothing else."""
    columns = {name: np.zeros((size, *leaf.fixed_shape), leaf.dtype) for name, leaf in SPEC.columns.items()}
    for column in columns.values():
        column[...] = 1
    out = {name: np.empty((BATCH_SIZE, *column.shape[1:]), column.dtype) for name, column in columns.items()}
    rng = np.random.default_rng(2)

    def take() -> None:
        rows = rng.integers(0, size - 1, BATCH_SIZE)
        for name, column in columns.items():
            np.take(column, rows, axis=0, out=out[name], mode="clip")
        np.take(columns["observation"], rows + 1, axis=0, out=out["observation"], mode="clip")

    return take


def draw(points: list[dict[str, float]], path: Path) -> None:
    mpl.rcParams.update({"font.size": 10, "svg.fonttype": "none"})
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    steps = [point["steps"] for point in points]
    left.plot(steps, [point["batch_cpu_ms"] for point in points], "o-", color="#2a7fba", label="sampler")
    left.plot(steps, [point["take_cpu_ms"] for point in points], "s--", color="#888888", label="numpy.take, in memory")
    left.legend(frameon=False)
    left.set(title="a batch of 256 transitions, CPU ms", xscale="log", xlabel="steps in the store")
    left.set_ylim(0, max(point["batch_cpu_ms"] for point in points) * 1.3)
    right.plot(steps, [point["index_bytes_per_step"] for point in points], "o-", color="#c8553d")
    right.set(title="index, bytes a step (= MB for a million)", xscale="log", xlabel="steps in the store")
    right.set_ylim(0, max(point["index_bytes_per_step"] for point in points) * 1.3)
    for axis in (left, right):
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    figure.patch.set_facecolor("white")
    figure.savefig(path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[10**4, 10**5, 10**6, 10**7, 10**8])
    parser.add_argument("--work", type=Path, default=None, help="where to put the stores (removed afterwards)")
    parser.add_argument("--out", type=Path, default=ROOT / "docs")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    work = Path(tempfile.mkdtemp(prefix="index-growth-", dir=options.work))
    try:
        points = measure(options.sizes, work, options.rounds)
    finally:
        shutil.rmtree(work)
    growth = points[-1]["batch_cpu_ms"] / points[0]["batch_cpu_ms"]
    (options.out / "benchmarks").mkdir(parents=True, exist_ok=True)
    (options.out / "images").mkdir(parents=True, exist_ok=True)
    result = {"points": points, "growth": growth}
    (options.out / "benchmarks" / "index_growth.json").write_text(json.dumps(result, indent=2) + "\n")
    draw(points, options.out / "images" / "index_growth.svg")
    for point in points:
        print({name: round(value, 4) for name, value in point.items()})
    print(f"a batch costs {growth:.2f} times as much at {points[-1]['steps']:,} steps as at {points[0]['steps']:,}")
    return 0 if growth <= 1.5 else 1


if __name__ == "__main__":
    raise SystemExit(main())

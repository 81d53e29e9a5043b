"""How the cost of a commit, of following it and of opening a store grows with the episodes it holds.

    python benchmarks/catalog_scale.py                  # 10^3 to 10^6 episodes: 2 GB of disk and some minutes
    python benchmarks/catalog_scale.py --sizes 1000 10000 --out /tmp/results

The stores are filled first. Then each in turn takes one commit and one look, again and again, so that what else the
machine does falls on all of them. Writes `benchmarks/catalog_scale.json` and `images/catalog_scale.svg` below `--out`.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tyro
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from understudy.core import EpisodeInfo
from understudy.core.episode import stack
from understudy.core.examples import random_steps, small_spec
from understudy.replay import Reader, Store
from understudy.replay.format.chunk import Chunk, Part

MAX_GROWTH = 1.5  # of a commit and of a look, from the smallest store to the largest
MAX_OPEN_S = 5.0
COMMIT_ROWS = 10  # of the one episode in each measured commit


@dataclass(frozen=True, kw_only=True)
class Point:
    """One store. All times are medians."""

    episodes: int
    commit_wall_ms: float
    commit_cpu_ms: float
    follow_wall_ms: float
    follow_cpu_ms: float
    open_reader_s: float  # a Reader and its first `follow`: all spans and the ids of all episodes
    open_store_s: float
    catalog_bytes: int


def main(
    *,
    sizes: tuple[int, ...] = (1_000, 10_000, 100_000, 1_000_000),
    commits: int = 200,
    opens: int = 3,
    out: Path = Path("docs"),
    work: Path | None = None,
) -> int:
    """Measure stores of growing numbers of episodes; the exit code is 1 if the limits do not hold.

    Args:
        sizes: Numbers of episodes.
        commits: Commits and looks to measure in each store.
        opens: How often to open each store.
        out: Where to put the figures and the picture.
        work: Where to build the stores, in a new directory that is removed afterwards; by default here.
    """
    console = Console()
    with tempfile.TemporaryDirectory(prefix="catalog-scale-", dir=work or Path.cwd()) as directory:
        paths = {size: Path(directory) / str(size) for size in sorted(sizes)}
        with Progress(console=console, transient=True) as progress:
            task = progress.add_task("fill", total=sum(paths))
            for size, path in paths.items():
                for _ in _fill(path, size):
                    progress.advance(task)
        console.print("stores are filled; measuring")
        costs = _measure_commits(paths, commits)
        points = [
            Point(
                episodes=size,
                **costs[size],
                open_reader_s=_median_time(_open_reader, path, opens),
                open_store_s=_median_time(Store.open, path, opens),
                catalog_bytes=(path / "catalog.sqlite").stat().st_size,
            )
            for size, path in paths.items()
        ]
    growth = {
        name: getattr(points[-1], name) / getattr(points[0], name)
        for name in ("commit_wall_ms", "commit_cpu_ms", "follow_wall_ms", "follow_cpu_ms")
    }
    holds = max(growth.values()) <= MAX_GROWTH and points[-1].open_reader_s <= MAX_OPEN_S
    _save(out, points, growth)
    console.print(_table(points))
    told = ", ".join(f"{name.removesuffix('_ms').replace('_', ' ')} {value:.2f}" for name, value in growth.items())
    console.print(
        f"growth from the smallest to the largest: {told} (at most {MAX_GROWTH}); "
        f"open in {points[-1].open_reader_s:.2f} s (at most {MAX_OPEN_S:.0f} s)",
        style="green" if holds else "red",
    )
    return 0 if holds else 1


# ---- stores


def _fill(path: Path, num_episodes: int) -> Iterator[int]:
    """Make a store of short episodes, in large commits; yields the number of each episode."""
    spec = small_spec()
    steps, last_observation = random_steps(spec, 2, seed=0)
    with Store.open(path) as store:
        writer = store.writer("fill", spec, commit_steps=6000, flush_each_episode=False)
        for number in range(num_episodes):
            writer.begin(task=f"task-{number % 100}", seed=number)
            for step in steps:
                writer.append(step)
            writer.end(last_observation, success=number % 3 == 0)
            yield number
        writer.flush()


def _measure_commits(paths: dict[int, Path], commits: int) -> dict[int, dict[str, float]]:
    """For each store what a commit costs, and what it costs a reader to learn of it."""
    times: dict[int, dict[str, list[float]]] = {size: {} for size in paths}

    def timed(size: int, what: str, call: Callable[..., Any], *arguments: Any) -> None:
        wall, cpu = time.perf_counter(), time.process_time()
        call(*arguments)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        times[size].setdefault(f"{what}_wall_ms", []).append(wall * 1e3)
        times[size].setdefault(f"{what}_cpu_ms", []).append(cpu * 1e3)

    with ExitStack() as opened:
        stores = {size: opened.enter_context(Store.open(path)) for size, path in paths.items()}
        readers = {size: opened.enter_context(Reader(path)) for size, path in paths.items()}
        for size in paths:
            stores[size].begin_writer("bench", "bench")
            readers[size].follow()
        turn = deque(paths)
        for number in range(commits):
            chunk = _chunk(number)
            turn.rotate()  # so that none is always the first
            for size in turn:
                timed(size, "commit", stores[size].commit, chunk)
                timed(size, "follow", readers[size].follow)
    return {size: {name: statistics.median(values) for name, values in times[size].items()} for size in paths}


def _chunk(number: int) -> Chunk:
    """One episode of a few rows."""
    spec = small_spec()
    steps, last_observation = random_steps(spec, COMMIT_ROWS - 1, seed=number)
    rows = [*(spec.row(step) for step in steps), spec.last_row(last_observation)]
    columns = {path: stack([row[path] for row in rows], leaf) for path, leaf in spec.columns.items()}
    part = Part(episode=number, first_index=0, num_rows=COMMIT_ROWS, state="ended", info=EpisodeInfo(task="bench"))
    return Chunk(writer="bench", incarnation="bench", seq=number, spec=spec, columns=columns, parts=(part,))


def _open_reader(path: Path) -> Reader:
    reader = Reader(path)
    reader.follow()
    return reader


def _median_time(open_: Callable[[Path], Any], path: Path, times: int) -> float:
    """Seconds to open what then is closed again."""
    found = []
    for _ in range(times):
        start = time.perf_counter()
        opened = open_(path)
        found.append(time.perf_counter() - start)
        opened.close()
    return statistics.median(found)


# ---- showing


def _save(out: Path, points: list[Point], growth: dict[str, float]) -> None:
    for name in ("benchmarks", "images"):
        (out / name).mkdir(parents=True, exist_ok=True)
    content = {"points": [asdict(point) for point in points], "growth": growth}
    (out / "benchmarks" / "catalog_scale.json").write_text(json.dumps(content, indent=2) + "\n")
    _draw(points).savefig(out / "images" / "catalog_scale.svg", transparent=True)


def _table(points: list[Point]) -> Table:
    table = Table()
    for name in ("episodes", "commit ms", "CPU ms", "follow ms", "CPU ms", "Reader s", "Store s", "catalog MB"):
        table.add_column(name, justify="right", no_wrap=name == "episodes")
    for p in points:
        table.add_row(
            f"{p.episodes:,}",
            f"{p.commit_wall_ms:.2f}",
            f"{p.commit_cpu_ms:.2f}",
            f"{p.follow_wall_ms:.3f}",
            f"{p.follow_cpu_ms:.3f}",
            f"{p.open_reader_s:.3f}",
            f"{p.open_store_s:.3f}",
            f"{p.catalog_bytes / 1e6:.1f}",
        )
    return table


INK = "#7d8590"  # a grey that is read on white and on black
BLUE, ORANGE = "#3d8bfd", "#e8710a"


def _draw(points: list[Point]) -> Figure:
    plt.rcParams.update(
        {
            "font.size": 11,
            "text.color": INK,
            "axes.labelcolor": INK,
            "axes.edgecolor": INK,
            "xtick.color": INK,
            "ytick.color": INK,
            "axes.facecolor": "none",
            "axes.spines.top": False,
            "axes.spines.right": False,
        }
    )
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained", gridspec_kw={"wspace": 0.08})
    left.set_title("One more episode, of ten rows", loc="left", fontsize=12)
    _line(left, points, "commit_wall_ms", "commit {:.2f} ms", BLUE)
    _line(left, points, "commit_cpu_ms", "its CPU {:.2f} ms", BLUE, linestyle=":")
    _line(left, points, "follow_wall_ms", "follow {:.2f} ms", ORANGE)
    left.set_ylim(bottom=0)
    left.yaxis.set_major_formatter("{x:g} ms")
    right.set_title("Opening the store", loc="left", fontsize=12)
    right.set_yscale("log")
    _line(right, points, "open_reader_s", "Reader {:.2f} s", ORANGE)
    _line(right, points, "open_store_s", "Store {:.2f} s", BLUE)
    right.axhline(MAX_OPEN_S, color=INK, linewidth=1, linestyle="--")
    right.annotate(
        f"limit {MAX_OPEN_S:g} s", (points[0].episodes, MAX_OPEN_S), xytext=(0, -14), textcoords="offset points"
    )
    right.yaxis.set_major_formatter("{x:g} s")
    for axes in (left, right):
        axes.set_xscale("log")
        axes.set_xticks([point.episodes for point in points], [f"{point.episodes:,}" for point in points])
        axes.minorticks_off()
        axes.set_xlabel("episodes in the store")
        axes.grid(axis="y", color=INK, alpha=0.25, linewidth=0.6)
    return figure


def _line(axes: Axes, points: list[Point], name: str, label: str, colour: str, linestyle: str = "-") -> None:
    """One line, named at its end rather than in a legend."""
    sizes = [point.episodes for point in points]
    values = [getattr(point, name) for point in points]
    axes.plot(sizes, values, color=colour, linestyle=linestyle, marker="o", linewidth=2, markersize=5)
    axes.annotate(
        label.format(values[-1]),
        (sizes[-1], values[-1]),
        xytext=(9, 0),
        textcoords="offset points",
        va="center",
        color=colour,
    )


if __name__ == "__main__":
    sys.exit(tyro.cli(main))

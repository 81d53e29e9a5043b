"""`understudy bench`: speed, measured on the machine it is run on."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from understudy.core import UnderstudyError
from understudy.replay.bench import APPEND, COMMIT, BenchConfig, BenchResult, measure
from understudy.replay.bench_sample import SampleBenchConfig, measure_sampling


def store(*, directory: Path | None = None, rounds: int = 7, commits: int = 50, commit_steps: int = 50) -> int:
    """Compare durable commits with a bare pwrite and fdatasync of the same bytes.

    A step has two 128x128x3 cameras, 20 numbers of state and 7 of action. All ways take turns; a figure is the median
    of the rounds, and a ratio is the bare time divided by ours.

    Args:
        directory: Where to measure, in a new directory that is removed afterwards; by default here.
        rounds: How often all ways are measured.
        commits: Commits of each way in each round.
        commit_steps: Steps in each commit.
    """
    console = Console()
    with _place(directory) as place:
        config = BenchConfig(directory=place, rounds=rounds, commits=commits, commit_steps=commit_steps)
        # It refreshes between turns only: a thread that draws would be measured too.
        with Progress(console=console, auto_refresh=False, transient=True) as progress:
            task = progress.add_task("bench store", total=config.num_turns)
            result = measure(config, lambda: progress.update(task, advance=1, refresh=True))
    console.print(_table(config, result))
    return 0


def sample(*, directory: Path | None = None, steps: int = 20_000, batch_size: int = 256, rounds: int = 7) -> int:
    """Compare sampling transitions with numpy.take from memory, and with bare threaded reads from disk.

    A step has two 128x128x3 cameras, 20 numbers of state and 7 of action; a batch has observation and next observation.

    Args:
        directory: Where to measure, in a new directory that is removed afterwards; by default here. 98 kB a step.
        steps: Steps in the store.
        batch_size: Transitions in a batch.
        rounds: How often all ways are measured.
    """
    console = Console()
    with _place(directory) as place:
        config = SampleBenchConfig(directory=place, steps=steps, batch_size=batch_size, rounds=rounds)
        with console.status("bench sample") as status:
            result = measure_sampling(config, lambda what: status.update(f"bench sample: {what}"))
    table = Table(
        title=f"batches of {batch_size} transitions from {steps:,} steps, median of {rounds} rounds",
        title_justify="left",
    )
    for name in ("", "ours, ms", "bare, ms", "ratio", "wanted"):
        table.add_column(name, justify="left" if not name else "right")
    table.add_row("warm, CPU time, against numpy.take", f"{result.warm_cpu_s * 1e3:.1f}",
                  f"{result.take_cpu_s * 1e3:.1f}", f"{result.warm_ratio:.2f}", "at most 1.5")  # fmt: skip
    table.add_row("cold, wall time, bare threaded preadv", f"{result.cold_wall_s * 1e3:.1f}",
                  f"{result.bare_wall_s * 1e3:.1f}", f"{result.cold_ratio:.2f}", "at least 0.7")  # fmt: skip
    table.add_row("sampling time hidden by prefetch", "", "", f"{result.hidden:.0%}", "at least 80%")
    console.print(table)
    return 0


COMMANDS: dict[str, Callable[..., int]] = {"store": store, "sample": sample}


@contextmanager
def _place(directory: Path | None) -> Iterator[Path]:
    """A new directory to measure in, removed afterwards."""
    if directory is not None and not directory.is_dir():
        raise UnderstudyError(f"{directory}: there is no such directory; make it, or choose another")
    with tempfile.TemporaryDirectory(prefix="understudy-bench-", dir=directory or Path.cwd()) as place:
        yield Path(place)


def _table(config: BenchConfig, result: BenchResult) -> Table:
    table = Table(
        title=f"{config.commit_steps} steps ({result.commit_bytes / 1e6:.2f} MB) a commit, {config.commits} commits, "
        f"median of {config.rounds} rounds",
        title_justify="left",
    )
    table.add_column("way")
    for name in ("MB/s", "ms", "ratio", "CPU ms", "CPU ratio"):
        table.add_column(name, justify="right")
    bare = result.cost(result.bare)
    for name, way in (("pwrite + fdatasync", result.bare), (COMMIT, COMMIT), (APPEND, APPEND)):
        cost = result.cost(way)
        table.add_row(
            name, f"{result.commit_bytes / cost.wall_s / 1e6:.0f}", f"{cost.wall_s * 1e3:.2f}",
            f"{result.ratio(way):.2f}", f"{cost.cpu_s * 1e3:.2f}", f"{bare.cpu_s / cost.cpu_s:.2f}",
        )  # fmt: skip
    return table

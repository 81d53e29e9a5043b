"""`understudy bench`: speed, measured on the machine it is run on."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from understudy.cli.console import with_remote
from understudy.core import UnderstudyError
from understudy.selftest.bench_sample import SampleBenchConfig, measure_sampling
from understudy.selftest.bench_store import APPEND, COMMIT, BenchConfig, BenchResult, measure


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
    table.add_row(
        "warm, CPU time, against numpy.take",
        f"{result.warm_cpu_s * 1e3:.1f}",
        f"{result.take_cpu_s * 1e3:.1f}",
        f"{result.warm_ratio:.2f}",
        "at most 1.5",
    )
    table.add_row(
        "cold, wall time, bare threaded preadv",
        f"{result.cold_wall_s * 1e3:.1f}",
        f"{result.bare_wall_s * 1e3:.1f}",
        f"{result.cold_ratio:.2f}",
        "at least 0.7",
    )
    table.add_row("sampling time hidden by prefetch", "", "", f"{result.hidden:.0%}", "at least 80%")
    console.print(table)
    return 0


def deliver(
    *, directory: Path | None = None, rounds: int = 7, chunks: int = 60, chunk_steps: int = 50, writers: int = 1
) -> int:
    """Compare delivery to a durable store in another process with a bare gRPC stream of the same bytes.

    A step has two 128x128x3 cameras, 20 numbers of state and 7 of action. Measured from the first append until the
    server has all steps on disk. All ways take turns; a figure is the median of the rounds, and a ratio is the bare
    time divided by ours. With several writers there is nothing bare; shown is what the slowest gets beside the mean.

    Args:
        directory: Where to measure, in a new directory that is removed afterwards; by default here.
        rounds: How often all ways are measured.
        chunks: Chunks of each writer in each round.
        chunk_steps: Steps in each chunk.
        writers: Writers at once, in up to 4 client processes.
    """
    parts = with_remote("understudy.cli.tools.bench_deliver")
    with _place(directory) as place:
        parts.deliver(place, rounds=rounds, chunks=chunks, chunk_steps=chunk_steps, writers=writers)
    return 0


def control_loop(*, directory: Path | None = None, seconds: float = 60.0, rate_hz: float = 100.0) -> int:
    """Measure what append costs a control loop while the server is healthy, slow, dead, or comes and goes.

    A step has two 128x128x3 cameras, 20 numbers of state and 7 of action, and goes to a spool on disk. The server is in
    a process of its own; it is stopped for 2 s in 3, killed for good, or killed every 4 s. Exit code 1 if a step is
    lost.

    Args:
        directory: Where to measure, in a new directory that is removed afterwards; by default here.
        seconds: Of each of the four phases.
        rate_hz: Steps a second.
    """
    parts = with_remote("understudy.cli.tools.bench_deliver")
    with _place(directory) as place:
        lost = parts.control_loop(place, seconds=seconds, rate_hz=rate_hz)
    return 1 if lost else 0


def remote_sample(
    *, directory: Path | None = None, steps: int = 20_000, batch_size: int = 256, batches: int = 10, rounds: int = 7
) -> int:
    """Compare batches drawn over loopback with bare gRPC streams of as many bytes.

    A step has two 128x128x3 cameras, 20 numbers of state and 7 of action; a batch has observation and next observation.

    Args:
        directory: Where to measure, in a new directory that is removed afterwards; by default here. 98 kB a step.
        steps: Steps in the store.
        batch_size: Transitions in a batch.
        batches: Batches in each round.
        rounds: How often all ways are measured.
    """
    parts = with_remote("understudy.cli.tools.bench_remote")
    with _place(directory) as place:
        parts.remote_sample(place, steps=steps, batch_size=batch_size, batches=batches, rounds=rounds)
    return 0


def parameters(*, directory: Path | None = None, megabytes: int = 100, readers: int = 8, rounds: int = 7) -> int:
    """Compare the way of parameters to many actors with one bare gRPC transfer of as many bytes.

    Measured from the call of publish until the last reader has the version; each reader is a process.

    Args:
        directory: Where to measure, in a new directory that is removed afterwards; by default here.
        megabytes: Size of the parameters.
        readers: How many actors.
        rounds: How often both ways are measured.
    """
    parts = with_remote("understudy.cli.tools.bench_remote")
    with _place(directory) as place:
        parts.parameters(place, megabytes=megabytes, readers=readers, rounds=rounds)
    return 0


COMMANDS: dict[str, Callable[..., int]] = {
    "store": store,
    "sample": sample,
    "deliver": deliver,
    "control-loop": control_loop,
    "remote-sample": remote_sample,
    "parameters": parameters,
}


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
            name,
            f"{result.commit_bytes / cost.wall_s / 1e6:.0f}",
            f"{cost.wall_s * 1e3:.2f}",
            f"{result.ratio(way):.2f}",
            f"{cost.cpu_s * 1e3:.2f}",
            f"{bare.cpu_s / cost.cpu_s:.2f}",
        )
    return table

"""`understudy bench`: measures the speed of this machine."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from understudy.cli.console import with_remote
from understudy.cli.progress import ProgressLine
from understudy.core import UnderstudyError

if TYPE_CHECKING:
    from understudy.selftest.bench_store import BenchConfig, BenchResult


def store(*, directory: Path | None = None, rounds: int = 7, commits: int = 50, commit_steps: int = 50) -> int:
    """Compare durable commits with a bare pwrite and fdatasync of the same bytes.

    A step has two 128x128x3 cameras, 20 numbers of state and 7 of action. The methods take turns; a number is the
    median of the rounds, and a ratio is the bare time divided by ours.

    Args:
        directory: Directory for the temporary files of the measurement; by default the working directory.
        rounds: Number of rounds; each measures every method once.
        commits: Number of commits of each method in each round.
        commit_steps: Number of steps in each commit.
    """
    from understudy.selftest.bench_store import BenchConfig, measure

    console = Console()
    with _temporary_directory(directory) as path:
        config = BenchConfig(directory=path, rounds=rounds, commits=commits, commit_steps=commit_steps)
        # Refreshes only between turns: a thread that draws would be measured too.
        with ProgressLine(console, "bench store", "turns", threaded=False) as progress:
            result = measure(config, lambda: progress.advance(config.num_turns))
    console.print(_table(config, result))
    return 0


def sample(*, directory: Path | None = None, steps: int = 20_000, batch_size: int = 256, rounds: int = 7) -> int:
    """Compare sampling transitions with numpy.take from memory, and with bare threaded reads from disk.

    A step has two 128x128x3 cameras, 20 numbers of state and 7 of action; a batch has observation and next observation.

    Args:
        directory: Directory for the temporary files of the measurement; by default the working directory.
            A step takes 98 kB.
        steps: Number of steps in the store.
        batch_size: Number of transitions in a batch.
        rounds: Number of rounds; each measures every method once.
    """
    from understudy.selftest.bench_sample import SampleBenchConfig, measure_sampling

    console = Console()
    with _temporary_directory(directory) as path:
        config = SampleBenchConfig(directory=path, steps=steps, batch_size=batch_size, rounds=rounds)
        with ProgressLine(console, "bench sample", threaded=False) as progress:
            result = measure_sampling(config, progress.say)
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

    A step has two 128x128x3 cameras, 20 numbers of state and 7 of action. The time is from the first append until the
    server has all steps on disk. The methods take turns; a number is the median of the rounds, and a ratio is the bare
    time divided by ours. With several writers it compares the slowest writer with the mean instead.

    Args:
        directory: Directory for the temporary files of the measurement; by default the working directory.
        rounds: Number of rounds; each measures every method once.
        chunks: Number of chunks of each writer in each round.
        chunk_steps: Number of steps in each chunk.
        writers: Number of writers at the same time, in up to 4 client processes.
    """
    parts = with_remote("understudy.cli.tools.bench_deliver")
    with _temporary_directory(directory) as path:
        parts.deliver(path, rounds=rounds, chunks=chunks, chunk_steps=chunk_steps, writers=writers)
    return 0


def control_loop(*, directory: Path | None = None, seconds: float = 60.0, rate_hz: float = 100.0) -> int:
    """Measure the time of append in a control loop while the server is healthy, slow, dead, or restarts.

    A step has two 128x128x3 cameras, 20 numbers of state and 7 of action, and goes to a spool on disk. The server is a
    subprocess that is paused for 2 s in 3, killed for good, or killed every 4 s. The exit code is 1 if a step is lost.

    Args:
        directory: Directory for the temporary files of the measurement; by default the working directory.
        seconds: Duration of each of the four phases in seconds.
        rate_hz: Control rate in steps per second.
    """
    parts = with_remote("understudy.cli.tools.bench_deliver")
    with _temporary_directory(directory) as path:
        lost = parts.control_loop(path, seconds=seconds, rate_hz=rate_hz)
    return 1 if lost else 0


def remote_sample(
    *, directory: Path | None = None, steps: int = 20_000, batch_size: int = 256, batches: int = 10, rounds: int = 7
) -> int:
    """Compare batches sampled over loopback with bare gRPC streams of the same size.

    A step has two 128x128x3 cameras, 20 numbers of state and 7 of action; a batch has observation and next observation.

    Args:
        directory: Directory for the temporary files of the measurement; by default the working directory.
            A step takes 98 kB.
        steps: Number of steps in the store.
        batch_size: Number of transitions in a batch.
        batches: Number of batches in each round.
        rounds: Number of rounds; each measures every method once.
    """
    parts = with_remote("understudy.cli.tools.bench_remote")
    with _temporary_directory(directory) as path:
        parts.remote_sample(path, steps=steps, batch_size=batch_size, batches=batches, rounds=rounds)
    return 0


def parameters(*, directory: Path | None = None, megabytes: int = 100, readers: int = 8, rounds: int = 7) -> int:
    """Compare publishing parameters to many actors with one bare gRPC transfer of as many bytes.

    The time is from the call of publish until the last reader has the version; each reader is a process.

    Args:
        directory: Directory for the temporary files of the measurement; by default the working directory.
        megabytes: Size of the parameters in megabytes.
        readers: Number of actors, each a process.
        rounds: Number of rounds; each measures both methods once.
    """
    parts = with_remote("understudy.cli.tools.bench_remote")
    with _temporary_directory(directory) as path:
        parts.parameters(path, megabytes=megabytes, readers=readers, rounds=rounds)
    return 0


def working_directory(directory: Path | None) -> Path:
    """Where temporary files go: the directory that was asked for, or the current one."""
    if directory is not None and not directory.is_dir():
        raise UnderstudyError(f"{directory}: no such directory; create it, or choose another")
    return directory or Path.cwd()


@contextmanager
def _temporary_directory(directory: Path | None) -> Iterator[Path]:
    """A new directory to measure in, removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="understudy-bench-", dir=working_directory(directory)) as path:
        yield Path(path)


def _table(config: BenchConfig, result: BenchResult) -> Table:
    from understudy.selftest.bench_store import APPEND, COMMIT

    table = Table(
        title=f"{config.commit_steps} steps ({result.commit_bytes / 1e6:.2f} MB) a commit, {config.commits} commits, "
        f"median of {config.rounds} rounds",
        title_justify="left",
    )
    table.add_column("method")
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

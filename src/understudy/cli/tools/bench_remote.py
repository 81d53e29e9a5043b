"""Runs `understudy bench remote-sample` and `understudy bench parameters`. Needs the extra `remote`."""

from __future__ import annotations

import statistics
from pathlib import Path

from rich.console import Console
from rich.table import Table

from understudy.cli.progress import ProgressLine
from understudy.selftest.bench_remote import measure_parameters, measure_remote_sampling


def remote_sample(directory: Path, *, steps: int, batch_size: int, batches: int, rounds: int) -> None:
    """Measure in the directory `directory` and print a table."""
    console = Console()
    with ProgressLine(console, "bench remote-sample", "turns", threaded=False) as progress:
        result = measure_remote_sampling(
            directory,
            steps=steps,
            batch_size=batch_size,
            batches=batches,
            rounds=rounds,
            on_turn=lambda: progress.advance(3 * rounds),
        )
    table = Table(
        title=f"batches of {batch_size} transitions ({result.batch_bytes / 1e6:.0f} MB), median of {rounds} rounds",
        title_justify="left",
    )
    for name in ("method", "ms", "MB/s", "ratio", "wanted"):
        table.add_column(name, justify="left" if name == "method" else "right")
    for way, seconds, ratio, wanted in (
        ("RemoteSampler", result.ours_s, "", ""),
        ("bare gRPC, one message", result.whole_s, f"{result.ratio(result.whole_s):.2f}", "at least 0.6"),
        ("bare gRPC, pieces of 1 MiB", result.pieces_s, f"{result.ratio(result.pieces_s):.2f}", ""),
    ):
        median = statistics.median(seconds)
        table.add_row(way, f"{median * 1e3:.0f}", f"{result.batch_bytes / median / 1e6:.0f}", ratio, wanted)
    console.print(table)


def parameters(directory: Path, *, megabytes: int, readers: int, rounds: int) -> None:
    """Measure in the directory `directory` and print a table."""
    console = Console()
    with ProgressLine(console, "bench parameters", "turns", threaded=False) as progress:
        result = measure_parameters(
            directory,
            megabytes=megabytes,
            readers=readers,
            rounds=rounds,
            on_turn=lambda: progress.advance(rounds),
        )
    table = Table(
        title=f"{result.num_bytes / 1e6:.0f} MB to {readers} readers, median of {rounds} rounds", title_justify="left"
    )
    for name in ("method", "ms", "ratio", "wanted"):
        table.add_column(name, justify="left" if name == "method" else "right")
    table.add_row(f"publish, until all {readers} have it", f"{statistics.median(result.all_s) * 1e3:.0f}", "", "")
    for way, seconds, wanted in (
        ("one bare transfer, one message", result.bare_s, "at most 3"),
        ("one bare transfer, pieces of 1 MiB", result.pieces_s, ""),
    ):
        table.add_row(way, f"{statistics.median(seconds) * 1e3:.0f}", f"{result.ratio(seconds):.2f}", wanted)
    table.add_row("a reader that joins late", f"{result.late_s * 1e3:.0f}", "", "at most 1000")
    console.print(table)

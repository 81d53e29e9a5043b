"""What `understudy bench remote-sample` and `understudy bench parameters` run and show; needs the extra `remote`."""

from __future__ import annotations

import statistics
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from understudy.selftest.bench_remote import measure_parameters, measure_remote_sampling


def remote_sample(place: Path, *, steps: int, batch_size: int, batches: int, rounds: int) -> None:
    """Measure in the directory `place` and print a table."""
    console = Console()
    with Progress(console=console, auto_refresh=False, transient=True) as progress:
        task = progress.add_task("bench remote-sample", total=3 * rounds)
        result = measure_remote_sampling(
            place,
            steps=steps,
            batch_size=batch_size,
            batches=batches,
            rounds=rounds,
            turn_done=lambda: progress.update(task, advance=1, refresh=True),
        )
    table = Table(
        title=f"batches of {batch_size} transitions ({result.batch_bytes / 1e6:.0f} MB), median of {rounds} rounds",
        title_justify="left",
    )
    for name in ("way", "ms", "MB/s", "ratio", "wanted"):
        table.add_column(name, justify="left" if name == "way" else "right")
    for way, seconds, ratio, wanted in (
        ("RemoteSampler", result.ours_s, "", ""),
        ("bare gRPC, one message", result.whole_s, f"{result.ratio(result.whole_s):.2f}", "at least 0.6"),
        ("bare gRPC, pieces of 1 MiB", result.pieces_s, f"{result.ratio(result.pieces_s):.2f}", ""),
    ):
        median = statistics.median(seconds)
        table.add_row(way, f"{median * 1e3:.0f}", f"{result.batch_bytes / median / 1e6:.0f}", ratio, wanted)
    console.print(table)


def parameters(place: Path, *, megabytes: int, readers: int, rounds: int) -> None:
    """Measure in the directory `place` and print a table."""
    console = Console()
    with Progress(console=console, auto_refresh=False, transient=True) as progress:
        task = progress.add_task("bench parameters", total=rounds)
        result = measure_parameters(
            place,
            megabytes=megabytes,
            readers=readers,
            rounds=rounds,
            turn_done=lambda: progress.update(task, advance=1, refresh=True),
        )
    table = Table(
        title=f"{result.num_bytes / 1e6:.0f} MB to {readers} readers, median of {rounds} rounds", title_justify="left"
    )
    for name in ("way", "ms", "ratio", "wanted"):
        table.add_column(name, justify="left" if name == "way" else "right")
    table.add_row(f"publish, until all {readers} have it", f"{statistics.median(result.all_s) * 1e3:.0f}", "", "")
    for way, seconds, wanted in (
        ("one bare transfer, one message", result.bare_s, "at most 3"),
        ("one bare transfer, pieces of 1 MiB", result.pieces_s, ""),
    ):
        table.add_row(way, f"{statistics.median(seconds) * 1e3:.0f}", f"{result.ratio(seconds):.2f}", wanted)
    table.add_row("a reader that joins late", f"{result.late_s * 1e3:.0f}", "", "at most 1000")
    console.print(table)

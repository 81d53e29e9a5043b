"""Runs `understudy bench deliver` and `understudy bench control-loop`. Needs the extra `remote`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from understudy.cli.progress import ProgressLine
from understudy.selftest.bench_control_loop import ControlLoopConfig, PhaseResult, measure_control_loop
from understudy.selftest.bench_delivery import (
    MEMORY,
    SPOOL,
    WAYS,
    DeliveryBenchConfig,
    DeliveryBenchResult,
    ManyWritersResult,
    measure_delivery,
    measure_many_writers,
)

# Transitions per second over loopback of agentlace's published code, and without one of its log lines.
AGENTLACE, AGENTLACE_QUIET = (89, 186), 548


def deliver(directory: Path, *, rounds: int, chunks: int, chunk_steps: int, writers: int) -> None:
    """Measure in the directory `directory` and print a table."""
    console = Console()
    config = DeliveryBenchConfig(
        directory=directory, rounds=rounds, chunks=chunks, chunk_steps=chunk_steps, writers=writers
    )
    # Refreshes only between turns: a thread that draws would be measured too.
    with ProgressLine(console, "bench deliver", "turns", threaded=False) as progress:

        def on_turn() -> None:
            progress.advance(config.num_turns)

        if writers > 1:
            _print_many(console, config, measure_many_writers(config, on_turn))
        else:
            _print_delivery(console, config, measure_delivery(config, on_turn))


def control_loop(directory: Path, *, seconds: float, rate_hz: float) -> int:
    """Measure in the directory `directory` and print a table; returns the steps that are missing or wrong."""
    console = Console()
    config = ControlLoopConfig(directory=directory, seconds=seconds, rate_hz=rate_hz)
    with ProgressLine(console, "bench control-loop", threaded=False) as progress:
        phases = measure_control_loop(config, lambda name: progress.say(f"server {name}"))
    console.print(_phase_table(config, phases))
    lost = sum(phase.num_lost for phase in phases)
    different = sum(phase.num_different for phase in phases)
    console.print(
        f"{sum(phase.num_steps for phase in phases):,} steps, lost {lost}, different or twice {different}; "
        f"wanted: p99.9 below 1 ms",
        style="red" if lost or different else "green",
        highlight=False,
    )
    return lost + different


def _print_delivery(console: Console, config: DeliveryBenchConfig, result: DeliveryBenchResult) -> None:
    table = Table(
        title=f"{config.chunks} chunks of {config.chunk_steps} steps "
        f"({result.turn_bytes / config.chunks / 1e6:.2f} MB), median of {config.rounds} rounds",
        title_justify="left",
    )
    table.add_column("method")
    for name in ("MB/s", "steps/s", "ratio", "CPU s/GB", "client", "server"):
        table.add_column(name, justify="right")
    for way in WAYS:
        table.add_row(
            way,
            f"{result.megabytes_per_s(way):.0f}",
            f"{result.steps_per_s(way):,.0f}",
            f"{result.ratio(way):.2f}",
            f"{result.cpu_s_per_gb(way, lambda cost: cost.cpu_s):.2f}",
            f"{result.cpu_s_per_gb(way, lambda cost: cost.client_cpu_s):.2f}",
            f"{result.cpu_s_per_gb(way, lambda cost: cost.server_cpu_s):.2f}",
        )
    console.print(table)
    ours = result.steps_per_s(SPOOL)
    console.print(
        f"wanted: a ratio of at least 0.7, and 10 times agentlace, whose published code reaches {AGENTLACE[0]} to "
        f"{AGENTLACE[1]} transitions/s over loopback, and {AGENTLACE_QUIET} without a log line. With a spool: "
        f"{ours / AGENTLACE[1]:.0f} times {AGENTLACE[1]}, {ours / AGENTLACE_QUIET:.0f} times {AGENTLACE_QUIET}",
        highlight=False,
    )


def _print_many(console: Console, config: DeliveryBenchConfig, result: ManyWritersResult) -> None:
    table = Table(
        title=f"{config.writers} writers at once, each {config.chunks} chunks of {config.chunk_steps} steps "
        f"({result.writer_bytes / 1e6:.0f} MB), median of {config.rounds} rounds",
        title_justify="left",
    )
    table.add_column("method")
    for name in ("MB/s, all", "steps/s, all", "slowest / mean", "wanted"):
        table.add_column(name, justify="right")
    for way in (MEMORY, SPOOL):
        table.add_row(
            way,
            f"{result.megabytes_per_s(way):.0f}",
            f"{result.steps_per_s(way):,.0f}",
            f"{result.fairness(way):.2f}",
            "at least 0.5",
        )
    console.print(table)


def _phase_table(config: ControlLoopConfig, phases: Sequence[PhaseResult]) -> Table:
    table = Table(
        title=f"append at {config.rate_hz:g} Hz, {config.seconds:g} s of each phase; times of append in ms",
        title_justify="left",
        padding=0,  # so that it fits into 80 columns
    )
    table.add_column("server", no_wrap=True)
    for name in ("p50", "p99", "p99.9", "max", "late", "lost", "RSS, MB", "spool, MB", "behind, s"):
        table.add_column(name, justify="right", no_wrap=True)
    for p in phases:
        table.add_row(
            p.name,
            f"{p.p50_ms:.3f}",
            f"{p.p99_ms:.3f}",
            f"{p.p999_ms:.3f}",
            f"{p.max_ms:.3f}",
            str(p.num_late),
            str(p.num_lost + p.num_different),
            f"{p.client_peak_bytes / 1e6:.0f}",
            f"{p.spool_peak_bytes / 1e6:.1f}",
            f"{p.catch_up_s:.1f}",
        )
    return table

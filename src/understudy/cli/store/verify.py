"""`understudy verify`: checks that every byte of a store is as it was written."""

from __future__ import annotations

from pathlib import Path

import tyro
from rich.console import Console

from understudy.cli.progress import ProgressLine
from understudy.replay import VerifyReport, verify
from understudy.service.server.parameter_store import parameter_problems


def command(store: tyro.conf.Positional[Path], *, limit: int = 20) -> int:
    """Read every committed byte of a store, and its published parameters, and report what is not as it was written.

    It changes nothing, and may run while another process writes. The exit code is 1 if anything is damaged.

    Args:
        store: Directory of the store.
        limit: Largest number of problems to print.
    """
    console = Console()
    with ProgressLine(console, "verify", "segments") as progress:
        report = verify(store, progress=progress)
    code = show_report(console, report, limit)
    for problem in parameter_problems(store):
        console.print(f"parameters: {problem}", style="red", highlight=False, soft_wrap=True)
        code = 1
    return code


def show_report(console: Console, report: VerifyReport, limit: int) -> int:
    """Print the result of verify; returns the exit code."""
    for note in report.notes[:limit]:
        console.print(f"note: {note}", style="yellow", highlight=False, soft_wrap=True)
    for problem in report.problems[:limit]:
        console.print(problem, style="red", highlight=False, soft_wrap=True)
    if len(report.problems) > limit:
        console.print(f"and {len(report.problems) - limit} more", style="red")
    what = f"{report.num_episodes:,} episodes, {report.num_rows:,} rows, {report.num_segments} segments"
    if report.ok:
        console.print(
            f"everything is as it was written: {what}, up to commit {report.commit}", style="green", highlight=False
        )
        return 0
    console.print(
        f"{len(report.problems)} problems; read {what}; run `understudy repair`", style="red", highlight=False
    )
    return 1

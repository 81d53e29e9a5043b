"""`understudy repair`: keeps every valid row of a damaged store and reports what it dropped."""

from __future__ import annotations

from pathlib import Path

import tyro
from rich.console import Console

from understudy.cli.progress import ProgressLine
from understudy.cli.store.verify import show_report
from understudy.replay import repair


def command(store: tyro.conf.Positional[Path], *, limit: int = 20) -> int:
    """Keep all valid rows of a store, in episodes without gaps, and report what was dropped.

    Changes nothing if nothing is wrong. No file is deleted: a damaged catalog is renamed within the store's directory,
    and dropped rows stay in their files until `understudy compact`.

    Args:
        store: Directory of the store.
        limit: Largest number of actions and problems to print.
    """
    console = Console()
    with ProgressLine(console, "repair", "segments") as progress:
        report = repair(store, progress=progress)
    if report.before.ok:
        console.print("nothing to repair", style="green")
        return 0
    for action in report.actions[:limit]:
        console.print(action, highlight=False, soft_wrap=True)
    if len(report.actions) > limit:
        console.print(f"and {len(report.actions) - limit} more")
    console.print(
        f"dropped {report.rows_dropped} rows; {report.episodes_trimmed} episodes are shorter, {report.episodes_lost} "
        f"are lost, {report.episodes_salvaged} new ones hold the valid rows after a gap",
        highlight=False,
    )
    return show_report(console, report.after, limit)

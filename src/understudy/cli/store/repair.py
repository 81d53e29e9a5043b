"""`understudy repair`: keeps all that is whole in a damaged store and says what it dropped."""

from __future__ import annotations

from pathlib import Path

import tyro
from rich.console import Console

from understudy.cli.console import progress_bar
from understudy.cli.store.verify import show_report
from understudy.replay import repair


def command(store: tyro.conf.Positional[Path], *, limit: int = 20) -> int:
    """Keep all rows of a store that are whole, in episodes without gaps, and say what was dropped.

    Changes nothing if nothing is wrong. No file is deleted: a catalog that cannot be trusted is put aside in the
    store's directory, and dropped rows stay in their files until `understudy compact`.

    Args:
        store: The directory of the store.
        limit: How many actions and problems to print.
    """
    console = Console()
    with progress_bar(console, "repair") as move:
        report = repair(store, progress=move)
    if report.before.ok:
        console.print("nothing to repair", style="green")
        return 0
    for action in report.actions[:limit]:
        console.print(action, highlight=False, soft_wrap=True)
    if len(report.actions) > limit:
        console.print(f"and {len(report.actions) - limit} more")
    console.print(
        f"dropped {report.rows_dropped} rows; {report.episodes_trimmed} episodes are shorter, {report.episodes_lost} "
        f"are gone, {report.episodes_salvaged} new ones hold whole rows from behind a gap",
        highlight=False,
    )
    return show_report(console, report.after, limit)

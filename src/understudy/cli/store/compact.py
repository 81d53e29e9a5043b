"""`understudy compact`: frees the disk space of deleted episodes."""

from __future__ import annotations

import sys
from pathlib import Path

import tyro
from rich.console import Console

from understudy.cli.console import progress_bar, size_text
from understudy.core import StoreError
from understudy.replay import Budget, Retention, Store, compact, summarize


def command(
    store: tyro.conf.Positional[Path],
    *,
    min_dead: float = 0.3,
    max_practice_steps: int | None = None,
    max_correction_steps: int | None = None,
    max_demonstration_steps: int | None = None,
    yes: bool = False,
) -> int:
    """Free the disk space of deleted episodes; asks before it removes anything.

    With a maximum, the oldest episodes of that kind beyond it are deleted first. Each kind has its own maximum:
    practice never evicts demonstrations.

    Args:
        store: Directory of the store.
        min_dead: Smallest share of deleted rows (0 to 1) at which a segment file is rewritten.
        max_practice_steps: Number of the newest steps of practice to keep; by default all.
        max_correction_steps: Number of the newest steps of episodes with an intervention to keep; by default all.
        max_demonstration_steps: Number of the newest steps of demonstrations to keep; by default all.
        yes: Remove the episodes without asking first.
    """
    console = Console()
    retention = Retention(
        practice=Budget(max_steps=max_practice_steps),
        correction=Budget(max_steps=max_correction_steps),
        demonstration=Budget(max_steps=max_demonstration_steps),
    )
    with Store.open(store, create=False) as opened:
        over = opened.over_budget(retention)
        before = summarize(store)
        deleted = sum(group.episodes for group in before.totals if group.deleted) + len(over)
        console.print(
            f"{before.num_dead_rows:,} of {before.num_rows:,} rows are dead; {deleted} deleted episodes would be gone "
            f"for good, {len(over)} of them because they are over their budget",
            highlight=False,
        )
        if not yes and not _asked(console):
            console.print("nothing was changed")
            return 1
        opened.retain(retention)
        with progress_bar(console, "compact") as progress:
            report = compact(opened, min_dead=min_dead, progress=progress)
    console.print(
        f"removed {report.segments_removed} segments, wrote {report.segments_written}; {report.rows_moved:,} rows "
        f"moved, {report.episodes_purged} episodes removed, {size_text(report.bytes_freed)} freed, "
        f"{report.orphans_removed} leftover files removed",
        style="green",
        highlight=False,
    )
    for path in report.orphans_kept:
        console.print(
            f"{path}: kept, because it has rows newer than the catalog; see `understudy repair`", style="yellow"
        )
    return 0


def _asked(console: Console) -> bool:
    if not sys.stdin.isatty():
        raise StoreError("compact removes data and cannot ask, because there is no terminal; add --yes to confirm")
    return console.input("remove them? [y/N] ").strip().lower() in ("y", "yes")

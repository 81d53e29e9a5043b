"""`understudy compact`: gives back the disk space of deleted episodes."""

from __future__ import annotations

import sys
from pathlib import Path

import tyro
from rich.console import Console

from understudy.cli.console import progress_bar, size_text
from understudy.core import StoreError
from understudy.replay import Budget, Retention, Store, summarize


def command(
    store: tyro.conf.Positional[Path],
    *,
    min_dead: float = 0.3,
    max_practice_steps: int | None = None,
    max_correction_steps: int | None = None,
    max_demonstration_steps: int | None = None,
    yes: bool = False,
) -> int:
    """Give back the disk space of deleted episodes; asks before it removes anything.

    With a budget, the oldest episodes of that kind beyond it are deleted first. Each kind has its own: practice
    never evicts demonstrations.

    Args:
        store: The directory of the store.
        min_dead: Rewrite segments of which at least this share of rows is dead.
        max_practice_steps: Keep at most so many steps of practice, the newest.
        max_correction_steps: Keep at most so many steps of episodes in which a human took over.
        max_demonstration_steps: Keep at most so many steps of demonstrations.
        yes: Do not ask.
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
        with progress_bar(console, "compact") as move:
            report = opened.compact(min_dead=min_dead, progress=move)
    console.print(
        f"removed {report.segments_removed} segments, wrote {report.segments_written}; {report.rows_moved:,} rows "
        f"moved, {report.episodes_purged} episodes gone, {size_text(report.bytes_freed)} given back, "
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
        raise StoreError("compact removes data and nobody is there to be asked; add --yes if that is meant")
    return console.input("remove them? [y/N] ").strip().lower() in ("y", "yes")

"""`understudy compact`: frees the disk space of deleted episodes."""

from __future__ import annotations

import sys
from pathlib import Path

import tyro
from rich.console import Console

from understudy.cli.console import size_text, with_remote
from understudy.cli.progress import ProgressLine
from understudy.core import StoreError
from understudy.replay import Budget, CompactionReport, Retention, Store, compact, summarize


def command(
    store: tyro.conf.Positional[Path | None] = None,
    *,
    server: str | None = None,
    token_file: Path | None = None,
    tls_cert: Path | None = None,
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
        store: Directory of the store, if no process has it open for writing.
        server: Address (host:port) of the server that has the store open; it compacts the store while it serves it.
        token_file: File with the token of the server.
        tls_cert: File with the TLS certificate of the server in PEM format.
        min_dead: Smallest share of deleted rows (0 to 1) at which a segment file is rewritten.
        max_practice_steps: Number of the newest steps of practice to keep; by default all.
        max_correction_steps: Number of the newest steps of episodes with an intervention to keep; by default all.
        max_demonstration_steps: Number of the newest steps of demonstrations to keep; by default all.
        yes: Remove the episodes without asking first.
    """
    console = Console()
    max_steps = {
        "practice": max_practice_steps,
        "correction": max_correction_steps,
        "demonstration": max_demonstration_steps,
    }
    if (store is None) == (server is None):
        raise StoreError("compact: expected the directory of a store, or --server with the address of its server")
    if store is not None:
        return _compact_here(console, store, max_steps, min_dead=min_dead, yes=yes)
    with with_remote("understudy.service").connect(server, token_file=token_file, tls_cert=tls_cert) as remote:
        for found in remote.compact(max_steps=max_steps, min_dead=min_dead, preview=True).values():
            _tell(console, found["dead_rows"], found["rows"], found["deleted"], found["over_budget"])
        if not yes and not _asked(console):
            console.print("nothing was changed")
            return 1
        for found in remote.compact(max_steps=max_steps, min_dead=min_dead).values():
            kept = tuple(Path(path) for path in found.pop("orphans_kept"))
            _report(console, CompactionReport(**found, orphans_kept=kept))
    return 0


def _compact_here(
    console: Console, store: Path, max_steps: dict[str, int | None], *, min_dead: float, yes: bool
) -> int:
    retention = Retention(**{kind: Budget(max_steps=number) for kind, number in max_steps.items()})
    with Store.open(store, create=False) as opened:
        over = opened.over_budget(retention)
        before = summarize(store)
        deleted = sum(group.episodes for group in before.totals if group.deleted) + len(over)
        _tell(console, before.num_dead_rows, before.num_rows, deleted, len(over))
        if not yes and not _asked(console):
            console.print("nothing was changed")
            return 1
        opened.retain(retention)
        with ProgressLine(console, "compact", "segments") as progress:
            report = compact(opened, min_dead=min_dead, progress=progress)
    _report(console, report)
    return 0


def _tell(console: Console, dead_rows: int, rows: int, deleted: int, over: int) -> None:
    console.print(
        f"{dead_rows:,} of {rows:,} rows are dead; {deleted} deleted episodes would be gone "
        f"for good, {over} of them because they are over their budget",
        highlight=False,
    )


def _report(console: Console, report: CompactionReport) -> None:
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


def _asked(console: Console) -> bool:
    if not sys.stdin.isatty():
        raise StoreError("compact removes data and cannot ask, because there is no terminal; add --yes to confirm")
    return console.input("remove them? [y/N] ").strip().lower() in ("y", "yes")

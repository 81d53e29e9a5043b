"""`understudy info`: shows what a store contains."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import tyro
from rich.console import Console
from rich.table import Table

from understudy.cli.console import size_text
from understudy.core import ArraySpec
from understudy.replay import EpisodeRecord, Reader, Summary, summarize
from understudy.service.client.spool import SpoolSummary, summarize_spool

WIDE = 76  # columns of a terminal in which the table of episodes has room for actor and labels


def command(
    store: tyro.conf.Positional[Path], *, episodes: bool = False, limit: int = 20, as_json: bool = False
) -> int:
    """Show what a store contains, or a robot's spool, also while another process writes to it.

    Args:
        store: Directory of the store, or of a spool.
        episodes: List the newest episodes instead of a summary.
        limit: Number of episodes to list.
        as_json: Print JSON instead of tables.
    """
    console = Console()
    spool = summarize_spool(store)
    if spool is not None and not episodes:
        _print_spool(console, spool, as_json=as_json)
        return 0
    if episodes:
        with Reader(store) as reader:
            records = [reader.record(episode_id) for episode_id in reader.catalog.newest_episode_ids(limit)]
        if as_json:
            print(json.dumps([asdict(record) for record in records], indent=2))
        else:
            wide = console.width >= WIDE
            console.print(_episode_table(records, wide=wide))
            if not wide:
                console.print("a wider terminal, or --as-json, also shows actor and labels", style="dim")
        return 0
    summary = summarize(store)
    if as_json:
        content = {**asdict(summary), "path": str(summary.path), "specs": [spec.to_json() for spec in summary.specs]}
        print(json.dumps(content, indent=2))
    else:
        _print(console, summary)
    return 0


def _print_spool(console: Console, spool: SpoolSummary, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps({**asdict(spool), "path": str(spool.path)}, indent=2))
        return
    state = "being written" if spool.being_written else "not being written"
    console.print(f"[bold]{spool.path}[/bold]  a spool, {state}")
    console.print(
        f"{spool.num_chunks} chunks wait for their server, {size_text(spool.num_bytes)}; the next writer with this "
        f"spool delivers them",
        highlight=False,
    )
    if spool.num_damaged:
        console.print(
            f"{spool.num_damaged} chunks were damaged on this disk and set aside, in {spool.path}/damaged-*; check "
            f"the disk, and remove them when you have looked at them",
            highlight=False,
        )


def _print(console: Console, summary: Summary) -> None:
    state = "being written" if summary.being_written else "not being written"
    console.print(
        f"[bold]{summary.path}[/bold]  commit {summary.commit}, {state}, {size_text(summary.disk_bytes)} on disk"
    )
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold")
    kinds = [f"{group.kind}, deleted" if group.deleted else group.kind for group in summary.totals]
    table.add_column("kind", min_width=max(map(len, kinds), default=0))
    for name in ("episodes", "steps", "human", "success", "open", "cut", "size"):
        table.add_column(name, justify="right", no_wrap=True)
    for kind, group in zip(kinds, summary.totals, strict=True):
        success = f"{group.successes} of {group.success_known}" if group.success_known else "-"
        table.add_row(
            kind,
            f"{group.episodes:,}",
            f"{group.steps:,}",
            f"{group.human_steps:,}",
            success,
            str(group.open),
            str(group.cut),
            size_text(group.bytes),
            style="dim" if group.deleted else None,
        )
    console.print(table)
    for number, spec in enumerate(summary.specs):
        fields = ", ".join(f"{path} {leaf}{_codec(leaf)}" for path, leaf in spec.columns.items() if _is_shown(path))
        console.print(f"spec {number + 1}: {fields}", highlight=False)
    for path, counts in summary.sensors.items():
        console.print(
            f"{path}: {counts.received:,} samples, {counts.dropped:,} dropped, {counts.late:,} rows with a late one, "
            f"{counts.unused:,} in no row; the oldest in a row was {counts.oldest_ms:.1f} ms old",
            highlight=False,
        )
    if summary.num_late_steps:
        late = f"{summary.num_late_steps:,} steps were late: they took longer than the period of their control rate"
        console.print(late, highlight=False)
    names = sorted({writer.name for writer in summary.writers})
    shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    console.print(f"writers: {shown or 'none'}", highlight=False)
    lines = [f"{summary.num_segments} segments with {summary.num_rows:,} rows"]
    if summary.num_dead_rows:
        lines.append(f"{summary.num_dead_rows:,} of the rows are dead; `understudy compact` frees their space")
    if summary.num_orphans:
        lines.append(f"{summary.num_orphans} files were left by a crash; `understudy compact` removes them")
    console.print("\n".join(lines), highlight=False)


def _codec(leaf: ArraySpec) -> str:
    if leaf.codec is None:
        return ""
    return f" as {leaf.codec.name} ({'lossy' if leaf.codec.lossy else 'lossless'})"


def _is_shown(path: str) -> bool:
    return path.split("/")[0] in ("observation", "action", "extras", "reward")


def _episode_table(records: list[EpisodeRecord], *, wide: bool) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold")
    for name in ("id", "state", "kind", "steps", "human", "reward", "success"):
        table.add_column(name, justify="right" if name in ("id", "steps", "human", "reward") else "left", no_wrap=True)
    for name in ("task", "actor", "labels") if wide else ("task",):
        table.add_column(name, overflow="fold", min_width=len(name))
    for record in records:
        info = record.info
        success = {None: "-", True: "yes", False: "no"}[info.success]
        state = "deleted" if record.deleted else record.state
        labels = ", ".join(f"{name}={value}" for name, value in info.labels.items())
        table.add_row(
            str(record.id),
            state,
            info.kind,
            str(record.num_steps),
            str(record.num_human),
            f"{record.total_reward:g}",
            success,
            info.task or "-",
            *((info.actor or "-", labels) if wide else ()),
        )
    return table

"""`understudy import`: a data set of another format into a store."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from understudy.core import UnderstudyError
from understudy.formats import EpisodeSource, Place, find_place
from understudy.training.data import dataset_io as exchange


def command(
    source: Annotated[str, tyro.conf.Positional],
    store: Annotated[str | None, tyro.conf.Positional] = None,
    *,
    kind: Annotated[Literal["demonstration", "practice", "correction"] | None, tyro.conf.arg(name="as")] = None,
    dry_run: bool = False,
    workers: int | None = None,
    token_file: Path | None = None,
    tls_cert: Path | None = None,
) -> int:
    """Bring a data set of another format into a store; what is there already is not imported again.

    An import that was interrupted, even by a kill, goes on with the same command. Each episode says where it came from
    in its label `origin`. Options of the format stand behind the path: 'rlds:kitchen/1.0.0?split=train&last=step'.

    Args:
        source: FORMAT:PATH, such as rlds:~/data/kitchen/1.0.0; formats are in docs/importing.md.
        store: Directory of a store (made if it is not there), or the address of a server (host:port).
        kind: What the episodes are; by default what the data says, and practice where it says nothing.
        dry_run: Say what would become of the fields, and read nothing but the first episode.
        workers: Threads that decode, for formats that have them.
        token_file: With a server: file with its token.
        tls_cert: With a server: its certificate.
    """
    console = Console(highlight=False)
    place = find_place(source)
    if workers is not None:
        place = replace(place, options={**place.options, "workers": str(workers)})
    if store is None and not dry_run:
        raise UnderstudyError("store: expected a directory or the address of a server; or look first with --dry-run")
    with closing(place.format.read(place.path, place.options)) as opened:
        if dry_run:
            _show(console, place, opened)
            return 0
        assert store is not None
        with (
            exchange.open_destination(store, token_file=token_file, tls_cert=tls_cert) as destination,
            episodes_bar(console, place.path.name) as progress,
        ):
            report = exchange.import_episodes(opened, destination, place, kind=kind, progress=progress)
    said = [f"{report.num_imported:,} episodes imported ({report.num_steps:,} steps)"]
    if report.num_known:
        said.append(f"{report.num_known:,} were there already")
    if report.num_without_steps:
        said.append(f"{report.num_without_steps:,} have no step and were left out")
    console.print("; ".join(said), style="green" if report.num_imported or report.num_known else "red", soft_wrap=True)
    return 0 if report.num_imported or report.num_known else 1


def _show(console: Console, place: Place, opened: EpisodeSource) -> None:
    """What each field becomes."""
    total = "an unknown number of" if opened.num_episodes is None else f"{opened.num_episodes:,}"
    console.print(f"[bold]{escape(str(place.path))}[/bold]  {place.format.name}, {total} episodes", soft_wrap=True)
    columns = opened.spec.columns
    table = Table()
    for name in ("theirs", "ours", "is", "how"):
        table.add_column(name, overflow="fold")
    for line in opened.mapping:
        leaf = columns.get(line.ours)
        table.add_row(escape(line.theirs) or "-", escape(line.ours) or "-", str(leaf or ""), escape(line.how))
    console.print(table)
    console.print("Nothing was imported.")


@contextmanager
def episodes_bar(console: Console, what: str) -> Iterator[exchange.Progress]:
    """A bar that is moved by calling it with (done, of); it goes away at the end."""
    columns = (
        TextColumn(escape(what)),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("episodes"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        line = bar.add_task(what, total=None)

        def move(done: int, of: int | None) -> None:
            bar.update(line, completed=done, total=of)

        yield move

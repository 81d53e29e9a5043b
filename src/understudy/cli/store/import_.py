"""`understudy import`: imports a dataset of another format into a store."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from understudy.cli.progress import ProgressLine
from understudy.core import UnderstudyError
from understudy.formats import DatasetPath, DatasetReader, NotedDataset, parse_dataset_path
from understudy.training.data import dataset_io


def command(
    source: Annotated[str, tyro.conf.Positional],
    store: Annotated[str | None, tyro.conf.Positional] = None,
    *,
    kind: Annotated[Literal["demonstration", "practice", "correction"] | None, tyro.conf.arg(name="as")] = None,
    codec: dataset_io.ImportCodec = "raw",
    dry_run: bool = False,
    workers: int | None = None,
    options: tuple[str, ...] = (),
    token_file: Path | None = None,
    tls_cert: Path | None = None,
) -> int:
    """Import a dataset of another format into a store; episodes that the store already has are skipped.

    The same command continues an import that was interrupted or killed. The label `origin` of each episode names its
    source. Options of the format follow the path: 'rlds:kitchen/1.0.0?split=train&last=step'.

    Args:
        source: Dataset as FORMAT:PATH, such as rlds:~/kitchen/1.0.0, or PATH alone; docs/importing.md lists formats.
        store: Directory of a store, which is created if needed, or the address of a server (HOST:PORT).
        kind: Kind of the episodes; by default that in the dataset, or practice if it has none.
        codec: How camera frames are stored: raw and png keep every pixel, jpeg and h264 lose detail, and auto stores
            frames above 128x128 pixels as h264. keep stores the H.264 frames of a LeRobot dataset as they are, without
            encoding them again, and others raw; auto does this, too, where their GOPs have up to 10 frames.
        dry_run: Print how the fields are mapped, and read only the first episode.
        workers: Number of decoder threads, for formats that have them.
        options: Options of the format as NAME=VALUE, as they may also follow the path: fps=30 action=/leader:position.
        token_file: File with the server's token, if it needs one.
        tls_cert: File with the server's TLS certificate in PEM format, if it uses one.
    """
    console = Console(highlight=False)
    dataset = parse_dataset_path(source)
    dataset = replace(dataset, options={**dataset.options, **_parsed(options, dataset)})
    if workers is not None:
        dataset = replace(dataset, options={**dataset.options, "workers": str(workers)})
    if store is None and not dry_run:
        raise UnderstudyError("store: expected a directory or the address of a server; to look first, add --dry-run")
    with closing(dataset.format.read(dataset.path, dataset.options)) as opened:
        if dry_run:
            _show(console, dataset, opened)
            return 0
        assert store is not None
        with (
            dataset_io.open_import_target(store, token_file=token_file, tls_cert=tls_cert) as target,
            ProgressLine(console, f"import {dataset.path.name}", "episodes") as progress,
        ):
            report = dataset_io.import_episodes(opened, target, dataset, kind=kind, codec=codec, progress=progress)
    parts = [f"{report.num_imported:,} episodes imported ({report.num_steps:,} steps)"]
    if report.num_known:
        parts.append(f"{report.num_known:,} were in the store already")
    if report.num_without_steps:
        parts.append(f"{report.num_without_steps:,} have no step and were skipped")
    if report.kept:
        console.print(f"frames stored as the dataset has them: {', '.join(report.kept)}", soft_wrap=True)
    for note in opened.notes if isinstance(opened, NotedDataset) else ():
        console.print(escape(note), style="bright_black", soft_wrap=True)
    console.print("; ".join(parts), style="green" if report.num_imported or report.num_known else "red", soft_wrap=True)
    return 0 if report.num_imported or report.num_known else 1


def _parsed(options: tuple[str, ...], dataset: DatasetPath) -> dict[str, str]:
    found: dict[str, str] = {}
    for option in options:
        name, equals, value = option.partition("=")
        if not equals:
            raise UnderstudyError(f"--options: expected NAME=VALUE, got {option!r}; give a value, such as fps=30")
        if name in found or name in dataset.options:
            raise UnderstudyError(f"--options: {name} is given twice; give each option once")
        found[name] = value
    return found


def _show(console: Console, dataset: DatasetPath, opened: DatasetReader) -> None:
    """Print what each field of the dataset becomes."""
    total = "an unknown number of" if opened.num_episodes is None else f"{opened.num_episodes:,}"
    console.print(f"[bold]{escape(str(dataset.path))}[/bold]  {dataset.format.name}, {total} episodes", soft_wrap=True)
    columns = opened.spec.columns
    table = Table()
    for name in ("dataset", "store", "type", "conversion"):
        table.add_column(name, overflow="fold")
    for line in opened.mapping:
        leaf = columns.get(line.internal)
        table.add_row(escape(line.external) or "-", escape(line.internal) or "-", str(leaf or ""), escape(line.how))
    console.print(table)
    console.print("Nothing was imported.")

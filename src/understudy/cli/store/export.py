"""`understudy export`: exports episodes of a store as a dataset of another format."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from understudy.cli.progress import ProgressLine
from understudy.formats import parse_dataset_path
from understudy.training.data import dataset_io


def command(
    store: Annotated[Path, tyro.conf.Positional],
    target: Annotated[str, tyro.conf.Positional],
    *,
    where: str = "1",
) -> int:
    """Export episodes of a store as a dataset of another format; the dataset appears only when it is complete.

    Prints what was written with loss, and what the format cannot hold. Options of the format follow the path:
    'rlds:out?images=jpeg'.

    Args:
        store: Directory of the store, to which another process may be writing.
        target: New dataset as FORMAT:PATH, such as rlds:out/kitchen/1.0.0; docs/importing.md lists the formats.
        where: Episodes to export, as an SQL condition such as "success = 1 and kind = 'demonstration'"; 1 means all.
    """
    console = Console(highlight=False)
    dataset = parse_dataset_path(target)
    with ProgressLine(console, f"export {dataset.path.name}", "episodes") as progress:
        report = dataset_io.export_episodes(store, dataset, where=where, progress=progress)
    console.print(
        f"{report.num_episodes:,} episodes exported ({report.num_steps:,} steps) to {dataset.path}",
        style="green",
        soft_wrap=True,
    )
    if report.num_unfinished:
        console.print(f"{report.num_unfinished:,} have no complete step yet and were skipped", soft_wrap=True)
    if report.kept:
        console.print(f"frames written as they are stored: {', '.join(report.kept)}", soft_wrap=True)
    for note in report.notes:
        console.print(note, soft_wrap=True, markup=False)
    for sentence in dataset.format.cannot:
        console.print(f"  {dataset.format.name}: {sentence}", style="dim", soft_wrap=True, markup=False)
    return 0

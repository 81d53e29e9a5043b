"""`understudy export`: episodes of a store as a data set of another format."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from understudy.cli.store.import_ import episodes_bar
from understudy.formats import find_place
from understudy.training.data import dataset_io as exchange


def command(
    store: Annotated[Path, tyro.conf.Positional],
    target: Annotated[str, tyro.conf.Positional],
    *,
    where: str = "1",
) -> int:
    """Write episodes of a store as a data set of another format; it is there whole, or not at all.

    What the format cannot carry is printed. Options of the format stand behind the path: 'rlds:out?images=jpeg'.

    Args:
        store: The directory of the store; another process may be writing to it.
        target: FORMAT:PATH of the new data set, such as rlds:out/kitchen/1.0.0; formats are in docs/importing.md.
        where: Which episodes: SQL on their attributes, as in views, such as "success = 1 and kind = 'demonstration'".
    """
    console = Console(highlight=False)
    place = find_place(target)
    with episodes_bar(console, place.path.name) as progress:
        report = exchange.export_episodes(store, place, where=where, progress=progress)
    console.print(
        f"{report.num_episodes:,} episodes exported ({report.num_steps:,} steps) to {place.path}",
        style="green",
        soft_wrap=True,
    )
    if report.num_unfinished:
        console.print(f"{report.num_unfinished:,} have no finished step yet and were left out", soft_wrap=True)
    for sentence in place.format.cannot:
        console.print(f"  {place.format.name}: {sentence}", style="dim", soft_wrap=True, markup=False)
    return 0

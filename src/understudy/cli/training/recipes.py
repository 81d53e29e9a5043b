"""`understudy recipes`: named, tested starting points of runs."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.table import Table

from understudy.cli.console import needs_extra
from understudy.core import UnderstudyError


def list_() -> int:
    """List the recipes, with what each of them does."""
    with needs_extra("train"):
        from understudy.recipes import NAMES, source_of

    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name in NAMES:
        table.add_row(f"[bold]{name}[/]", source_of(name).read_text().removeprefix('"""').partition("\n")[0])
    console = Console(highlight=False)
    console.print(table)
    console.print(
        "\n`understudy init NAME RUN` makes a run; `understudy recipes copy NAME` copies the file to change it"
    )
    return 0


def copy(name: Annotated[str, tyro.conf.Positional], out: Annotated[Path | None, tyro.conf.Positional] = None) -> int:
    """Copy a recipe, a short Python file, so that you can change it and make runs of it.

    Args:
        name: Name of the recipe, as `understudy recipes` lists it.
        out: File to write; by default the recipe's own name in the working directory.
    """
    with needs_extra("train"):
        from understudy.recipes import source_of

    source = source_of(name)
    out = out or Path(source.name)
    if out.suffix != ".py":
        raise UnderstudyError(f"out: expected a file that ends in .py, got {out}; rename it")
    if out.exists():
        raise UnderstudyError(f"{out}: exists already; name another file after the recipe, or remove it")
    shutil.copyfile(source, out)
    Console(highlight=False).print(
        f"{out}: change it, then `understudy init {out} RUN` makes a run of it", soft_wrap=True, markup=False
    )
    return 0

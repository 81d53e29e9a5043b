"""`understudy recipes`: named, tested starting points of runs."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console
from rich.table import Table

from understudy.cli.console import needs_extra
from understudy.core import UnderstudyError


def command(
    action: Annotated[Literal["list", "copy"], tyro.conf.Positional] = "list",
    name: Annotated[str | None, tyro.conf.Positional] = None,
    out: Annotated[Path | None, tyro.conf.Positional] = None,
) -> int:
    """List the recipes, or copy one: a short Python file that you can change and make runs of.

    Args:
        action: What to do: list the recipes, or copy the one that follows.
        name: Name of the recipe to copy.
        out: File to write; by default the recipe's own name in the working directory.
    """
    if action == "copy":
        if name is None:
            raise UnderstudyError("name: expected the name of a recipe to copy; `understudy recipes` lists them")
        return copy(name, out)
    if name is not None:
        raise UnderstudyError(f"name: the list has all recipes, got {name!r}; to copy it, say `recipes copy {name}`")
    return list_recipes()


def list_recipes() -> int:
    """Print the recipes, with what each of them does."""
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


def copy(name: str, out: Path | None) -> int:
    """Copy a recipe, and say what to do with it."""
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

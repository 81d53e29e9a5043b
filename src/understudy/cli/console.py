"""What the commands share: a progress bar, numbers for people, and what to do when a part is not installed."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from understudy.core.errors import UnderstudyError


@contextmanager
def progress_bar(console: Console, what: str) -> Iterator[Callable[[int, int], None]]:
    """A bar that is moved by calling it with (done, of); it goes away at the end."""
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TextColumn("segments"), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(what, total=None)

        def move(done: int, of: int) -> None:
            bar.update(task, completed=done, total=of)

        yield move


def size_text(num_bytes: int) -> str:
    """A number of bytes as a person reads it."""
    value = float(num_bytes)
    for unit in ("bytes", "kB", "MB", "GB"):
        if abs(value) < 1000:
            return f"{value:.0f} {unit}" if unit == "bytes" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"


def with_remote(module: str) -> Any:
    """A module that needs the extra `remote`."""
    return with_extra(module, "remote")


def with_extra(module: str, extra: str) -> Any:
    """A module that needs an extra."""
    with needs_extra(extra):
        return importlib.import_module(module)


@contextmanager
def needs_extra(extra: str) -> Iterator[None]:
    """Around imports that need an extra: an error says what to install."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("understudy"):
            raise
        raise UnderstudyError(
            f"{error.name} is not installed, and this needs it; run `pip install 'understudy[{extra}]'`"
        ) from None

"""What commands share: sizes as text, and the error if an optional dependency is missing."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING

from understudy.core.errors import UnderstudyError

if TYPE_CHECKING:
    from rich.console import Console


def size_text(num_bytes: int) -> str:
    """A number of bytes as text, such as 1.5 MB."""
    value = float(num_bytes)
    for unit in ("bytes", "kB", "MB", "GB"):
        if abs(value) < 1000:
            return f"{value:.0f} {unit}" if unit == "bytes" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"


def print_page(console: Console, url: str, port: int, wanted: int) -> None:
    """Print the address of a page, and that its port is not the usual one."""
    if wanted not in (0, port):
        console.print(f"port {wanted} is taken, so the page is at port {port}", style="yellow", soft_wrap=True)
    console.print(f"the page: {url}", style="bold", soft_wrap=True, markup=False)


def with_remote(module: str) -> ModuleType:
    """Import a module that needs the extra `remote`."""
    with_extra("grpc", "remote")  # a package may load its modules later
    return with_extra(module, "remote")


def with_extra(module: str, extra: str) -> ModuleType:
    """Import a module that needs an extra."""
    with needs_extra(extra):
        return importlib.import_module(module)


@contextmanager
def needs_extra(extra: str) -> Iterator[None]:
    """Around imports that need an extra: the error of a missing package says what to install."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("understudy"):
            raise
        raise UnderstudyError(
            f"{error.name}: this package is needed and not installed; run `pip install 'understudy-robotics[{extra}]'`"
        ) from None

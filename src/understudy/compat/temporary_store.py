"""The store of a buffer without a path: in a temporary directory, which is removed with the buffer."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any


def temporary_store_path(owner: object) -> tuple[Path, Callable[[], Any]]:
    """The path of a store, and a function that removes it; without a call it is removed with `owner`."""
    directory = tempfile.mkdtemp(prefix="understudy-")
    return Path(directory) / "store", weakref.finalize(owner, shutil.rmtree, directory, ignore_errors=True)

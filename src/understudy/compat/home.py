"""Where a buffer without a path lives: a temporary directory, which goes with the buffer."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any


def temporary_home(owner: object) -> tuple[Path, Callable[[], Any]]:
    """A place for a store, and the call that removes it; without the call it is removed when `owner` is gone."""
    directory = tempfile.mkdtemp(prefix="understudy-")
    return Path(directory) / "store", weakref.finalize(owner, shutil.rmtree, directory, ignore_errors=True)

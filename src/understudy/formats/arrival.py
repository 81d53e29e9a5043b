"""Arrival: a data set that was written under another name gets its own, whole and on disk, or not at all."""

from __future__ import annotations

import os
from pathlib import Path

from understudy.formats.format import FormatError


def arrive(made: Path, path: Path) -> None:
    """Rename a finished file or directory; never over what somebody else made meanwhile."""
    for file in (*made.rglob("*"), made):
        _sync(file)
    if path.exists():
        raise FormatError(f"{path}: was made by somebody else meanwhile; choose another path")
    made.rename(path)
    _sync(path.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

"""Arrival: a data set that was written under another name gets its own, whole and on disk, or not at all."""

from __future__ import annotations

from pathlib import Path

from understudy.durable import files
from understudy.formats.format import FormatError


def publish_dataset(made: Path, path: Path) -> None:
    """Rename a finished file or directory; never over what somebody else made meanwhile."""
    if path.exists():
        raise FormatError(f"{path}: was made by somebody else meanwhile; choose another path")
    files.move_durably(made, path)

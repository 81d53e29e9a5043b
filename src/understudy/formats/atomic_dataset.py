"""Atomic export: a dataset is written under a temporary name and renamed when it is complete and on disk."""

from __future__ import annotations

from pathlib import Path

from understudy.durable import files
from understudy.formats.format import FormatError


def publish_dataset(partial: Path, path: Path) -> None:
    """Rename a complete file or directory to `path`; refuses to replace anything."""
    if path.exists():
        raise FormatError(f"{path}: was created by another process in the meantime; choose another path")
    files.move_durably(partial, path)

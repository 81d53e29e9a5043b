"""Paths: the names of the files in a store's directory."""

from __future__ import annotations

from pathlib import Path

from understudy.core import StoreFormatError

CATALOG_FILE = "catalog.sqlite"
SEAL_FILE = "catalog.seal"
MARK_FILE = "catalog.mark"
LOCK_FILE = "writer.lock"
SEGMENTS_DIRECTORY = "segments"
PARAMETERS_DIRECTORY = "parameters"
INBOX_DIRECTORY = "inbox"
DERIVED_DIRECTORY = "derived"  # resized frames: a cache, see read/derived_frames.py
ESTIMATES_DIRECTORY = "estimates"  # what value models think of the steps, see read/estimates.py
REFUSED_DIRECTORY = "refused"  # in the inbox


def segment_path(store: Path, segment_id: int) -> Path:
    """The file of one segment."""
    return store / SEGMENTS_DIRECTORY / f"{segment_id:08d}.safetensors"


def segment_files(store: Path) -> list[Path]:
    """All segment files in the directory, by number, whether the catalog lists them or not."""
    return sorted(p for p in (store / SEGMENTS_DIRECTORY).glob("*.safetensors") if p.stem.isdigit())


def parameters_path(store: Path, version: int) -> Path:
    """The file of one published version of a policy's weights."""
    return store / PARAMETERS_DIRECTORY / f"{version:012d}.safetensors"


def parameter_files(store: Path) -> list[Path]:
    """The published versions in the directory, oldest first."""
    found = (store / PARAMETERS_DIRECTORY).glob("*.safetensors")
    return sorted((p for p in found if p.stem.isdigit()), key=lambda p: int(p.stem))


def no_store(path: Path) -> StoreFormatError:
    """The error that there is no store at this path."""
    if (path / "store" / CATALOG_FILE).is_file():
        return StoreFormatError(f"{path}: is a run, not a store; its store is {path / 'store'}")
    found = f"it has no {CATALOG_FILE}" if path.is_dir() else "there is no such directory"
    return StoreFormatError(f"{path}: not an Understudy store ({found}); check the path, or make one first")

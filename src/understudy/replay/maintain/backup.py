"""Backup: a second store with the same content, made in moments while the first is open and written to.

Sealed segments never change, so the two stores share their files by hard links; what one deletes or compacts the other
keeps. The catalog is copied. A crash in between leaves a directory without a catalog, which is no store.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

from understudy.core import StoreError
from understudy.durable import files
from understudy.replay.format.catalog import CATALOG_FILE
from understudy.replay.format.seal import write_seal
from understudy.replay.write.store import SEGMENTS_DIRECTORY, Store, segment_path


def backup(store: Store, path: Path) -> None:
    """Make a store at `path`, which must not exist, with all that is committed; durable when this returns."""
    if path.exists():
        raise StoreError(f"{path}: a backup is made in a new directory, and this exists; choose another path")
    for segment in store.catalog.segments("not sealed"):
        store.seal(segment.id)
    with store.changing():
        with files.naming(path, "create"):
            (path / SEGMENTS_DIRECTORY).mkdir(parents=True)
        for segment in store.catalog.segments():
            source, copy = store.segment_path(segment.id), segment_path(path, segment.id)
            if not (segment.sealed and _link(source, copy)):
                _copy(source, copy)
        files.sync_directory(path / SEGMENTS_DIRECTORY)
        _copy_catalog(store.path / CATALOG_FILE, path / CATALOG_FILE)
    write_seal(path)
    files.sync_directory(path)
    files.sync_directory(path.parent)


def _link(source: Path, copy: Path) -> bool:
    """Whether the file now has a second name; not across file systems, and not on all of them."""
    try:
        os.link(source, copy)
    except OSError:
        return False
    return True


def _copy(source: Path, copy: Path) -> None:
    with files.naming(copy, "copy"):
        shutil.copyfile(source, copy)
        _sync(copy)


def _copy_catalog(source: Path, copy: Path) -> None:
    new = copy.with_name(copy.name + ".new")
    with files.naming(copy, "copy"):
        with (
            closing(sqlite3.connect(f"{source.resolve().as_uri()}?mode=ro", uri=True)) as old,
            closing(sqlite3.connect(new)) as fresh,
        ):
            old.backup(fresh)
        _sync(new)
        new.rename(copy)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        files.sync_data(fd, path)
    finally:
        os.close(fd)

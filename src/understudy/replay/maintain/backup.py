"""Backup: a second store with the same content, made quickly while the first is open and written to.

Sealed segments never change, so the two stores share their files by hard links; what is deleted or compacted in one
stays in the other. So it is with the newest published parameters. The catalog is copied last: a crash meanwhile leaves
a directory without a catalog, which is no store.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

from understudy.core import StoreError, StoreFailedError
from understudy.durable import files
from understudy.durable.errors import store_errors
from understudy.replay.format.paths import (
    CATALOG_FILE,
    SEGMENTS_DIRECTORY,
    parameter_files,
    parameters_path,
    segment_path,
)
from understudy.replay.format.seal import write_seal
from understudy.replay.write.store import Store


def backup(store: Store, path: Path) -> None:
    """Make a store at `path`, which must not exist, with all that is committed; durable when this returns."""
    if path.exists():
        raise StoreError(f"{path}: a backup is made in a new directory, and this exists; choose another path")
    for segment in store.catalog.segments("not sealed"):
        store.seal(segment.id)
    with store.commit_lock():
        with store_errors(path, "create"):
            (path / SEGMENTS_DIRECTORY).mkdir(parents=True)
        for segment in store.catalog.segments():
            source, copy = store.segment_path(segment.id), segment_path(path, segment.id)
            if not (segment.sealed and _link(source, copy)):
                _copy(source, copy)
        with store_errors(path, "fsync"):
            files.sync_directory(path / SEGMENTS_DIRECTORY)
        _copy_parameters(store.path, path)
        _copy_catalog(store.path / CATALOG_FILE, path / CATALOG_FILE)
    write_seal(path)
    with store_errors(path, "fsync"):
        files.sync_directory(path)
        files.sync_directory(path.parent)


def _copy_parameters(store: Path, path: Path) -> None:
    """Copy the newest version. A server may replace it meanwhile; then the next one is taken."""
    while found := parameter_files(store):
        source = found[-1]
        copy = parameters_path(path, int(source.stem))
        with store_errors(copy, "create"):
            copy.parent.mkdir(exist_ok=True)
        try:
            if not _link(source, copy):
                _copy(source, copy)
        except StoreFailedError:
            if source.exists():
                raise
            copy.unlink(missing_ok=True)
            continue
        with store_errors(path, "fsync"):
            files.sync_directory(copy.parent)
        return


def _link(source: Path, copy: Path) -> bool:
    """Whether the file now has a second name; not across file systems, and not on all of them."""
    try:
        os.link(source, copy)
    except OSError:
        return False
    return True


def _copy(source: Path, copy: Path) -> None:
    with store_errors(copy, "copy"):
        shutil.copyfile(source, copy)
        files.sync_file(copy)


def _copy_catalog(source: Path, copy: Path) -> None:
    new = copy.with_name(copy.name + ".new")
    with store_errors(copy, "copy"):
        try:
            with (
                closing(sqlite3.connect(f"{source.resolve().as_uri()}?mode=ro", uri=True)) as old,
                closing(sqlite3.connect(new)) as fresh,
            ):
                old.backup(fresh)
        except sqlite3.Error as error:
            raise StoreFailedError(
                f"{source}: copy to {copy} failed: {error}; check both disks and their free space, remove "
                f"{copy.parent}, and make the backup again"
            ) from error
        files.sync_file(new)
        new.rename(copy)

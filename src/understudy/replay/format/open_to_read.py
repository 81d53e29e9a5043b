"""Opening a catalog to read, also in a directory where this user may not write, such as a read-only file system.

SQLite coordinates readers and the writer with two files beside the catalog: the log (-wal) and shared memory (-shm).
Without the right to write there, a reader can use those that a writer made, but cannot make them. So:

| files beside the catalog | how it is read |
|---|---|
| -shm | as usual, also while another process writes, or after it was killed |
| neither, or an empty log | as immutable: nobody writes now, and each read checks that nobody began to |
| a log without -shm | not at all: its commits cannot be read without making a -shm |
"""

from __future__ import annotations

import os
from pathlib import Path

from understudy.core import DamageError, StoreError, StoreFormatError
from understudy.replay.format.catalog import LOG_SUFFIX, SHARED_SUFFIX, Catalog, beside
from understudy.replay.format.paths import CATALOG_FILE

TRIES = 5  # a writer that opens or closes the store meanwhile makes or removes the files


def open_to_read(directory: Path) -> Catalog:
    """A connection that only reads; a StoreFormatError if the catalog cannot be read with the rights of this user."""
    path = directory / CATALOG_FILE
    if os.access(directory, os.W_OK):
        return Catalog.open(path)
    problem = ""
    for _ in range(TRIES):
        try:
            if beside(path, SHARED_SUFFIX).exists():
                return Catalog.open(path)
            if not _has_content(beside(path, LOG_SUFFIX)):
                return Catalog.open(path, immutable=True)
            problem = f"{path.name}{LOG_SUFFIX} has commits that SQLite reads only where it may write"
        except (StoreFormatError, DamageError):
            raise
        except StoreError as error:  # SQLite could not open its files, or they changed meanwhile
            problem = str(error)
    raise StoreFormatError(
        f"{directory}: this user may not write here, and {problem}; copy the directory to a place where you may write, "
        f"or read it as the user who writes it"
    )


def _has_content(path: Path) -> bool:
    try:
        return path.stat().st_size > 0
    except OSError:
        return False

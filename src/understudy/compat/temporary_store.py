"""The store of a buffer without a path: in a temporary directory, which is removed with the buffer.

Within `keeping_buffers(directory)` it is in that directory instead, and stays.

A process that is killed cannot remove its own. Each directory holds a file that its process has locked, and the next
process that makes one removes those whose lock is free.
"""

from __future__ import annotations

import fcntl
import itertools
import logging
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

PREFIX = "understudy-buffer-"
_LOCK = "lock"


_kept: Iterator[Path] | None = None


@contextmanager
def keeping_buffers(directory: Path) -> Iterator[None]:
    """Buffers without a path are kept as buffer-1, buffer-2, ... in a directory, in the order in which they are made.

    A script that makes the same buffers in the same order finds its data again at its next start.
    """
    global _kept
    before, _kept = _kept, (directory / f"buffer-{number}" for number in itertools.count(1))
    try:
        yield
    finally:
        _kept = before


def temporary_store_path(owner: object) -> tuple[Path, Callable[[], Any]]:
    """The path of a store, and a function that removes it; without a call it is removed with `owner`."""
    if _kept is not None:
        return next(_kept), lambda: None
    remove_abandoned()
    directory = Path(tempfile.mkdtemp(prefix=PREFIX))
    # Locked before it has its name, so that no other process finds it without its lock.
    lock = os.open(directory / f"{_LOCK}.new", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    (directory / f"{_LOCK}.new").rename(directory / _LOCK)
    return directory / "store", weakref.finalize(owner, _remove, directory, lock)


def remove_abandoned() -> int:
    """Remove the directories of processes that were killed; returns how many there were."""
    num_removed = 0
    for directory in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        try:
            lock = os.open(directory / _LOCK, os.O_RDWR | os.O_CLOEXEC)
        except OSError:  # it is being made or removed, or belongs to another user
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # its process lives
            os.close(lock)
            continue
        _remove(directory, lock)
        num_removed += 1
    if num_removed:
        logger.info("removed %d temporary buffers of processes that were killed", num_removed)
    return num_removed


def _remove(directory: Path, lock: int) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    os.close(lock)

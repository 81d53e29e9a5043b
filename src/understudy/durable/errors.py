"""Errors: an OSError of a store's file becomes an error of ours that names the file and says what to do."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from understudy.core import StoreError, StoreFailedError, TooManyFilesError
from understudy.durable.open_files import TOO_MANY

_ADVICE = {
    errno.ENOSPC: "free some space and open the store again; what was acknowledged is safe",
    errno.EDQUOT: "raise the quota and open the store again; what was acknowledged is safe",
    errno.EROFS: "remount the file system for writing and open the store again",
    errno.EACCES: "give this user the right to write there and open the store again",
    errno.ENOENT: "the file is gone; run `understudy verify` on the store",
}
_DEFAULT_ADVICE = "check the disk, then run `understudy verify` and open the store again; what was acknowledged is safe"


def store_error(error: OSError, path: Path, operation: str) -> StoreError:
    """The error for the user: which file, which operation, what the system answered, what to do.

    It is a StoreFailedError, unless only the limit of open files is reached.
    """
    if error.errno in TOO_MANY:
        return TooManyFilesError(
            f"{path}: {operation} failed: {error.strerror}; close some files, or raise the limit (ulimit -n)"
        )
    advice = _ADVICE.get(error.errno or 0, _DEFAULT_ADVICE)
    return StoreFailedError(f"{path}: {operation} failed: {error.strerror or error}; {advice}")


@contextmanager
def store_errors(path: Path, operation: str) -> Iterator[None]:
    """Turn an OSError inside the block into a `store_error` that names `path`."""
    try:
        yield
    except OSError as error:
        raise store_error(error, path, operation) from error

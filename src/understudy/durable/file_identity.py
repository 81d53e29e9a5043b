"""File identity: whether a name still stands for the file that a process has open.

A process that has a file open goes on writing to it after somebody has removed the name, and no call fails. Whoever
acknowledges what was written asks first whether the file is still there; it costs about a microsecond.
"""

from __future__ import annotations

import os
from pathlib import Path

from understudy.core import StoreFailedError


class FileIdentity:
    """The file that had this name when this was made; or the file that `fd` has open."""

    def __init__(self, path: Path, fd: int | None = None):
        self.path = path
        self._name = os.fspath(path)
        found = os.stat(path if fd is None else fd)
        self._identity = (found.st_dev, found.st_ino)

    def is_in_place(self) -> bool:
        """Whether the name stands for the same file."""
        try:
            found = os.stat(self._name)
        except OSError:
            return False
        return (found.st_dev, found.st_ino) == self._identity

    def check(self) -> None:
        """A StoreFailedError if the name is gone, or stands for another file."""
        if not self.is_in_place():
            raise StoreFailedError(
                f"{self.path}: removed, moved or replaced while this process writes to the store; nothing more is "
                f"acknowledged. Stop all processes that use the store, put the file back if you can, and run "
                f"`understudy verify`"
            )

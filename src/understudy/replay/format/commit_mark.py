"""Commit mark: the number of the last acknowledged commit, in a file beside the catalog, so that a lost log is noticed.

SQLite ignores a write-ahead log whose bytes are damaged, and does not miss one that is gone: the catalog is then sound
and too old. The mark is written after each commit and not synced, so it costs a write of 16 bytes. After a kill it is
exact; after a power cut it may be some seconds old, but never newer than the last durable commit.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path

from understudy.core import DamageError
from understudy.durable import files
from understudy.durable.errors import store_error, store_errors
from understudy.replay.format.paths import MARK_FILE
from understudy.replay.format.segment import digest

_MARK = struct.Struct("<QQ")  # the commit, and the checksum of its 8 bytes


class CommitMark:
    """The mark of a store that is open for writing."""

    def __init__(self, directory: Path, commit: int):
        """Write the mark anew, durably."""
        self.path = directory / MARK_FILE
        with store_errors(self.path, "write"):
            files.write_durably(self.path, _encode(commit))
            self._fd = os.open(self.path, os.O_WRONLY)

    def write(self, commit: int) -> None:
        """Call this when a commit is durable, before anybody is told of it."""
        with store_errors(self.path, "write"):
            files.write_at(self._fd, _encode(commit), 0)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def read_mark(directory: Path) -> int:
    """The marked commit; 0 if there is no mark, as in stores of earlier versions. A DamageError if it is damaged."""
    path = directory / MARK_FILE
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return 0
    except OSError as error:
        raise store_error(error, path, "read") from error
    commit = _MARK.unpack(content)[0] if len(content) == _MARK.size else 0
    if content != _encode(commit):
        raise DamageError(f"{path}: not what was written; run `understudy repair`, which writes it again")
    return int(commit)


def _encode(commit: int) -> bytes:
    return _MARK.pack(commit, digest(struct.pack("<Q", commit)))

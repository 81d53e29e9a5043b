"""Lock: the right of one process to write in a directory; the kernel releases it when that process dies."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import sys
import time
import weakref
from pathlib import Path

from understudy.core import StoreLockedError, UnderstudyError
from understudy.durable.errors import store_error
from understudy.durable.file_identity import FileIdentity
from understudy.durable.files import write_at


class LockHeldError(UnderstudyError):
    """Another process holds the lock; `owner` says which, as far as it has written that down."""

    def __init__(self, path: Path, owner: str):
        super().__init__(f"{path}: held by another process ({owner}); stop it first")
        self.owner = owner


class FileLock:
    """An exclusive lock on a file, from the constructor to `release`; the file says who holds it.

    Raises LockHeldError if another process has it. A forked child does not inherit it: it closes its copy at once.
    """

    def __init__(self, path: Path):
        self.path = path
        fd = _open_locked(path)
        while not FileIdentity(path, fd).is_in_place():  # it was removed before it was locked
            os.close(fd)
            fd = _open_locked(path)
        self._fd: int | None = fd
        self.identity = FileIdentity(path, fd)
        _held.add(self)
        content = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "command": " ".join(sys.argv)[:500],
            "since": time.strftime("%Y-%m-%d %H:%M:%S"),
        }
        try:
            os.ftruncate(fd, 0)
            write_at(fd, json.dumps(content).encode(), 0)
        except BaseException:
            self.release()
            raise

    @property
    def held(self) -> bool:
        return self._fd is not None

    def release(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
        _held.discard(self)


def _open_locked(path: Path) -> int:
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        _lock(fd)
    except OSError as error:
        owner = os.pread(fd, 4096, 0).decode(errors="replace")
        os.close(fd)
        if error.errno not in (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES):
            raise
        raise LockHeldError(path, _owner_text(owner)) from None
    return fd


class WriterLock(FileLock):
    """The lock of the process that writes to a store or a spool; errors say so."""

    def __init__(self, path: Path):
        try:
            super().__init__(path)
        except LockHeldError as error:
            if _is_held_here(path):
                raise StoreLockedError(
                    f"{path.parent}: this process is writing to this store already; use the one that it has open, "
                    f"or close that first"
                ) from None
            raise StoreLockedError(
                f"{path.parent}: another process is writing to this store ({error.owner}); "
                f"stop it, or only read, which any number of processes may do at the same time"
            ) from None
        except OSError as error:
            raise store_error(error, path, "lock") from error


def _lock(fd: int, *, tries: int = 10) -> None:
    """Take the lock; a few tries, because `lock_is_held` in another process has it for an instant."""
    for _ in range(tries - 1):
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.01)
        else:
            return
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)


def lock_is_held(path: Path) -> bool:
    """Whether some process holds the lock at `path` now."""
    try:
        fd = os.open(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False


def _owner_text(content: str) -> str:
    try:
        owner = json.loads(content)
        return f"pid {owner['pid']} on {owner['host']}, since {owner['since']}: {owner['command']}"
    except (ValueError, KeyError, TypeError):
        return "it has not written who it is"


def _is_held_here(path: Path) -> bool:
    """Whether this process itself holds the lock at `path`."""
    return any(lock.path.resolve() == path.resolve() for lock in list(_held))


_held: weakref.WeakSet[FileLock] = weakref.WeakSet()


def _release_in_child() -> None:
    for lock in list(_held):
        lock.release()


os.register_at_fork(after_in_child=_release_in_child)

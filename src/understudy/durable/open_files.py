"""Open files: files that are read now and then, of which a process holds only so many open at a time.

A store can have more segment files than a process may have descriptors. An `OpenFile` has a descriptor while somebody
reads it, and keeps it afterwards until others need it: beyond a quarter of the limit (RLIMIT_NOFILE), those that were
not read for the longest time are closed, and are opened again when they are read again. All readers of a process share
this limit; the other three quarters are left to sockets, catalogs and everything else.

    file = OpenFile(path)
    with file as fd:  # nobody closes it meanwhile
        os.pread(fd, size, offset)
"""

from __future__ import annotations

import errno
import os
import resource
import threading
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

SHARE = 4  # of the limit, one part in so many is used here
MIN_OPEN = 8  # whatever the limit is
TOO_MANY = (errno.EMFILE, errno.ENFILE)


class OpenFile:
    """A file that is open whenever it is used; any number of threads may use it at once."""

    def __init__(self, path: Path, flags: int = os.O_RDONLY):
        """Opens the file; raises OSError. One that may be written to keeps its descriptor until `close`."""
        self.path = path
        self._flags = flags
        self._fd = -1
        self._num_users = 0
        self._closed = False
        self._random_reads = False
        self._identity: tuple[int, int] | None = None  # device and inode
        self.__enter__()
        if flags == os.O_RDONLY:
            self.__exit__()

    def __enter__(self) -> int:
        with _pool.lock:
            if self._closed:
                raise OSError(errno.EBADF, "used after close()", str(self.path))
            if self._fd < 0:
                self._open()
            _pool.idle.pop(self, None)
            self._num_users += 1
            return self._fd

    def __exit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        trace: TracebackType | None = None,
    ) -> None:
        with _pool.lock:
            self._num_users -= 1
            if self._num_users == 0:
                _pool.idle[self] = None
                if self._closed:
                    _pool.close(self)

    def close(self) -> None:
        """Close it now, or when its last user has finished."""
        with _pool.lock:
            if self._closed:
                return
            self._closed = True
            if self._flags != os.O_RDONLY:
                self._num_users -= 1
            if self._num_users == 0:
                _pool.close(self)

    def expect_random_reads(self) -> None:
        """Let the system read nothing ahead of what is asked for."""
        self._random_reads = True
        with self as fd:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)

    def _open(self) -> None:
        fd = _pool.open(lambda: os.open(self.path, self._flags, 0o644))
        found = os.fstat(fd)
        identity = (found.st_dev, found.st_ino)
        if self._identity not in (None, identity):
            _pool.num_open -= 1
            os.close(fd)
            raise FileNotFoundError(errno.ENOENT, "another file has its name now", str(self.path))
        if self._random_reads:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        self._fd, self._identity = fd, identity


class _Pool:
    """The open files of this process. Its methods are called with the lock held."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.idle: OrderedDict[OpenFile, None] = OrderedDict()  # open and not in use, the longest unused first
        self.num_open = 0

    def open(self, call: Callable[[], int]) -> int:
        """A new descriptor; files that are not in use are closed for it, if need be."""
        while self.idle and self.num_open >= max_open_files():
            self.close(next(iter(self.idle)))
        while True:
            try:
                fd = call()
            except OSError as error:
                if error.errno not in TOO_MANY or not self.idle:
                    raise
                self.close(next(iter(self.idle)))
            else:
                self.num_open += 1
                return fd

    def close(self, file: OpenFile) -> None:
        self.idle.pop(file, None)
        if file._fd >= 0:
            os.close(file._fd)
            file._fd = -1
            self.num_open -= 1

    def after_fork(self) -> None:
        """In the child: another thread may have held the lock."""
        self.lock = threading.Lock()


_pool = _Pool()
os.register_at_fork(after_in_child=_pool.after_fork)


def num_open_files() -> int:
    """How many files this process holds open here."""
    return _pool.num_open


def max_open_files() -> int:
    """Beyond how many open files those that are not in use are closed."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(soft // SHARE, MIN_OPEN) if soft != resource.RLIM_INFINITY else 2**20


def close_removed() -> None:
    """Close the files that have no name any more and are not in use: their disk space is free only then."""
    with _pool.lock:
        for file in list(_pool.idle):
            if file._fd >= 0 and os.fstat(file._fd).st_nlink == 0:
                _pool.close(file)


def raise_limit() -> int:
    """Raise the limit of open files of this process to the highest that the system allows; returns it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard

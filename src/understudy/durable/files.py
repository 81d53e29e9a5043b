"""Files: whole writes, durable renames, the lock of the writing process, and errors that name the file.

Every call here either does all it says or raises a StoreFailedError with the file and what to do.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import socket
import sys
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from understudy.core import StoreFailedError, StoreFormatError, StoreLockedError

PIECE_BYTES = 1 << 20  # of a large write; aligned, so that no page is in two of them
LARGE_WRITE_BYTES = 1 << 17

NETWORK_FILE_SYSTEMS = frozenset(
    {
        "nfs",
        "nfs4",
        "cifs",
        "smb3",
        "smbfs",
        "9p",
        "afs",
        "ceph",
        "fuse.ceph",
        "lustre",
        "gpfs",
        "beegfs",
        "ocfs2",
        "gfs2",
        "fuse.glusterfs",
        "fuse.sshfs",
        "fuse.s3fs",
        "fuse.rclone",
        "fuse.gcsfuse",
        "davfs",
    }
)

_ADVICE = {
    errno.ENOSPC: "free some space and open the store again; all that was acknowledged is safe",
    errno.EDQUOT: "raise the quota and open the store again; all that was acknowledged is safe",
    errno.EROFS: "remount the file system for writing and open the store again",
    errno.EACCES: "give this user the right to write there and open the store again",
    errno.EMFILE: "raise the limit of open files (ulimit -n) and open the store again",
    errno.ENOENT: "the file is gone; run `understudy verify` on the store",
}
_DEFAULT_ADVICE = "check the disk, then run `understudy verify` and open the store again; all acknowledged is safe"

_SYNC_FILE_RANGE_WRITE = 2
_sync_file_range = getattr(ctypes.CDLL(None), "sync_file_range", None)  # Linux only
if _sync_file_range is not None:
    _sync_file_range.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]


def io_error(error: OSError, path: Path, what: str) -> StoreFailedError:
    """The error for the person: which file, what was tried, what the system said, what to do."""
    advice = _ADVICE.get(error.errno or 0, _DEFAULT_ADVICE)
    return StoreFailedError(f"{path}: {what} failed: {error.strerror or error}; {advice}")


@contextmanager
def naming(path: Path, what: str) -> Iterator[None]:
    """Turn an OSError inside into a StoreFailedError that names `path`."""
    try:
        yield
    except OSError as error:
        raise io_error(error, path, what) from error


def write_at(fd: int, data: Any, offset: int, path: Path) -> None:
    """Write all of a contiguous buffer at `offset`; the disk begins with the first pieces while others are copied."""
    view = memoryview(data).cast("B") if memoryview(data).nbytes else memoryview(b"")
    large = len(view) >= LARGE_WRITE_BYTES
    with naming(path, "write"):
        while view:
            piece = view[: PIECE_BYTES - offset % PIECE_BYTES]
            written = os.pwrite(fd, piece, offset)
            if written == 0:
                raise OSError(errno.EIO, "the system wrote nothing")
            if large:
                _start_writeback(fd, offset, written)
            view = view[written:]
            offset += written


def _start_writeback(fd: int, offset: int, size: int) -> None:
    """Let the disk begin with a range now, without waiting for it. If that fails, `sync_data` will say so."""
    if _sync_file_range is not None:
        _sync_file_range(fd, offset, size, _SYNC_FILE_RANGE_WRITE)


def read_at(fd: int, size: int, offset: int, path: Path) -> bytes:
    """Read `size` bytes at `offset`, or fewer at the end of the file."""
    parts = []
    with naming(path, "read"):
        while size:
            part = os.pread(fd, size, offset)
            if not part:
                break
            parts.append(part)
            size -= len(part)
            offset += len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def sync_data(fd: int, path: Path) -> None:
    with naming(path, "fdatasync"):
        getattr(os, "fdatasync", os.fsync)(fd)


def sync_directory(directory: Path) -> None:
    """Make the names in a directory durable."""
    with naming(directory, "fsync"):
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def replace_durably(path: Path, data: bytes | Sequence[bytes]) -> None:
    """Write a file, given whole or in pieces, so that after a crash it is either the old one or the new one, whole."""
    new = path.with_name(path.name + ".new")
    with naming(new, "write"):
        fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            offset = 0
            for piece in (data,) if isinstance(data, bytes) else data:
                write_at(fd, piece, offset, new)
                offset += len(piece)
            os.fsync(fd)
        finally:
            os.close(fd)
        os.replace(new, path)
    sync_directory(path.parent)


def write_again(path: Path) -> None:
    """Write a file's bytes over themselves, and sync. After a failed sync, the system shows what the disk may not have,
    believes it written, and lets the next sync succeed without it.
    """
    with naming(path, "write"):
        fd = os.open(path, os.O_RDWR)
        try:
            for offset in range(0, os.fstat(fd).st_size, PIECE_BYTES):
                write_at(fd, read_at(fd, PIECE_BYTES, offset, path), offset, path)
            os.fsync(fd)
        finally:
            os.close(fd)


def remove_durably(path: Path) -> None:
    with naming(path, "remove"):
        path.unlink(missing_ok=True)
    sync_directory(path.parent)


def data_extents(fd: int, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """The parts of [start, stop) of a sparse file that are not holes."""
    while start < stop:
        try:
            begin = os.lseek(fd, start, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # no data behind `start`
                return
            raise
        if begin >= stop:
            return
        end = min(os.lseek(fd, begin, os.SEEK_HOLE), stop)
        yield begin, end
        start = end


def file_system_type(path: Path, mounts: str | None = None) -> str | None:
    """The type of the file system that holds `path`, from Linux's mountinfo; None where that is not told."""
    if mounts is None:
        try:
            mounts = Path("/proc/self/mountinfo").read_text()
        except OSError:
            return None
    path = path.resolve()
    best: tuple[int, str] | None = None
    for line in mounts.splitlines():
        left, _, right = line.partition(" - ")
        fields = left.split()
        if len(fields) < 5 or not right:
            continue
        point = Path(fields[4].replace("\\040", " ").replace("\\011", "\t").replace("\\134", "\\"))
        if path.is_relative_to(point) and (best is None or len(point.parts) >= best[0]):
            best = (len(point.parts), right.split()[0])
    return best[1] if best else None


def refuse_network_file_system(path: Path, mounts: str | None = None) -> None:
    kind = file_system_type(path, mounts)
    if kind in NETWORK_FILE_SYSTEMS:
        raise StoreFormatError(
            f"{path}: a store cannot be on a network file system (this is {kind}), whose locks and syncs do not hold; "
            f"put it on a local disk, and send experience to it with `understudy serve` on that machine"
        )


class WriterLock:
    """The right to write to a store; held by one process, given back by the kernel when it dies.

    A forked child does not inherit it: it closes its copy at once.
    """

    def __init__(self, path: Path):
        self.path = path
        with naming(path, "open"):
            fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            _lock(fd)
        except OSError as error:
            owner = os.pread(fd, 4096, 0).decode(errors="replace")
            os.close(fd)
            if error.errno not in (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES):
                raise io_error(error, path, "lock") from error
            raise StoreLockedError(
                f"{path.parent}: another process is writing to this store ({_owner_text(owner)}); "
                f"stop it, or only read, which any number of processes may do at the same time"
            ) from None
        self._fd: int | None = fd
        _held.add(self)
        content = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "command": " ".join(sys.argv)[:500],
            "since": time.strftime("%Y-%m-%d %H:%M:%S"),
        }
        try:
            with naming(path, "write"):
                os.ftruncate(fd, 0)
                write_at(fd, json.dumps(content).encode(), 0, path)
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
        return "it has not said who it is"


_held: weakref.WeakSet[WriterLock] = weakref.WeakSet()


def _release_in_child() -> None:
    for lock in list(_held):
        lock.release()


os.register_at_fork(after_in_child=_release_in_child)

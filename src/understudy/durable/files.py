"""Files: write, rename and remove so that the result survives a crash or a power cut.

| call | after a crash |
|---|---|
| `write_durably`, `move_durably` | the old content or the new one, whole; once it returned, the new one |
| `write_atomically` | the same after a kill; after a power cut, maybe nothing: for a status that is written often |
| `write_synced`, `create_durably` | a part of the new file, until the call returned |
| `remove_durably`, `rename_durably` | the name before or after; once it returned, the one after |
| `make_directory_durably` | once it returned, the directory and those above it |

All of them raise OSError with the name of the file. Stores turn that into a StoreFailedError (`durable.errors`).
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

Buffer: TypeAlias = "bytes | bytearray | memoryview"
Content: TypeAlias = "Buffer | Sequence[Buffer]"  # whole, or in pieces that follow each other

PIECE_BYTES = 1 << 20  # of a large write; aligned, so that no page is in two pieces
LARGE_WRITE_BYTES = 1 << 17
SECTOR_BYTES = 512  # the smallest part that a disk may be unable to read; so every read loses the same rows

# What a read fails with if the disk cannot give a sector back, or its file system knows that it is not what was written
UNREADABLE = frozenset(
    getattr(errno, name)
    for name in ("EIO", "EBADMSG", "EUCLEAN", "ENODATA", "EREMOTEIO", "EILSEQ")
    if hasattr(errno, name)
)

_SYNC_FILE_RANGE_WRITE = 2
_sync_file_range = getattr(ctypes.CDLL(None), "sync_file_range", None)  # Linux only
if _sync_file_range is not None:
    _sync_file_range.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]


# ---- whole files


def write_durably(path: Path, content: Content) -> None:
    """Write or replace a file; when this returns, its content and its name are on the disk."""
    new = _new_name(path)
    _write(new, content, os.O_TRUNC, sync=os.fsync)
    os.replace(new, path)
    sync_directory(path.parent)


def write_atomically(path: Path, content: Content) -> None:
    """Write or replace a file that readers always see whole, without waiting for the disk."""
    new = _new_name(path)
    _write(new, content, os.O_TRUNC, sync=None)
    os.replace(new, path)


def write_synced(path: Path, content: Content) -> None:
    """Write a file in place and sync its content, not its name: for a directory that gets its name later."""
    _write(path, content, os.O_TRUNC, sync=os.fsync)


def create_durably(path: Path, content: Content) -> None:
    """Write a file that must not exist yet; when this returns, its content and its name are on the disk."""
    _write(path, content, os.O_EXCL, sync=sync_data)
    sync_directory(path.parent)


def rewrite(path: Path) -> None:
    """Write a file's bytes over themselves, and sync. After a failed sync, the system shows what the disk may not have,
    believes it written, and lets the next sync succeed without it.
    """
    fd = os.open(path, os.O_RDWR)
    with _closing(fd, path):
        for offset in range(0, os.fstat(fd).st_size, PIECE_BYTES):
            write_at(fd, read_at(fd, PIECE_BYTES, offset), offset)
        os.fsync(fd)


def _new_name(path: Path) -> Path:
    return path.with_name(f"{path.name}.new")


def _write(path: Path, content: Content, flag: int, *, sync: Callable[[int], None] | None) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | flag, 0o644)
    with _closing(fd, path):
        offset = 0
        for piece in (content,) if isinstance(content, bytes | bytearray | memoryview) else content:
            write_at(fd, piece, offset)
            offset += len(piece)
        if sync is not None:
            sync(fd)


@contextmanager
def _closing(fd: int, path: Path) -> Iterator[None]:
    """Close a descriptor at the end; an OSError of a call on it gets the name of the file."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
    finally:
        os.close(fd)


# ---- names


def rename_durably(path: Path, target: Path) -> None:
    """Rename within one directory, replacing what was there; when this returns, the new name is on the disk."""
    os.replace(path, target)
    sync_directory(target.parent)


def move_durably(path: Path, target: Path) -> None:
    """Give a finished file or directory its name: sync everything in it, rename it, and sync the name."""
    for part in (*path.rglob("*"), path):
        sync_file(part)
    rename_durably(path, target)


def make_directory_durably(path: Path) -> None:
    """Make a directory, with those above it, if it is not there yet; when this returns, all of them are on the disk.

    Its name is synced also if it was there: the process that made it may have been killed before it synced.
    """
    path = path.absolute()
    new = [directory for directory in (path, *path.parents) if not directory.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for directory in dict.fromkeys([path.parent, *(made.parent for made in new)]):
        sync_directory(directory)


def remove_durably(path: Path) -> None:
    """Remove a file, if it is there; when this returns, it does not come back."""
    path.unlink(missing_ok=True)
    sync_directory(path.parent)


def sync_directory(directory: Path) -> None:
    """Make the names in a directory durable."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    with _closing(fd, directory):
        os.fsync(fd)


def sync_file(path: Path) -> None:
    """Make what others wrote to a file durable, or the names in a directory."""
    fd = os.open(path, os.O_RDONLY)
    with _closing(fd, path):
        os.fsync(fd)


# ---- parts of an open file


def write_at(fd: int, data: Buffer | np.ndarray[Any, Any], offset: int) -> None:
    """Write all of a contiguous buffer at `offset`; the disk begins with the first pieces while others are copied."""
    source: Any = data  # numpy's stubs for older Pythons do not say that an array is a buffer
    view = memoryview(source)
    view = view.cast("B") if view.nbytes else memoryview(b"")
    large = len(view) >= LARGE_WRITE_BYTES
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


def read_at(fd: int, size: int, offset: int) -> bytes:
    """Read `size` bytes at `offset`, or fewer at the end of the file."""
    parts = []
    while size:
        part = os.pread(fd, size, offset)
        if not part:
            break
        parts.append(part)
        size -= len(part)
        offset += len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def read_readable(fd: int, size: int, offset: int) -> tuple[bytes, list[tuple[int, int]]]:
    """Read `size` bytes at `offset`, and those ranges of them, from 0, that the disk does not give or that lie after
    the end of the file: they are zero in the result. What cannot be read at once is read again sector by sector.
    """
    try:
        data = read_at(fd, size, offset)
        if len(data) == size:
            return data, []
    except OSError as error:
        if error.errno not in UNREADABLE:
            raise
    found = bytearray(size)
    lost: list[tuple[int, int]] = []
    start = 0
    while start < size:
        stop = min(size, start + SECTOR_BYTES - (offset + start) % SECTOR_BYTES)
        try:
            piece = read_at(fd, stop - start, offset + start)
        except OSError as error:
            if error.errno not in UNREADABLE:
                raise
            piece = b""
        found[start : start + len(piece)] = piece
        if start + len(piece) < stop:
            begin = lost.pop()[0] if lost and lost[-1][1] == start + len(piece) else start + len(piece)
            lost.append((begin, stop))
        start = stop
    return bytes(found), lost


def sync_data(fd: int) -> None:
    """Make the content and the size of an open file durable."""
    getattr(os, "fdatasync", os.fsync)(fd)


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

"""Derived frames: resized camera frames in files of their own, so that a frame is decoded once and not for each batch.

The files are a cache: whoever finds a frame in them saves the work of making it, and whoever does not makes it. All
processes of a machine share them, without locks. That is safe because each frame stands behind two checksums, its own
and that of the stored frame that it was made of: it is served only if both hold, at every read. So a file that is half
written, damaged, or of rows that have changed costs the work of making its frames again, and never gives other pixels.
Two processes that make the same frame write the same bytes. Nothing is synced.

They lie in the store's directory (`derived/`), so that they are deleted and moved with the store, on the same disk and
with the same rights. Nothing else reads them; deleting them is always safe.
"""

from __future__ import annotations

import fcntl
import logging
import math
import os
import re
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from shutil import disk_usage
from typing import Any, cast

import numpy as np
import xxhash

from understudy.core import StoreError
from understudy.core.resize import Resize
from understudy.core.spec import ArraySpec, canonical_json
from understudy.durable.file_identity import FileIdentity
from understudy.durable.open_files import OpenFile
from understudy.replay.format.arrays import Array
from understudy.replay.format.segment import digests

logger = logging.getLogger(__name__)

FORMAT = "understudy-derived-1"
LOCK_FILE = "filling.lock"
FILE_BYTES = 256 * 2**20  # of a full file
HEADER_BYTES = 16  # of each frame: the checksum of its source, and its own
RESERVED_BYTES = 16 * 2**20  # that a process may write between two looks at the size of the cache
IN_USE_S = 600.0  # a file that was read or written since then is not removed to make room
TOUCH_S = 60.0  # between two notes that a file is in use
RETRY_S = 10.0  # after which a cache that was full, or could not be written to, is tried again
FREE_SHARE, FREE_BYTES = 10, 16 * 2**30  # one part in so many of the disk, or so many bytes, left free are enough
FREE_TIMES = 4  # on a disk with less, the cache leaves so many times its own size free
_NAME = re.compile(r"[0-9a-f]{16}-[0-9]{8,}-[0-9]{4,}\.frames")


@dataclass(frozen=True, kw_only=True)
class FrameCache:
    """Where resized frames are kept, and how many of them.

    `directory` is by default `derived` in the store's directory. `max_bytes` is for all files in it, of all sizes and
    samplers; each process that fills it may exceed that by 16 MiB. With 0 there is no cache. When it is full, files
    that nobody has used for ten minutes make room. The rest of the disk is for recording: frames are added while a
    tenth of the disk is free, or 16 GiB, or four times the size of the cache. `num_threads` fill it in the background
    (0: none); by default one less than there are cores, and at most 4.
    """

    directory: Path | None = None
    max_bytes: int = 32 * 2**30
    num_threads: int | None = None

    def __post_init__(self) -> None:
        for name, value in (("max_bytes", self.max_bytes), ("num_threads", self.num_threads)):
            if value is not None and value < 0:
                raise StoreError(f"{name}: expected a number from 0, got {value}; 0 turns it off")

    @property
    def fill_threads(self) -> int:
        if self.num_threads is not None:
            return self.num_threads
        return min(max((os.cpu_count() or 1) - 1, 1), 4)


class CacheDirectory:
    """The directory of the files, and whether more may be written to it."""

    def __init__(self, path: Path, max_bytes: int):
        self.path = path
        self.is_used = max_bytes > 0
        self._max_bytes = max_bytes
        self._left = 0  # bytes that may be written before the next look
        self._full_until = 0.0
        self._warned = False

    @property
    def is_full(self) -> bool:
        """Whether frames cannot be kept at the moment."""
        return not self.is_used or time.monotonic() < self._full_until

    def write(self, name: str, buffers: Sequence[Any], offset: int) -> None:
        """Write to one of the files; nothing if there is no room."""
        if self.is_full:
            return
        try:
            self.path.mkdir(exist_ok=True)  # somebody may have deleted all of it
            if self._has_room(sum(memoryview(buffer).nbytes for buffer in buffers)):
                fd = os.open(self.path / name, os.O_WRONLY | os.O_CREAT, 0o644)
                try:
                    os.pwritev(fd, buffers, offset)  # what is missing after a short write is not there for a reader
                finally:
                    os.close(fd)
        except OSError as error:
            self._refuse(error)

    def lock_to_fill(self) -> int | None:
        """A descriptor to be closed when this process fills no more; None if another process fills."""
        try:
            self.path.mkdir(exist_ok=True)
            fd = os.open(self.path / LOCK_FILE, os.O_WRONLY | os.O_CREAT, 0o644)
        except OSError as error:
            self._refuse(error)
            return None
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(fd)
            return None
        return fd

    def _has_room(self, num_bytes: int) -> bool:
        if num_bytes > self._left:
            reserved = max(min(RESERVED_BYTES, self._max_bytes // 4), num_bytes)
            if not self._make_room(reserved):
                self._full_until = time.monotonic() + RETRY_S
                return False
            self._left = reserved
        self._left -= num_bytes
        return True

    def _make_room(self, num_bytes: int) -> bool:
        """Remove files that nobody uses until there is room, the longest unused first."""
        found = []
        for entry in os.scandir(self.path):
            with suppress(FileNotFoundError):
                if _NAME.fullmatch(entry.name):
                    known = entry.stat()
                    found.append((known.st_mtime, known.st_blocks * 512, entry.path))
        wanted = sum(size for _, size, _ in found) + num_bytes
        disk = disk_usage(self.path)
        if disk.free - num_bytes < min(disk.total // FREE_SHARE, FREE_BYTES, FREE_TIMES * wanted):
            self._warn(f"only {disk.free / 2**30:.1f} GiB of the disk are free")
            return False
        surplus = wanted - self._max_bytes
        for used_at, size, path in sorted(found):
            if surplus <= 0 or used_at > time.time() - IN_USE_S:
                break
            with suppress(FileNotFoundError):
                os.unlink(path)
            surplus -= size
        return surplus <= 0

    def _refuse(self, error: OSError) -> None:
        """Keep nothing for a while, because the directory cannot be written to; frames are made for each batch."""
        self._full_until = time.monotonic() + RETRY_S
        self._warn(str(error))

    def _warn(self, reason: str) -> None:
        if not self._warned:
            self._warned = True
            logger.warning("%s: resized frames are not kept here, and made again for each batch: %s", self.path, reason)


class WantedFrames:
    """Arrays that frames are read into, each with its header; what is not in the files is wrong."""

    def __init__(self, frames: Sequence[Array], sources: Array):
        """`sources` are the checksums of the stored frames."""
        self.frames = frames
        self.found = [0] * len(frames)  # the checksums of what was read
        self._sources = sources
        self._headers = np.zeros((len(frames), 2), np.uint64)
        self.buffers = [part for pair in zip(self._headers, frames, strict=True) for part in pair]

    def missing(self) -> Array:
        """The numbers of the frames that were not there."""
        read = np.array(self.found, np.uint64)
        return np.flatnonzero((self._headers[:, 0] != self._sources) | (self._headers[:, 1] != read) | (read == 0))


class DerivedFrames:
    """The files of one field in one size. A frame has the row of the stored frame that it was made of."""

    def __init__(self, directory: CacheDirectory, store_id: str, path: str, leaf: ArraySpec, resize: Resize):
        what = {"format": FORMAT, "store": store_id, "field": path, "spec": leaf.to_json(), **resize.to_json()}
        self._key = xxhash.xxh3_64_hexdigest(canonical_json(what).encode())
        self.directory = directory
        shape = (*resize.size, *leaf.fixed_shape[2:])
        self._row_bytes = HEADER_BYTES + math.prod(shape) * leaf.numpy_dtype.itemsize
        self.rows_per_file = max(FILE_BYTES // self._row_bytes, 1)
        self._files: dict[tuple[int, int], _ReadFile] = {}  # by segment and number

    def close(self) -> None:
        for key in list(self._files):
            self._forget(key)

    def read_runs(self, runs: Array, wanted: WantedFrames) -> None:
        """Read frames of neighbouring rows. Each run is a segment, the first row, and the first and the last number
        (the last not included) of the wanted frames that it is for; its rows are in one file (`rows_per_file`).
        """
        now = time.monotonic()
        preadv, digest = cast(Any, os.preadv), cast(Any, xxhash.xxh3_64_intdigest)
        frames, buffers, found = wanted.frames, wanted.buffers, wanted.found
        numbers, rows = np.divmod(runs[:, 1], self.rows_per_file)
        parts = np.stack([runs[:, 0], numbers, rows * self._row_bytes, runs[:, 2], runs[:, 3]], axis=1).tolist()
        for (segment, number), of_file in groupby(parts, key=itemgetter(0, 1)):
            file = self._open(segment, number, now)
            if file is None:
                continue
            try:
                with file as fd:
                    for _, _, offset, start, stop in of_file:
                        preadv(fd, buffers[2 * start : 2 * stop], offset)
                        found[start:stop] = map(digest, frames[start:stop])  # now, while they are in the CPU's cache
            except OSError:  # the file was removed, or the disk does not give it back: the frames are not there
                self._forget((segment, number))

    def write(self, segment: int, row: int, sources: Sequence[int], frames: Sequence[Array]) -> None:
        """Keep the frames of neighbouring rows, if there is room."""
        while frames:
            number, within = divmod(row, self.rows_per_file)
            count = min(len(frames), self.rows_per_file - within)
            headers = np.stack([np.array(sources[:count], np.uint64), digests(frames[:count])], axis=1)
            buffers = [part for pair in zip(headers, frames[:count], strict=True) for part in pair]
            self.directory.write(self._name_of(segment, number), buffers, within * self._row_bytes)
            known = self._files.get((segment, number))
            if known is not None and not known.identity.is_in_place():  # read from the new file from here on
                self._forget((segment, number))
            row, sources, frames = row + count, sources[count:], frames[count:]

    def has(self, segment: int, row: int, sources: Array) -> Array:
        """Which of neighbouring rows have a frame of these sources; the frames themselves are not looked at."""
        headers = np.zeros((len(sources), 2), np.uint64)
        now = time.monotonic()
        for at, header in enumerate(headers):
            number, within = divmod(row + at, self.rows_per_file)
            file = self._open(segment, number, now)
            if file is not None:
                with suppress(OSError), file as fd:
                    cast(Any, os.preadv)(fd, [header], within * self._row_bytes)
        found: Array = (headers[:, 0] == sources) & (headers[:, 1] != 0)
        return found

    def _name_of(self, segment: int, number: int) -> str:
        return f"{self._key}-{segment:08d}-{number:04d}.frames"

    def _open(self, segment: int, number: int, now: float) -> OpenFile | None:
        """The file of these rows, if there is one. Several threads may call it at once."""
        key = (segment, number)
        known = self._files.get(key)
        if known is not None:
            if now - known.touched_at < TOUCH_S or known.touch(now):
                return known.file
            self._forget(key)
        if not self.directory.is_used:
            return None
        try:
            fresh = _ReadFile(self.directory.path / self._name_of(segment, number), now)
        except OSError:
            return None
        known = self._files.setdefault(key, fresh)
        if known is not fresh:  # another thread was faster
            fresh.file.close()
        return known.file

    def _forget(self, key: tuple[int, int]) -> None:
        known = self._files.pop(key, None)
        if known is not None:
            known.file.close()


class _ReadFile:
    """A file that is read, and when its time was last set to say so."""

    def __init__(self, path: Path, now: float):
        self.identity = FileIdentity(path)  # first: if the file is gone, nothing is open
        self.file = OpenFile(path)
        self.file.expect_random_reads()
        self.touch(now)

    def touch(self, now: float) -> bool:
        """Say that the file is in use; False if it was removed."""
        self.touched_at = now
        with suppress(OSError):  # not everybody who may read it may do that
            os.utime(self.file.path)
        return self.identity.is_in_place()

"""Disk: the files of a simulated machine, and what a power cut leaves of them.

machine.c keeps what was written, resized, created, renamed and removed since the last sync. `power_cut` takes back a
random part of that: pages lose their last writes (or, torn, only some of their sectors), files their last sizes, and
directories their last changes of names, each from some moment on. What was synced stays.
"""

from __future__ import annotations

import ctypes
import os
import random
from pathlib import Path
from typing import Any, Literal, TypeAlias

PAGE, SECTOR = 4096, 512
READ, WRITE, RESIZE, SYNC, OPEN, CREATE, RENAME, REMOVE = (1 << bit for bit in range(8))
CHANGES = WRITE | RESIZE | SYNC | CREATE | RENAME | REMOVE
_CREATED, _RENAMED, _REMOVED, _MADE_DIRECTORY, _REMOVED_DIRECTORY, _LINKED = range(6)
DIRECTORY = -1  # instead of an inode

Kept: TypeAlias = Literal["nothing", "some", "torn"]  # of what was not synced


class _PageWrite(ctypes.Structure):
    _fields_ = (
        ("offset", ctypes.c_int64),
        ("size", ctypes.c_int32),
        ("lost", ctypes.c_int32),
        ("before", ctypes.POINTER(ctypes.c_ubyte)),
        ("after", ctypes.POINTER(ctypes.c_ubyte)),
    )


class _File(ctypes.Structure):
    _fields_ = (
        ("inode", ctypes.c_uint64),
        ("machine", ctypes.c_int32),
        ("fd", ctypes.c_int32),
        ("durable_size", ctypes.c_int64),
        ("num_sizes", ctypes.c_int32),
        ("num_writes", ctypes.c_int32),
        ("sizes_capacity", ctypes.c_int32),
        ("writes_capacity", ctypes.c_int32),
        ("sizes", ctypes.POINTER(ctypes.c_int64)),
        ("writes", ctypes.POINTER(_PageWrite)),
    )


class _NameChange(ctypes.Structure):
    _fields_ = (
        ("change", ctypes.c_int32),
        ("machine", ctypes.c_int32),
        ("inode", ctypes.c_uint64),
        ("replaced", ctypes.c_uint64),
        ("path", ctypes.c_char_p),
        ("new_path", ctypes.c_char_p),
    )


def load() -> Any:
    """The library that this process was started with."""
    library = ctypes.CDLL(os.environ["LD_PRELOAD"])
    library.sim_begin.argtypes = (ctypes.c_uint64, ctypes.c_int64)
    library.sim_add_machine.argtypes = (ctypes.c_char_p,)
    library.sim_advance.argtypes = library.sim_jump.argtypes = (ctypes.c_int64,)
    library.sim_now.restype = library.sim_num_calls.restype = library.sim_hits.restype = ctypes.c_int64
    library.sim_rule.argtypes = (*(ctypes.c_int,) * 3, ctypes.c_char_p, *(ctypes.c_int,) * 4, ctypes.c_int64)
    library.sim_files.restype = ctypes.POINTER(ctypes.POINTER(_File))
    library.sim_changes.restype = ctypes.POINTER(_NameChange)
    return library


class Disk:
    """The disk of one machine."""

    def __init__(self, library: Any, directory: Path):
        directory.mkdir()
        self.directory = directory
        self._library = library
        self.machine = int(library.sim_add_machine(str(directory).encode()))

    def fail(
        self,
        kinds: int,
        *,
        where: str = "",
        skip: int = 0,
        times: int = 1,
        error: int = 0,
        half: bool = False,
        delay_s: float = 0.0,
    ) -> None:
        """After `skip` calls of these kinds, `times` of them (-1: all) fail, write half, or take long."""
        delay_ns = int(delay_s * 1e9)
        self._library.sim_rule(self.machine, self.machine, kinds, where.encode(), skip, times, error, half, delay_ns)

    def heal(self) -> None:
        self.fail(0, times=0)

    @property
    def faults(self) -> int:
        """How many calls the rule of the last `fail` has hit."""
        return int(self._library.sim_hits(self.machine))

    def power_cut(self, rng: random.Random, kept: Kept) -> None:
        """Leave what a power cut would; the machine must be down."""
        self._library.sim_pause(1)
        try:
            self._take_back(rng, kept)
        finally:
            self._library.sim_pause(0)
            self._library.sim_settle(self.machine)

    def _take_back(self, rng: random.Random, kept: Kept) -> None:
        shown = self._shown()
        names = self._names(shown, rng, kept)
        tracked = self._tracked()
        contents = {inode: _after_cut(file, rng, kept) for inode, file in tracked.items()}
        inodes = {inode: path for path, inode in shown.items()}
        new = {}  # content of files whose name comes back
        for path, inode in names.items():
            if inode != DIRECTORY and shown.get(path) != inode:
                content = contents.get(inode)
                new[path] = content if content is not None else _read_all(tracked, inodes, inode)
        for inode, content in contents.items():
            if content is not None:
                os.ftruncate(tracked[inode].fd, 0)
                os.pwrite(tracked[inode].fd, content, 0)
                os.ftruncate(tracked[inode].fd, len(content))
        for path in sorted(shown, reverse=True):
            if shown[path] != names.get(path) and (shown[path] != DIRECTORY or names.get(path) != DIRECTORY):
                path.rmdir() if shown[path] == DIRECTORY else path.unlink()
        for path, inode in sorted(names.items()):
            if path.parent.is_dir():
                if inode == DIRECTORY:
                    path.mkdir(exist_ok=True)
                elif path in new:
                    path.write_bytes(new[path])

    def _shown(self) -> dict[Path, int]:
        """The inode of each path, as the system shows it."""
        found: dict[Path, int] = {}
        for entry in sorted(self.directory.rglob("*")):
            status = entry.lstat()
            found[entry] = DIRECTORY if entry.is_dir() else status.st_ino
        return found

    def _tracked(self) -> dict[int, _File]:
        count = ctypes.c_int()
        files = self._library.sim_files(ctypes.byref(count))
        found = (files[i].contents for i in range(count.value))
        return {file.inode: file for file in found if file.machine == self.machine}

    def _names(self, shown: dict[Path, int], rng: random.Random, kept: Kept) -> dict[Path, int]:
        """The inode of each path after the cut: in each directory, the changes from some moment on are taken back."""
        count = ctypes.c_int()
        changes = self._library.sim_changes(ctypes.byref(count))
        mine = [changes[i] for i in range(count.value) if changes[i].machine == self.machine]
        by_directory: dict[Path, list[int]] = {}
        for number, change in enumerate(mine):
            where = Path(os.fsdecode(change.new_path or change.path)).parent
            by_directory.setdefault(where, []).append(number)
        undone: set[int] = set()
        for numbers in by_directory.values():
            num_kept = 0 if kept == "nothing" else rng.randint(0, len(numbers))
            undone.update(numbers[num_kept:])
        names = dict(shown)
        for number in sorted(undone, reverse=True):
            _undo(names, mine[number])
        return {path: inode for path, inode in names.items() if self._has_parents(path, names)}

    def _has_parents(self, path: Path, names: dict[Path, int]) -> bool:
        parent = path.parent
        return parent == self.directory or (names.get(parent) == DIRECTORY and self._has_parents(parent, names))


def _undo(names: dict[Path, int], change: _NameChange) -> None:
    path = Path(os.fsdecode(change.path))
    if change.change in (_CREATED, _LINKED, _MADE_DIRECTORY):
        names.pop(path, None)
    elif change.change == _REMOVED:
        names[path] = change.inode
    elif change.change == _REMOVED_DIRECTORY:
        names[path] = DIRECTORY
    else:
        new_path = Path(os.fsdecode(change.new_path))
        moved = {below: names.pop(below) for below in list(names) if below == new_path or new_path in below.parents}
        for below, inode in moved.items():
            names[path / below.relative_to(new_path)] = inode
        if change.replaced:
            names[new_path] = change.replaced


def _read_all(tracked: dict[int, _File], paths: dict[int, Path], inode: int) -> bytes:
    if inode in tracked:
        fd = tracked[inode].fd
        return os.pread(fd, os.fstat(fd).st_size, 0)
    return paths[inode].read_bytes()


def _after_cut(file: _File, rng: random.Random, kept: Kept) -> bytes | None:
    """What a file holds after the cut; None if all of it was synced."""
    if not file.num_writes and not file.num_sizes:
        return None
    writes = [file.writes[i] for i in range(file.num_writes)]
    sizes = [file.durable_size, *(file.sizes[i] for i in range(file.num_sizes))]
    shown_size = os.fstat(file.fd).st_size
    content = bytearray(os.pread(file.fd, shown_size, 0))
    content.extend(bytes(max([*sizes, *(write.offset + write.size for write in writes)]) - len(content)))
    for write in reversed(writes):
        content[write.offset : write.offset + write.size] = ctypes.string_at(write.before, write.size)
    size = sizes[0]
    if kept != "nothing":
        size = sizes[rng.randint(0, len(sizes) - 1)]
        until: dict[int, int] = {}  # by page or sector: how many of the writes reached the disk
        unit = SECTOR if kept == "torn" else PAGE
        for number, write in enumerate(writes):
            data = ctypes.string_at(write.after, write.size)
            for start in range(write.offset - write.offset % unit, write.offset + write.size, unit):
                if start not in until:
                    until[start] = rng.choice((0, len(writes), rng.randint(0, len(writes))))
                if number < until[start] and not write.lost:
                    low, high = max(start, write.offset), min(start + unit, write.offset + write.size)
                    content[low:high] = data[low - write.offset : high - write.offset]
    return bytes(content[:size])

"""The child of test_power_cut: what the disk would hold if the power failed, from the trace of a run.

    LD_PRELOAD=shim.so python power_cut.py <directory> <cut|failed_sync> <stride>

A Disk follows a trace and keeps apart what the system shows and what the disk has. `cut` checks the store after each
promise and each sync with nothing of what was not synced, and after every so many calls with a random part of it.
`failed_sync` lets each sync fail once, goes on as usual and checks the store at later promises: the system shows a page
whose sync failed and believes it written, but the disk has it only when somebody writes it again. Prints JSON lines.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from workload import ENDINGS, MODES, NEVER, SPECS, Call, problems_of, read_trace, run, say

PAGE = 4096
NOTHING_PROMISED: dict[str, Any] = {
    "acknowledged": dict.fromkeys(SPECS, 0),
    "labelled": [],
    "deleted": [],
    "complete": False,
}


class File:
    """The content of a file, or a directory (which has none)."""

    def __init__(self, *, is_directory: bool = False):
        self.is_directory = is_directory
        self.shown = bytearray()
        self.dirty: set[int] = set()  # pages that the next sync writes
        self._durable: dict[int, bytes] = {}  # by page
        self._durable_size = 0

    def write(self, offset: int, data: bytes) -> None:
        self.resize(max(len(self.shown), offset + len(data)))
        self.shown[offset : offset + len(data)] = data
        self.dirty.update(range(offset // PAGE, (offset + len(data) - 1) // PAGE + 1))

    def resize(self, size: int) -> None:
        if size < len(self.shown):
            self.dirty.update(range(size // PAGE, len(self.shown) // PAGE + 1))
        del self.shown[size:]
        self.shown.extend(bytes(size - len(self.shown)))

    def sync(self) -> None:
        for page in self.dirty:
            self._durable[page] = bytes(self.shown[page * PAGE : (page + 1) * PAGE])
        self._durable_size = len(self.shown)
        self._durable = {page: data for page, data in self._durable.items() if page * PAGE < self._durable_size}
        self.dirty.clear()

    def after_power_cut(self, lucky: random.Random | None) -> bytes:
        """The durable bytes; with `lucky`, and some of those that were not synced."""
        pages, size = dict(self._durable), self._durable_size
        if lucky is not None and lucky.random() < 0.5:
            size = len(self.shown)
            for page in sorted(self.dirty):
                if lucky.random() < 0.5:
                    pages[page] = bytes(self.shown[page * PAGE : (page + 1) * PAGE])
        content = bytearray(size)
        for page, data in pages.items():
            content[page * PAGE : page * PAGE + len(data)] = data
        return bytes(content[:size])


class Disk:
    """The files below a directory as a trace changes them."""

    def __init__(self, root: Path):
        self._root = root
        self._inodes: dict[int, File] = {}
        self._shown: dict[Path, File] = {}
        self._durable: dict[Path, File] = {}
        self._pending: dict[Path, list[dict[Path, File | None]]] = {}  # by directory: changes of names, not yet durable
        self.promised = NOTHING_PROMISED

    def follow(self, call: Call) -> None:
        path = Path(call.path)
        if call.name == "mark":
            self.promised = both(self.promised, json.loads(call.data))
        elif call.name in ("fsync", "fdatasync"):
            self._sync(path, call)
        elif call.failed:
            pass
        elif call.name in ("write", "pwrite", "pwrite64"):
            self._inodes[call.inode].write(call.offset, call.data)
        elif call.name in ("ftruncate", "ftruncate64"):
            self._inodes[call.inode].resize(call.offset)
        elif call.name == "rename":
            new = Path(os.fsdecode(call.data))
            assert new.parent == path.parent
            self._name({path: None, new: self._shown[path]})
        elif call.name == "unlink":
            self._name({path: None})
        elif call.name == "mkdir":
            self._name({path: File(is_directory=True)})
        else:
            if path not in self._shown:
                self._inodes[call.inode] = File()
                self._name({path: self._inodes[call.inode]})
            if call.offset & os.O_TRUNC:
                self._inodes[call.inode].resize(0)

    def _name(self, change: dict[Path, File | None]) -> None:
        apply(self._shown, change)
        self._pending.setdefault(next(iter(change)).parent, []).append(change)

    def _sync(self, path: Path, call: Call) -> None:
        if call.inode in self._inodes and self._shown.get(path) is self._inodes[call.inode]:
            if call.failed:
                self._inodes[call.inode].dirty.clear()
            else:
                self._inodes[call.inode].sync()
        elif not call.failed:
            for change in self._pending.pop(path, ()):
                apply(self._durable, change)

    def leave(self, path: Path, lucky: random.Random | None = None) -> None:
        """Write to `path` what is left when the power fails now."""
        names = dict(self._durable)
        for changes in self._pending.values() if lucky is not None else ():
            for change in changes[: lucky.randint(0, len(changes))]:
                apply(names, change)
        path.mkdir()
        for name in sorted(names):
            target = path / name.relative_to(self._root)
            if not target.parent.is_dir():
                continue
            if names[name].is_directory:
                target.mkdir()
            else:
                target.write_bytes(names[name].after_power_cut(lucky))


def apply(names: dict[Path, File], change: dict[Path, File | None]) -> None:
    for path, file in change.items():
        if file is None:
            names.pop(path, None)
        else:
            names[path] = file


def both(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """All that either run promised: a run that sends everything again begins with nothing."""
    return {
        "acknowledged": {name: max(one["acknowledged"][name], other["acknowledged"][name]) for name in SPECS},
        "labelled": sorted({*one["labelled"], *other["labelled"]}),
        "deleted": sorted({*one["deleted"], *other["deleted"]}),
        "complete": one["complete"] or other["complete"],
    }


def check(disk: Disk, directory: Path, lucky: random.Random | None = None) -> list[str]:
    left = directory / "left"
    disk.leave(left, lucky)
    problems = problems_of(left / "store", disk.promised)
    shutil.rmtree(left)
    return problems


def cut(directory: Path, stride: int) -> Iterator[dict[str, Any]]:
    (directory / "case").mkdir()
    run(directory / "case", MODES["eio"], NEVER, "go on", directory / "trace")
    disk = Disk(directory / "case")
    calls = read_trace(directory / "trace")
    for k, call in enumerate(calls):
        disk.follow(call)
        where = {"k": k, "call": f"{call.name} {call.path}"}
        if call.name in ("mark", "fsync", "fdatasync"):
            yield {**where, "kept": "nothing", "problems": check(disk, directory)}
        if k % stride == 0:
            yield {**where, "kept": "some", "problems": check(disk, directory, random.Random(k))}


def failed_sync(directory: Path, stride: int) -> Iterator[dict[str, Any]]:
    trace = directory / "trace"
    k = 0
    while True:
        k += stride
        for ending in ENDINGS:
            (directory / "case").mkdir()
            trace.unlink(missing_ok=True)
            report = run(directory / "case", MODES["fsync"], k, ending, trace)
            if not report["complete"]:
                run(directory / "case", MODES["fsync"], NEVER, "crash", trace)
            shutil.rmtree(directory / "case")
            if report["num_calls"] < k:
                return
            yield {"k": k, "ending": ending, **after_failure(read_trace(trace), directory)}


def after_failure(calls: list[Call], directory: Path) -> dict[str, Any]:
    """What a power cut does at the next two promises after a failed call, and at the last."""
    disk = Disk(directory / "case")
    failed = next(k for k, call in enumerate(calls) if call.failed)
    last = max(k for k, call in enumerate(calls) if call.name == "mark")
    problems, checks_left = [], 2
    for k, call in enumerate(calls):
        before = disk.promised
        disk.follow(call)
        if k == last or (k > failed and checks_left and disk.promised != before):
            checks_left -= 1
            problems += check(disk, directory)
    return {"call": f"{calls[failed].name} {calls[failed].path}", "problems": problems}


if __name__ == "__main__":
    for found in {"cut": cut, "failed_sync": failed_sync}[sys.argv[2]](Path(sys.argv[1]), int(sys.argv[3])):
        say(found)

"""The child of test_io_faults: lives through one workload again and again, each time with another call failing.

    LD_PRELOAD=shim.so python workload.py <directory> <mode> <once|sticky> <all|some|none>

Every run is a process of its own, forked from this one, so that a crash is a crash: its locks and connections go with
it. This process never arms the shim; it opens what a run left behind, checks it, and prints one JSON line per run:

| ending of a run | what the run does at the error | what is checked |
|---|---|---|
| crash | exits at once | all acknowledged is there; then a run that sends everything again completes the store |
| go on | closes, opens again in the same process, continues | everything is there |
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from understudy.core import EpisodeInfo, Step, StoreFailedError, UnderstudyError
from understudy.core.episode import stack
from understudy.core.examples import random_steps, robot_spec, text_spec
from understudy.core.tree import Tree, equal_leaf
from understudy.replay import EpisodeRecord, Reader, Store, Writer, compact
from understudy.replay.format.chunk import Chunk
from understudy.replay.maintain.verify import verify

MODES = {"eio": 0, "enospc": 1, "fsync": 2, "short": 3, "short_enospc": 4}
STICKY = 16
NEVER = 2**62
ENDINGS = ("crash", "go on")
STRIDE = 499  # of `some`: every so many calls, beside the first and the last of each kind

SEGMENT_BYTES = 4096  # a few commits fill the heap of a segment, so that several are sealed
CHECKPOINT_PAGES = 40  # SQLite's own checkpoints, in the middle of commits, happen too
SPECS = {"arm": robot_spec(20), "chat": text_spec()}  # images large enough for checksums of their own; ragged fields
# Writer, steps and end of each episode, in the order in which they begin.
EPISODES = (
    ("arm", 5, "ended"),
    ("chat", 4, "ended"),
    ("chat", 3, "cut"),
    ("chat", 2, "ended"),
    ("arm", 6, "cut"),
    ("chat", 7, "ended"),
    ("arm", 3, "ended"),
)
STEPS: list[tuple[list[Step], Tree]] = [
    random_steps(SPECS[name], num_steps, seed) for seed, (name, num_steps, _) in enumerate(EPISODES)
]


def rows_of(seed: int) -> list[dict[str, Any]]:
    """The rows of an episode as they should be read back; a cut one was given up without a last observation."""
    name, _, end = EPISODES[seed]
    steps, last_observation = STEPS[seed]
    rows = [SPECS[name].row(step) for step in steps[: -1 if end == "cut" else None]]
    return rows if end == "cut" else [*rows, SPECS[name].last_row(last_observation)]


ROWS = [rows_of(seed) for seed in range(len(EPISODES))]


# ---- the run, in a forked process


class Run:
    """The workload as one process lives through it. Writers send through it to whichever Store is open now."""

    keeps_columns = False

    def __init__(self, path: Path, ending: str):
        self.path = path
        self._ending = ending
        self._store: Store | None = None
        self._writers: dict[str, Writer] = {}
        self._sent = dict.fromkeys(SPECS, 0)  # rows handed to each writer
        self._acknowledged = dict.fromkeys(SPECS, 0)  # of those, rows that the store has answered for
        self._labelled: list[int] = []  # seeds
        self._deleted: list[int] = []
        self._complete = False  # the script came to its end
        self.errors: list[UnderstudyError] = []  # kept, as a debugger does: what they refer to stays alive

    @property
    def promised(self) -> dict[str, Any]:
        """What must be there from now on, whatever happens."""
        return {
            "acknowledged": self._acknowledged,
            "labelled": self._labelled,
            "deleted": self._deleted,
            "complete": self._complete,
        }

    def commit(self, chunk: Chunk) -> int:
        assert self._store is not None
        try:
            return self._store.commit(chunk)
        except StoreFailedError:
            with suppress(StoreFailedError):
                self._store.commit(chunk)
                raise AssertionError("a store whose disk had failed took a chunk") from None
            raise

    def live(self) -> None:
        self._try(self._open)
        self._episode(0)
        self._episode(1)
        self._episode(2)
        self._try(lambda: self._label(0))
        self._episode(3)
        self._try(self._close)
        self._try(self._open)
        self._episode(4, flush_at=1)
        self._try(lambda: self._delete(1))
        self._try(self._compact)
        self._episode(5)
        self._try(lambda: self._label(5))  # while its last rows are still to come
        self._episode(6)
        for name in SPECS:
            self._send(name, self._writers[name].flush, repeat=True)
        self._complete = True
        self._mark()
        self._try(self._close)

    # ---- parts of the script

    def _open(self) -> None:
        self._store = Store.open(self.path, segment_bytes=SEGMENT_BYTES, clock=lambda: 1e9)
        self._store.catalog._db.execute(f"pragma wal_autocheckpoint = {CHECKPOINT_PAGES}")
        for name, spec in SPECS.items():
            self._store.begin_writer(name, f"{name}-1")
            if name not in self._writers:
                self._writers[name] = Writer(
                    self, name, f"{name}-1", spec, commit_steps=4, flush_each_episode=name == "arm"
                )

    def _episode(self, seed: int, flush_at: int | None = None) -> None:
        name, _, end = EPISODES[seed]
        steps, last_observation = STEPS[seed]
        writer = self._writers[name]
        writer.begin(EpisodeInfo(seed=seed, task="fault"))
        for index, step in enumerate(steps[: -1 if end == "cut" else None]):
            self._send(name, lambda step=step: writer.append(step), rows=1)
            if index == flush_at:
                self._send(name, writer.flush)
        if end == "cut":
            self._send(name, writer.cut)
        else:
            self._send(name, lambda: writer.end(last_observation, success=True), rows=1)

    def _send(self, name: str, act: Callable[[], Any], *, rows: int = 0, repeat: bool = False) -> None:
        """A call of a writer. One that fails keeps the rows, so the script goes on with the next."""
        self._sent[name] += rows
        if self._try(act, repeat=repeat):
            self._acknowledged[name] = self._sent[name] - self._writers[name].num_uncommitted
            self._mark()

    def _label(self, seed: int) -> None:
        assert self._store is not None
        self._store.label([self._id(seed)], {"seen": "yes"})
        self._labelled.append(seed)
        self._mark()

    def _delete(self, seed: int) -> None:
        assert self._store is not None
        self._store.delete([self._id(seed)])
        self._deleted.append(seed)
        self._mark()

    def _compact(self) -> None:
        assert self._store is not None
        compact(self._store, min_dead=0.1)

    def _id(self, seed: int) -> int:
        with Reader(self.path) as reader:
            return next(reader.episodes("seed = ?", (seed,))).id

    def _close(self) -> None:
        if self._store is not None:
            store, self._store = self._store, None
            store.close()

    def _mark(self) -> None:
        SHIM.fault_mark(json.dumps(self.promised).encode())

    # ---- errors

    def _try(self, act: Callable[[], Any], *, repeat: bool = True) -> bool:
        """Whether a call was good; after an error the store is opened again and, with `repeat`, so is the call made."""
        try:
            act()
        except UnderstudyError as error:
            self.errors.append(error)
            if self._ending == "crash":
                raise Crash from error
            try:
                self._close()
            except UnderstudyError as error_of_close:
                self.errors.append(error_of_close)
            SHIM.fault_disarm()
            if not self._complete:
                self._open()
            if repeat and act != self._open:
                act()
            return repeat
        return True


class Crash(Exception):
    """The run is over."""


def run(case: Path, mode: int, k: int, ending: str, trace: Path | None = None) -> dict[str, Any]:
    """Live through the workload in a forked process, whose k-th call fails; what it says of itself."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        report: dict[str, Any] = {}
        try:
            if trace is not None:
                SHIM.fault_trace(os.open(trace, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644))
            this = Run(case / "store", ending)
            SHIM.fault_arm(str(case).encode(), k, mode)
            try:
                this.live()
            except Crash:
                pass
            except BaseException:  # noqa: BLE001 (reported, and the parent fails)
                report["unexpected"] = traceback.format_exc()
            report |= {
                "num_calls": SHIM.fault_count(),
                "errors": [str(error) for error in this.errors],
                **this.promised,
            }
            os.write(write_end, json.dumps(report).encode())
        finally:
            os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as pipe:
        text = pipe.read()
    os.waitpid(pid, 0)
    return dict(json.loads(text))


@dataclass(frozen=True)
class Call:
    """One line of a trace; see shim.c."""

    name: str
    counted: bool
    failed: bool
    inode: int
    offset: int  # a size for ftruncate, flags for open
    path: str
    data: bytes


def read_trace(path: Path) -> list[Call]:
    calls = []
    with path.open("rb") as file:
        while line := file.readline().decode():
            name, counted, failed, inode, offset, size, where = line[:-1].split(" ", 6)
            calls.append(
                Call(name, counted == "1", failed == "1", int(inode), int(offset), where, file.read(int(size)))
            )
    return calls


# ---- checking what it left


def problems_of(path: Path, report: dict[str, Any]) -> list[str]:
    """What is wrong with a store, given what was acknowledged; opens it for writing first, as one would."""
    try:
        with Store.open(path, segment_bytes=SEGMENT_BYTES), Reader(path) as reader:
            records = list(reader.episodes("1"))
            found = {record.info.seed: record for record in records}
            problems = ["an episode is there twice"] if len(found) < len(records) else []
            problems += [problem for record in records if not record.purged for problem in wrong_rows(reader, record)]
            problems += missing(found, report)
        return problems + verify(path).problems
    except Exception:  # noqa: BLE001 (reported, and the parent fails)
        return [traceback.format_exc()]


def wrong_rows(reader: Reader, record: EpisodeRecord) -> Iterator[str]:
    seed = int(record.info.seed or 0)
    _, columns = reader.rows(record.id)
    for field, leaf in SPECS[EPISODES[seed][0]].columns.items():
        if not equal_leaf(columns[field], stack([row[field] for row in ROWS[seed][: record.num_rows]], leaf)):
            yield f"episode {seed}: {field} is not what was written"


def missing(found: dict[int | None, EpisodeRecord], report: dict[str, Any]) -> Iterator[str]:
    """What was acknowledged and is not there."""
    left = dict(report["acknowledged"])
    for seed, (name, _, end) in enumerate(EPISODES):
        num_rows = min(left[name], len(ROWS[seed]))
        left[name] -= num_rows
        if num_rows and (seed not in found or found[seed].num_rows < num_rows):
            yield f"episode {seed}: {num_rows} rows were acknowledged, got {found.get(seed)}"
            continue
        sent_after = left[name] or report["complete"] or (end == "ended" and num_rows == len(ROWS[seed]))
        if sent_after and found[seed].state != end:
            yield f"episode {seed}: expected it {end}, got {found[seed].state}"
    for seed in report["labelled"]:
        if seed not in found or found[seed].info.labels != {"seen": "yes"}:
            yield f"episode {seed}: the label is not there"
    for seed in report["deleted"]:
        if seed not in found or found[seed].deleted is None:
            yield f"episode {seed}: is not deleted"


# ---- all runs of a mode


def main() -> None:
    directory, mode_name, repetition, amount = Path(sys.argv[1]), *sys.argv[2:]
    mode = MODES[mode_name] | (STICKY if repetition == "sticky" else 0)
    trace = directory / "trace"
    good = fault(directory, mode, NEVER, "go on", trace)
    calls = [f"{call.name} {call.path}" for call in read_trace(trace) if call.counted]
    say(good | {"calls": calls})
    for k, ending in chosen(calls, amount, mode):
        say({"call": calls[k - 1]} | fault(directory, mode, k, ending))


def fault(directory: Path, mode: int, k: int, ending: str, trace: Path | None = None) -> dict[str, Any]:
    """One run and what it came to."""
    case = directory / "case"
    case.mkdir()
    report = run(case, mode, k, ending, trace)
    problems = problems_of(case / "store", report)
    if not report["complete"]:
        again = run(case, mode, NEVER, "crash")  # the same chunks under the same numbers
        problems += again["errors"] + problems_of(case / "store", again)
    shutil.rmtree(case)
    return {"k": k, "ending": ending, **report, "problems": problems}


def chosen(calls: list[str], amount: str, mode: int) -> list[tuple[int, str]]:
    """Which calls fail and how the run ends: all in both ways, or the first and last of a kind and some between.

    Of an I/O error there are the most kinds: the first of each fails once, the last for good.
    """
    if amount == "none":
        return []
    if amount == "all":
        return [(k, ending) for k in range(1, len(calls) + 1) for ending in ENDINGS]
    kinds = [re.sub(r"\d{8}", "", call) for call in calls]  # segments are alike
    if mode % STICKY != MODES["eio"]:
        kinds = [kind.split(" ", 1)[1] for kind in kinds]  # what can fail is the same: a few on each file will do
    first = {kind: k for k, kind in reversed(list(enumerate(kinds, 1)))}
    last = {kind: k for k, kind in enumerate(kinds, 1)}
    ends = {*first.values(), *last.values()}
    if mode % STICKY == MODES["eio"]:
        ends = {*(last if mode >= STICKY else first).values()}
    some = sorted({*ends, *range(STRIDE, len(calls) + 1, STRIDE)})
    return [(k, ENDINGS[(i + mode // STICKY) % 2]) for i, k in enumerate(some)]


def say(content: dict[str, Any]) -> None:
    print(json.dumps(content), flush=True)


SHIM = ctypes.CDLL(os.environ["LD_PRELOAD"])
SHIM.fault_arm.argtypes = (ctypes.c_char_p, ctypes.c_long, ctypes.c_int)
SHIM.fault_count.restype = ctypes.c_long

if __name__ == "__main__":
    main()

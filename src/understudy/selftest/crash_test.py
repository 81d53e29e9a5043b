"""Crash test: kills a writing process many times, in every phase of its work, and counts what was lost.

The parent forks a child that opens the store, writes episodes from two threads, deletes, retains and compacts, and
reports through a pipe whatever the store acknowledged. Each thread shows its phase in shared memory. The parent waits
for a phase or an instant chosen at random, kills the child with SIGKILL, opens the store and compares. The content of a
step follows from its episode's seed and its index, so every row can be checked.

| loop | takes from | blocks on | woken by |
|---|---|---|---|
| parent | the shared phases, the child's pipe | - (it polls) | - |
| child, two writers | - | the store's commit lock | the committing thread |
| child, main | - | a pause | time |
"""

from __future__ import annotations

import itertools
import json
import mmap
import os
import random
import shutil
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial, wraps
from pathlib import Path
from typing import Any, NoReturn

from understudy.core import EpisodeInfo
from understudy.durable import files
from understudy.replay.format.segment import Segment
from understudy.replay.maintain import compaction
from understudy.replay.maintain.verify import verify
from understudy.replay.read.reader import Reader
from understudy.replay.write.commit import Commit
from understudy.replay.write.retention import Budget, Retention
from understudy.replay.write.store import Store
from understudy.selftest.contents import Contents
from understudy.selftest.damage import DamageReport, damage_copy

SEGMENT_BYTES = 400_000
KEEP_PRACTICE_STEPS = 1500
KILLS_PER_DAMAGED_STORE = 20  # after each, all of the store and of its copy is read: a large one would take minutes
NUM_THREADS = 3
PHASES = (
    "idle",
    "open",
    "append",
    "write rows",
    "sync",
    "catalog transaction",
    "begin segment",
    "retention",
    "delete",
    "compact",
    "switch catalog",
    "remove files",
    "close",
)


@dataclass(kw_only=True)
class CrashReport:
    """What the test counted, in rows (T steps and a last observation make T+1)."""

    kills: int = 0
    acknowledged: int = 0
    found: int = 0  # of the acknowledged
    unacknowledged: int = 0  # committed, and killed before the writer knew: neither lost nor wrong
    lost: int = 0
    duplicated: int = 0
    different: int = 0
    undeleted: int = 0  # episodes whose deletion was acknowledged and that are not deleted
    killed_while: Counter[str] = field(default_factory=Counter)  # threads, by phase
    problems: list[str] = field(default_factory=list)  # what verify found at the end
    damage: DamageReport | None = None  # with damage between the kills

    @property
    def ok(self) -> bool:
        damage = self.damage is not None and (self.damage.lost or self.damage.different or self.damage.problems)
        return not (self.lost or self.duplicated or self.different or self.undeleted or self.problems or damage)


def run_crash_test(
    directory: Path,
    *,
    kills: int,
    seed: int = 0,
    damage: bool = False,
    encoded: bool = False,
    progress: Callable[[CrashReport], None] | None = None,
) -> CrashReport:
    """Kill a writer `kills` times on a store in `directory` and check after each, with `damage` a damaged copy too.

    With `damage` a new store is begun after every KILLS_PER_DAMAGED_STORE. With `encoded` the steps have cameras that
    are stored in H.264 and PNG.
    """
    contents = Contents(encoded=encoded)
    rng = random.Random(seed)
    report = CrashReport(damage=DamageReport() if damage else None)
    kills_per_store = KILLS_PER_DAMAGED_STORE if damage else kills
    while report.ok and report.kills < kills:
        if report.kills:
            shutil.rmtree(directory)
        _kill_on_one_store(directory, contents, rng, min(kills, report.kills + kills_per_store), report, progress)
    return report


def _kill_on_one_store(
    directory: Path,
    contents: Contents,
    rng: random.Random,
    kills: int,
    report: CrashReport,
    progress: Callable[[CrashReport], None] | None,
) -> None:
    """Kill until the report has `kills`, or something is wrong."""
    ledger = _Ledger()
    phase_table = _PhaseTable()
    checked = 0
    if report.damage is not None:
        Store.open(directory).close()  # a child that is killed at once may leave no store to damage
    while report.ok and report.kills < kills:
        _run_until_killed(directory, contents, rng, ledger, phase_table)
        report.kills += 1
        report.killed_while.update(phase_table.phases())
        killed = directory.with_name(f"{directory.name}-damaged")
        if report.damage is not None:
            shutil.rmtree(killed, ignore_errors=True)
            shutil.copytree(directory, killed)
        checked = _check_new(directory, contents, ledger, report, checked)
        if report.damage is not None:
            write_one = partial(_write_one, contents, seed=report.kills)
            match = partial(_rows_match, contents)
            damage_copy(killed, directory, ledger.rows, rng, report.damage, match, write_one)
        if progress and report.ok:
            progress(report)
    _check_all(directory, contents, ledger, report)


class _PhaseTable:
    """One byte of shared memory for each thread of the child: its phase.

    The first slots are those of the threads that take one, the others those of the writers' committing threads.
    """

    def __init__(self) -> None:
        self._bytes = mmap.mmap(-1, 2 * NUM_THREADS)
        self._slot = threading.local()
        self._num_others = itertools.count()

    def clear(self) -> None:
        self._bytes[:] = bytes(2 * NUM_THREADS)

    def take_slot(self, slot: int) -> None:
        """In the child: this thread writes to this slot."""
        self._slot.number = slot

    @contextmanager
    def running(self, phase: str) -> Iterator[None]:
        if not hasattr(self._slot, "number"):
            self.take_slot(NUM_THREADS + next(self._num_others) % NUM_THREADS)
        slot = self._slot.number
        before = self._bytes[slot]
        self._bytes[slot] = PHASES.index(phase)
        yield
        self._bytes[slot] = before

    def watch(self, owner: Any, name: str, phase: str) -> None:
        """In the child: show a phase whenever a function of the store runs."""
        function = getattr(owner, name)

        @wraps(function)
        def watched(*args: Any, **options: Any) -> Any:
            with self.running(phase):
                return function(*args, **options)

        setattr(owner, name, staticmethod(watched) if isinstance(owner.__dict__[name], staticmethod) else watched)

    def phases(self) -> list[str]:
        """The phases of the threads that are not idle."""
        return [PHASES[number] for number in self._bytes[:] if number]


@dataclass(kw_only=True)
class _Ledger:
    """What the store acknowledged to the children."""

    rows: dict[int, int] = field(default_factory=dict)  # by episode seed
    deleted: set[int] = field(default_factory=set)  # episode seeds
    may_delete: set[int] = field(default_factory=set)  # deletions that were begun


# ---- the parent


def _run_until_killed(
    directory: Path, contents: Contents, rng: random.Random, ledger: _Ledger, phase_table: _PhaseTable
) -> None:
    """Start a child, kill it at a phase or a time chosen at random, and collect what it had reported."""
    phase_table.clear()
    read_end, write_end = os.pipe()
    child_seed = rng.getrandbits(60)
    pid = os.fork()
    if pid == 0:
        os.close(read_end)
        _child(directory, contents, child_seed, write_end, phase_table)
    os.close(write_end)
    os.set_blocking(read_end, False)
    phase = rng.choice([None, *PHASES[1:]])
    not_before = time.monotonic() + (rng.uniform(0.0, 0.6) if phase != "open" else 0.0)
    deadline = not_before + (1.0 if phase else 0.0)
    data = b""
    while (now := time.monotonic()) < deadline:
        data += _read_some(read_end)
        if now >= not_before and phase in phase_table.phases():
            break
        time.sleep(0.0001)
    time.sleep(rng.choice([0.0, rng.uniform(0, 0.0005), rng.uniform(0, 0.005)]))
    os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    os.set_blocking(read_end, True)
    while part := os.read(read_end, 65536):  # what it had written before the kill
        data += part
    os.close(read_end)
    lines = data.decode(errors="replace").splitlines(keepends=True)
    if not os.WIFSIGNALED(status):
        raise RuntimeError(f"the writing process ended by itself, status {status}: {lines[-1:]}")
    for line in lines:
        if line.endswith("\n"):
            _enter(json.loads(line), ledger)


def _read_some(pipe: int) -> bytes:
    try:
        return os.read(pipe, 65536)
    except BlockingIOError:
        return b""


def _enter(message: dict[str, Any], ledger: _Ledger) -> None:
    if "rows" in message:
        ledger.rows[message["seed"]] = message["rows"]
    elif "will_delete" in message:
        ledger.may_delete.update(message["will_delete"])
    elif "deleted" in message:
        ledger.deleted.update(message["deleted"])


def _check_new(directory: Path, contents: Contents, ledger: _Ledger, report: CrashReport, since: int) -> int:
    """Open the store as the next process would and check the episodes that changed; returns the commit checked."""
    with Store.open(directory, segment_bytes=SEGMENT_BYTES):
        pass
    with Reader(directory) as reader:
        commit = reader.last_commit()
        for record in reader.episodes("changed > ? and not purged", (since,)):
            _check_rows(reader, record, contents, ledger, report)
    return commit


def _check_rows(reader: Reader, record: Any, contents: Contents, ledger: _Ledger, report: CrashReport) -> None:
    _, columns = reader.rows(record.id)
    for index in range(record.num_rows):
        if not contents.row_equals(columns, index, record.info.seed, last=not columns["is_step"][index]):
            report.different += 1
    if record.num_rows < ledger.rows.get(record.info.seed, 0):
        report.lost += ledger.rows[record.info.seed] - record.num_rows


def _check_all(directory: Path, contents: Contents, ledger: _Ledger, report: CrashReport) -> None:
    """Every acknowledged row against the whole store."""
    report.problems += verify(directory).problems
    report.acknowledged += sum(ledger.rows.values())
    report.lost = report.different = 0  # `_check_new` has counted these already
    seen: Counter[int] = Counter()
    with Reader(directory) as reader:
        for record in reader.episodes("1"):
            seed = record.info.seed
            assert seed is not None
            seen[seed] += 1
            acknowledged = ledger.rows.get(seed, 0)
            report.found += min(record.num_rows, acknowledged)
            report.unacknowledged += max(record.num_rows - acknowledged, 0)
            if record.deleted is None:
                report.undeleted += seed in ledger.deleted
            elif record.info.kind == "demonstration" and seed not in ledger.may_delete:
                report.lost += acknowledged  # it was never to be deleted
            if not record.purged:
                _check_rows(reader, record, contents, ledger, report)
    report.duplicated += sum(seen.values()) - len(seen)
    report.lost += sum(rows for seed, rows in ledger.rows.items() if not seen[seed])


def _rows_match(contents: Contents, columns: Mapping[str, Any], seed: int, first: int) -> bool:
    num_rows = len(columns["is_step"])
    return all(
        contents.row_equals(columns, row, seed, last=not columns["is_step"][row], index=first + row)
        for row in range(num_rows)
    )


def _write_one(contents: Contents, store: Store, seed: int) -> None:
    """One more episode, as an operator goes on."""
    writer = store.writer("after-the-damage", contents.spec)
    writer.begin(EpisodeInfo(seed=seed))
    writer.append(contents.step(seed, 0, last=True))
    writer.end(contents.observation(seed, 1))


# ---- the child


def _child(directory: Path, contents: Contents, seed: int, pipe: int, phase_table: _PhaseTable) -> NoReturn:
    """Write, delete and compact until killed."""
    try:
        phase_table.take_slot(0)
        for owner, name, phase in (
            (Store, "open", "open"),
            (Store, "close", "close"),
            (Segment, "write", "write rows"),
            (Segment, "sync", "sync"),
            (Commit, "record", "catalog transaction"),
            (Segment, "create", "begin segment"),
            (compaction, "_switch_catalog", "switch catalog"),
            (files, "remove_durably", "remove files"),
        ):
            phase_table.watch(owner, name, phase)
        while True:
            _WriterSession(directory, contents, seed, pipe, phase_table).run()
            seed += 1000
    except BaseException as error:  # noqa: BLE001 (the outermost of a process: it reports why it ended)
        os.write(pipe, f"{type(error).__name__}: {error}\n".encode())
        os._exit(3)


class _WriterSession:
    """Opens the store, writes with two threads, and closes the store."""

    def __init__(self, directory: Path, contents: Contents, seed: int, pipe: int, phase_table: _PhaseTable):
        self._contents = contents
        self._pipe = pipe
        self._seed = seed
        self._phase_table = phase_table
        self._store = Store.open(directory, segment_bytes=SEGMENT_BYTES)
        self._stop = threading.Event()
        self._error: BaseException | None = None

    def run(self) -> None:
        rng = random.Random(self._seed)
        writers = [threading.Thread(target=self._write, args=(number,), daemon=True) for number in (1, 2)]
        for thread in writers:
            thread.start()
        while self._error is None and rng.random() > 0.1:
            time.sleep(rng.uniform(0, 0.03))
            with self._phase_table.running("retention"):
                self._store.retain(Retention(practice=Budget(max_steps=KEEP_PRACTICE_STEPS)))
            self._delete_some(rng)
            with self._phase_table.running("compact"):
                compaction.compact(self._store, min_dead=0.2)
        self._stop.set()
        for thread in writers:
            thread.join()
        if self._error is not None:
            raise self._error
        self._store.close()

    def _delete_some(self, rng: random.Random) -> None:
        with self._store.commit_lock():
            known = list(self._store.catalog.episodes("kind = 'demonstration' and deleted is null and state = 'ended'"))
        chosen = rng.sample(known, min(len(known), max(len(known) - 40, 0) + rng.randrange(2)))
        if chosen:
            seeds = [record.info.seed for record in chosen]
            self._report(will_delete=seeds)
            with self._phase_table.running("delete"):
                self._store.delete([record.id for record in chosen])
            self._report(deleted=seeds)

    def _write(self, number: int) -> None:
        self._phase_table.take_slot(number)
        try:
            self._write_episodes(number, random.Random(self._seed + number))
        except BaseException as error:  # noqa: BLE001 (the outermost of a thread: the main thread raises it)
            self._error = error

    def _write_episodes(self, number: int, rng: random.Random) -> None:
        writer = self._store.writer(
            f"actor-{number}",
            self._contents.spec,
            commit_steps=rng.choice([1, 4, 10, 30]),
            flush_each_episode=rng.random() < 0.7,
        )
        unreported: dict[int, int] = {}  # rows by seed that may not be committed yet
        while not self._stop.is_set():
            seed = rng.getrandbits(60)
            writer.begin(EpisodeInfo(seed=seed, kind="demonstration" if rng.random() < 0.2 else "practice"))
            num_steps = rng.randrange(1, 40)
            for index in range(num_steps):
                with self._phase_table.running("append"):
                    writer.append(self._contents.step(seed, index, last=index == num_steps - 1))
                unreported[seed] = index + 1
                self._acknowledge(writer.num_uncommitted, unreported, seed)
            with self._phase_table.running("append"):
                writer.end(self._contents.observation(seed, num_steps))
            unreported[seed] = num_steps + 1
            self._acknowledge(writer.num_uncommitted, unreported, seed)

    def _acknowledge(self, uncommitted: int, unreported: dict[int, int], current: int) -> None:
        """Report what is durable now: everything, or nothing new."""
        if uncommitted == 0:
            for seed, rows in unreported.items():
                self._report(seed=seed, rows=rows)
            rows = unreported[current]
            unreported.clear()
            unreported[current] = rows

    def _report(self, **message: Any) -> None:
        os.write(self._pipe, (json.dumps(message) + "\n").encode())

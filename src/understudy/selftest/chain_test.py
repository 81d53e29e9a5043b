"""Chain test: kills every process between an actor and a learner, and harms the link, and counts what was lost.

Two actors write through a link to a server, and a reader draws from its store, each step once. At instants chosen at
random the parent kills one of them with SIGKILL and starts it again at once, or harms the link (see proxy.py). An
actor notes each row that was *recorded*; at the end all of these must be in the store, once, unchanged and in order.

| process | takes from | blocks on | woken by |
|---|---|---|---|
| parent | time | pauses; at the end, the exits of the others | - |
| actor-1, actor-2 | - | a pause; the spool's disk | time; the recording thread |
| server | the actors' chunks, through the proxy | see server.py | gRPC |
| reader | the store's catalog | a pause when there is nothing new | time |

All talk through files: an actor appends to a file of its own life what it knows to be recorded; the reader appends what
it drew and then replaces, in one atomic step, the file that holds its sampler's state and the length of the former.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import understudy
from understudy.core import DeliveryError, EpisodeInfo, StoreFormatError
from understudy.core import tree as trees
from understudy.durable import files
from understudy.replay import EVERYTHING, Fifo, Reader, Sampler, Store, verify
from understudy.selftest.crash_test import SEGMENT_BYTES, SPEC, observation_of, row_equals, step_of
from understudy.selftest.faulty_proxy import Proxy, free_port
from understudy.service.client.outbox import OutboxConfig
from understudy.service.client.remote import connect
from understudy.service.client.remote_writer import RemoteWriter
from understudy.service.server.server import Server, ServerConfig

ACTORS = ("actor-1", "actor-2")
KINDS = {  # and how often each happens, next to the others
    "kill actor-1": 3,
    "kill actor-2": 3,
    "kill server": 3,
    "kill reader": 3,
    "cut": 3,
    "refuse": 3,
    "delay": 3,
    "drop": 3,
    "repeat": 3,
    "freeze": 3,
    "silence": 1,
}
SETTLE_S = 60.0
MAX_STEPS = 40  # of an episode
MAX_BACKLOG_ROWS = 1000  # an actor pauses when so many wait for the server
MAX_BATCH = 32
_PARENT = os.getppid()


@dataclass(kw_only=True)
class ChainReport:
    """What the test counted, in rows (T steps and a last observation make T+1)."""

    events: Counter[str] = field(default_factory=Counter)
    recorded: int = 0  # and told so by an actor
    durable: int = 0  # of the recorded
    untold: int = 0  # durable, and the kill came before the actor could tell: neither lost nor wrong
    consumed: int = 0  # steps that the reader has drawn
    duplicated: int = 0
    out_of_order: int = 0
    different: int = 0
    problems: list[str] = field(default_factory=list)

    @property
    def num_events(self) -> int:
        return self.events.total()

    @property
    def lost(self) -> int:
        return self.recorded - self.durable

    @property
    def ok(self) -> bool:
        return not (self.lost or self.duplicated or self.out_of_order or self.different or self.problems)


def run_chain_test(
    directory: Path,
    *,
    events: int,
    seed: int = 0,
    tell_early: bool = False,
    progress: Callable[[ChainReport], None] | None = None,
) -> ChainReport:
    """Let `events` things go wrong, one after the other, then let all come to rest and compare.

    With `tell_early` the actors count a row as recorded before it is, and the test must find out.
    """
    rng = random.Random(seed)
    report = ChainReport()
    with _running(directory, seed, tell_early, report) as chain:
        for name in ACTORS:
            chain.wait_for_words(name, SETTLE_S)
        for kind in rng.choices(list(KINDS), list(KINDS.values()), k=events):
            chain.wait(rng.choice([rng.uniform(0.0, 0.2), rng.uniform(0.3, 1.5)]))
            chain.happen(kind, rng)
            report.events[kind] += 1
            if progress:
                progress(report)
        chain.settle()
    _check_store(directory, report)
    _check_reader(directory, report)
    return report


# ---- the parent


@contextmanager
def _running(directory: Path, seed: int, tell_early: bool, report: ChainReport) -> Iterator[_Chain]:
    for name in ("told", "logs", "spool", "reader"):
        (directory / name).mkdir(parents=True)
    port = free_port()
    with Proxy(port, port=free_port(), seed=seed) as proxy:
        commands: dict[str, list[str]] = {
            "server": [str(port)],
            "reader": [],
            **{name: [name, proxy.address, str(seed), str(int(tell_early))] for name in ACTORS},
        }
        chain = _Chain(directory, commands, proxy, report)
        try:
            yield chain
        finally:
            chain.kill_all()


class _Chain:
    """The processes, the link between them, and what is still to be undone to it."""

    def __init__(self, directory: Path, commands: dict[str, list[str]], proxy: Proxy, report: ChainReport):
        self._directory = directory
        self._commands = commands
        self._proxy = proxy
        self._report = report
        self._lives: Counter[str] = Counter()
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._undo: list[tuple[float, Callable[[], None]]] = []
        for name in commands:
            self._start(name)

    def _start(self, name: str) -> None:
        self._lives[name] += 1
        role = "actor" if name in ACTORS else name
        command = [
            sys.executable,
            "-m",
            __spec__.name,
            role,
            str(self._directory),
            str(self._lives[name]),
            *self._commands[name],
        ]
        path = [str(Path(understudy.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
        with (self._directory / "logs" / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
            )

    def happen(self, kind: str, rng: random.Random) -> None:
        """Let one thing go wrong."""
        proxy = self._proxy
        if kind.startswith("kill "):
            name = kind[5:]
            if name in ACTORS and rng.random() < 0.8:  # else it may well be in its first moments
                self.wait_for_words(name, 5.0)
            self._processes[name].send_signal(signal.SIGKILL)
            self._processes[name].wait()
            self._start(name)
        elif kind in ("cut", "silence"):
            getattr(proxy, kind)()
        elif kind in ("drop", "repeat"):
            proxy.harm("drop" if kind == "drop" else "repeat", to_target=rng.random() < 0.5)
        elif kind == "delay":
            proxy.delay(rng.uniform(0.05, 0.5))
            self._undo_after(rng.uniform(0.2, 2.0), lambda: proxy.delay(0.0))
        elif kind == "freeze":
            proxy.freeze(True)
            self._undo_after(rng.uniform(0.2, 2.0), lambda: proxy.freeze(False))
        else:
            proxy.refuse(True)
            proxy.cut()
            self._undo_after(rng.uniform(0.2, 2.0), lambda: proxy.refuse(False))

    def _undo_after(self, seconds: float, undo: Callable[[], None]) -> None:
        self._undo.append((time.monotonic() + seconds, undo))

    def wait(self, seconds: float) -> None:
        """Pause, undo what is over, and start again what has ended by itself, which is a problem."""
        deadline = time.monotonic() + seconds
        while True:
            now = time.monotonic()
            for entry in [entry for entry in self._undo if entry[0] <= now]:
                self._undo.remove(entry)
                entry[1]()
            for name, process in self._processes.items():
                if process.poll() is not None:
                    self._note_end(name, process.returncode)
                    self._start(name)
            if now >= deadline:
                return
            time.sleep(min(0.01, deadline - now))

    def wait_for_words(self, name: str, seconds: float) -> None:
        """Wait until an actor has told in this life of its that something is recorded."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            told = _told_by(self._directory, name, self._lives[name])
            if told.exists() and told.stat().st_size:
                return
            self.wait(0.01)

    def settle(self) -> None:
        """Let the actors deliver what they have, the reader draw the rest, and the server close its store."""
        self._undo.clear()
        self._proxy.heal()
        for names in (ACTORS, ("reader",), ("server",)):
            (self._directory / f"finish-{'actor' if names == ACTORS else names[0]}").touch()
            deadline = time.monotonic() + SETTLE_S
            for name in names:
                process = self._processes.pop(name)
                try:
                    code = process.wait(max(deadline - time.monotonic(), 0))
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
                    self._report.problems.append(f"{name}: did not come to rest in {SETTLE_S:.0f} s")
                else:
                    if code:
                        self._note_end(name, code)

    def _note_end(self, name: str, code: int) -> None:
        lines = (self._directory / "logs" / f"{name}.log").read_text(errors="replace").splitlines()
        self._report.problems.append(f"{name}: ended by itself with {code}: {' '.join(lines[-1:])[:500]}")

    def kill_all(self) -> None:
        for process in self._processes.values():
            process.kill()
            process.wait()


# ---- the processes


def main(arguments: Sequence[str]) -> None:
    role, directory, life, *rest = arguments
    roles: dict[str, Callable[..., None]] = {"actor": _actor, "server": _server, "reader": _reader}
    roles[role](Path(directory), int(life), *rest)


def _is_over(directory: Path, role: str) -> bool:
    """Whether the parent wants this process to come to rest; ends it if the parent is gone."""
    if os.getppid() != _PARENT:
        raise SystemExit("the parent is gone")
    return (directory / f"finish-{role}").exists()


def _told_by(directory: Path, actor: str, life: int) -> Path:
    return directory / "told" / f"{actor}.{life:04d}.jsonl"


def _server(directory: Path, life: int, port: str) -> None:
    with (
        Store.open(directory / "store", segment_bytes=SEGMENT_BYTES) as store,
        Server(store, ServerConfig(port=int(port))) as server,
    ):
        while not _is_over(directory, "server") and not server.failed.wait(0.05):
            pass
        if server.failure is not None:
            raise server.failure


def _actor(directory: Path, life: int, name: str, address: str, seed: str, tell_early: str) -> None:
    rng = random.Random(f"{seed} {name} {life}")
    told = os.open(_told_by(directory, name, life), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    with connect(address) as remote:
        writer = remote.writer(
            name,
            SPEC,
            spool=directory / "spool" / name,
            commit_steps=rng.randint(1, 30),
            flush_each_episode=rng.random() < 0.7,
            config=OutboxConfig(block_timeout_s=SETTLE_S),
        )
        notes = _Notes(told, writer, tell_early == "1")
        while not _is_over(directory, "actor"):
            _write_episode(writer, notes, rng)
            while writer.delivery.recorded > MAX_BACKLOG_ROWS and not _is_over(directory, "actor"):
                time.sleep(0.01)
        writer.flush()
        notes.tell()
        if not writer.wait_delivered(SETTLE_S - 5):
            raise DeliveryError(f"{writer.delivery}")
        writer.close()


def _write_episode(writer: RemoteWriter, notes: _Notes, rng: random.Random) -> None:
    seed = rng.getrandbits(60)
    writer.begin(EpisodeInfo(seed=seed, actor=writer.name))
    num_steps = rng.randrange(1, MAX_STEPS)
    for index in range(num_steps):
        writer.append(step_of(seed, index, last=index == num_steps - 1))
        notes.add(seed, index + 1)
        time.sleep(rng.uniform(0.0, 0.01))
        if rng.random() < 0.05:
            writer.flush()
        notes.tell()
    writer.end(observation_of(seed, num_steps))
    notes.add(seed, num_steps + 1)
    notes.tell()


class _Notes:
    """What an actor has written, and what of it it has told."""

    def __init__(self, file: int, writer: RemoteWriter, tell_early: bool):
        self._file = file
        self._writer = writer
        self._tell_early = tell_early
        self._waiting: dict[int, int] = {}  # rows by episode seed

    def add(self, seed: int, rows: int) -> None:
        self._waiting[seed] = rows

    def tell(self) -> None:
        """Tell all, if all is recorded."""
        if self._waiting and (self._tell_early or self._writer.num_uncommitted == 0):
            os.write(self._file, (json.dumps(list(self._waiting.items())) + "\n").encode())
            self._waiting.clear()


def _reader(directory: Path, life: int) -> None:
    place = directory / "reader"
    saved: dict[str, Any] = {"sampler": None, "log_bytes": 0}
    if (place / "state.json").exists():
        saved = json.loads((place / "state.json").read_text())
    with (place / "log.jsonl").open("ab") as log, _store_with_steps(directory) as reader:
        log.truncate(saved["log_bytes"])  # what was drawn and not saved is drawn again
        sampler = Sampler(reader, EVERYTHING, batch_size=MAX_BATCH, selector=Fifo())
        if saved["sampler"] is not None:
            sampler.restore(saved["sampler"])
        while True:
            is_over = _is_over(directory, "reader")  # before the look: what is committed by now is in it
            available = sampler.follow()
            if not available and is_over:
                break
            if not available:
                time.sleep(0.01)
                continue
            batch = sampler.sample(size=min(available, MAX_BATCH))
            rows = [[int(e), int(i)] for e, i in zip(batch.episode, batch.index, strict=True)]
            log.write((json.dumps({"rows": rows, "different": _num_different(reader, batch)}) + "\n").encode())
            log.flush()
            state = {"sampler": sampler.state(), "log_bytes": log.tell()}
            files.write_atomically(place / "state.json", json.dumps(state).encode())
        sampler.close()


def _store_with_steps(directory: Path) -> Reader:
    """The store, as soon as something was written to it."""
    while True:
        is_over = _is_over(directory, "reader")
        try:
            reader = Reader(directory / "store")
        except StoreFormatError:  # the server has not made it yet
            pass
        else:
            if reader.catalog.spec_ids():
                return reader
            reader.close()
        if is_over:
            raise SystemExit(0)
        time.sleep(0.02)


def _num_different(reader: Reader, batch: Any) -> int:
    """How many transitions are not what their actor wrote; which step it was, the policy version says."""
    different = 0
    for row, (episode, index) in enumerate(zip(batch.episode.tolist(), batch.policy_version.tolist(), strict=True)):
        seed = reader.record(episode).info.seed
        assert seed is not None
        step = step_of(seed, index, last=bool(batch.terminated[row]))
        wanted = {
            **trees.flatten(step.observation, "now"),
            **trees.flatten(observation_of(seed, index + 1), "next"),
            "action": step.action,
        }
        found = {
            **trees.flatten(batch.observation, "now"),
            **trees.flatten(batch.next_observation, "next"),
            "action": batch.action,
        }
        good = all(trees.equal_leaf(value, found[path][row]) for path, value in wanted.items())
        different += not (good and batch.reward[row] == step.reward)
    return different


# ---- comparing


def _check_store(directory: Path, report: ChainReport) -> None:
    """What the actors told against what is in the store."""
    told: dict[int, int] = {}
    for path in sorted((directory / "told").iterdir()):
        for line in path.read_text().splitlines(keepends=True):
            if line.endswith("\n"):  # the kill did not come in the middle of it
                told.update(json.loads(line))
    report.recorded = sum(told.values())
    if not told:
        report.problems.append("actors: recorded nothing, so that nothing is proved; run more events")
    report.problems += verify(directory / "store").problems
    seen: Counter[tuple[int, int]] = Counter()
    with Reader(directory / "store") as reader:
        for record in reader.episodes("1"):
            _, columns = reader.rows(record.id)
            seed = record.info.seed
            assert seed is not None
            for row in range(record.num_rows):
                is_step = bool(columns["is_step"][row])
                index = int(columns["policy_version"][row]) if is_step else row
                seen[seed, index] += 1
                report.out_of_order += index != row
                report.different += not row_equals(columns, index, seed, last=not is_step)
    report.durable = sum((seed, index) in seen for seed, rows in told.items() for index in range(rows))
    report.duplicated += seen.total() - len(seen)
    report.untold = len(seen) - report.durable


def _check_reader(directory: Path, report: ChainReport) -> None:
    """What the reader drew: each step of the store once, and those of an episode in their order."""
    following: Counter[int] = Counter()  # by episode: the step that is to come next
    state = directory / "reader" / "state.json"
    size = json.loads(state.read_text())["log_bytes"] if state.exists() else 0
    log = (directory / "reader" / "log.jsonl").read_bytes()[:size] if size else b""
    for line in log.splitlines():
        batch = json.loads(line)
        report.different += batch["different"]
        for episode, index in batch["rows"]:
            report.consumed += 1
            report.duplicated += index < following[episode]
            report.out_of_order += index > following[episode]
            following[episode] = index + 1
    with Reader(directory / "store") as reader:
        there = sum(max(record.num_rows - 1, 0) for record in reader.episodes("1"))
    if report.consumed != there:
        report.problems.append(f"reader: drew {report.consumed} steps of {there}")


if __name__ == "__main__":
    main(sys.argv[1:])

"""Chain test: kills the processes between an actor and a learner, disturbs the link, and counts what was lost.

Two actors write through a link to a server, and a reader samples each step of its store once. At instants chosen at
random the parent kills one of them with SIGKILL and restarts it at once, or disturbs the link (see faulty_proxy.py). An
actor reports each row that was *recorded*; at the end all of these must be in the store, once, unchanged and in order.

| process | takes from | blocks on | woken by |
|---|---|---|---|
| parent | time | pauses; at the end, the exits of the others | - |
| actor-1, actor-2 | - | a pause; the spool's disk | time; the recording thread |
| server | the actors' chunks, through the proxy | see server.py | gRPC |
| reader | the store's catalog | a pause when there is nothing new | time |

They communicate through files: each incarnation of an actor appends to its own file what it knows to be recorded; the
reader appends what it sampled and then replaces, atomically, the file with its sampler's state and the log's length.
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
from understudy.selftest.contents import Contents
from understudy.selftest.crash_test import SEGMENT_BYTES
from understudy.selftest.faulty_proxy import Proxy, free_port
from understudy.service.client.outbox import OutboxConfig
from understudy.service.client.remote import connect
from understudy.service.client.remote_writer import RemoteWriter
from understudy.service.server.server import Server, ServerConfig

ACTORS = ("actor-1", "actor-2")
FAULTS = {  # and the weight of each
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
    recorded: int = 0  # as reported by an actor
    durable: int = 0  # of the recorded
    unreported: int = 0  # durable, and the actor was killed before its report: neither lost nor wrong
    consumed: int = 0  # steps that the reader has sampled
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
    encoded: bool = False,
    report_early: bool = False,
    progress: Callable[[ChainReport], None] | None = None,
) -> ChainReport:
    """Inject `events` faults, one after the other, then let all processes finish and compare.

    With `encoded` the steps have cameras that are stored in H.264 and PNG.
    With `report_early` the actors report a row as recorded before it is, and the test must detect that.
    """
    rng = random.Random(seed)
    report = ChainReport()
    contents = Contents(encoded=encoded)
    with _running(directory, contents, seed, report, report_early=report_early) as chain:
        for name in ACTORS:
            chain.wait_for_report(name, SETTLE_S)
        for kind in rng.choices(list(FAULTS), list(FAULTS.values()), k=events):
            chain.wait(rng.choice([rng.uniform(0.0, 0.2), rng.uniform(0.3, 1.5)]))
            chain.inject(kind, rng)
            report.events[kind] += 1
            if progress:
                progress(report)
        chain.settle()
    _check_store(directory, contents, report)
    _check_reader(directory, report)
    return report


# ---- the parent


@contextmanager
def _running(
    directory: Path, contents: Contents, seed: int, report: ChainReport, *, report_early: bool
) -> Iterator[_Chain]:
    for name in ("reports", "logs", "spool", "reader"):
        (directory / name).mkdir(parents=True)
    port = free_port()
    with Proxy(port, port=free_port(), seed=seed) as proxy:
        commands: dict[str, list[str]] = {
            "server": [str(port)],
            "reader": [str(int(contents.encoded))],
            **{
                name: [name, proxy.address, str(seed), str(int(contents.encoded)), str(int(report_early))]
                for name in ACTORS
            },
        }
        chain = _Chain(directory, commands, proxy, report)
        try:
            yield chain
        finally:
            chain.kill_all()


class _Chain:
    """The processes, the link between them, and the faults of the link that are to end."""

    def __init__(self, directory: Path, commands: dict[str, list[str]], proxy: Proxy, report: ChainReport):
        self._directory = directory
        self._commands = commands
        self._proxy = proxy
        self._report = report
        self._incarnations: Counter[str] = Counter()
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._fault_ends: list[tuple[float, Callable[[], None]]] = []
        for name in commands:
            self._start(name)

    def _start(self, name: str) -> None:
        self._incarnations[name] += 1
        role = "actor" if name in ACTORS else name
        command = [
            sys.executable,
            "-m",
            __spec__.name,
            role,
            str(self._directory),
            str(self._incarnations[name]),
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

    def inject(self, kind: str, rng: random.Random) -> None:
        """Inject one fault."""
        proxy = self._proxy
        if kind.startswith("kill "):
            name = kind[5:]
            if name in ACTORS and rng.random() < 0.8:  # else it is killed perhaps while it starts
                self.wait_for_report(name, 5.0)
            self._processes[name].send_signal(signal.SIGKILL)
            self._processes[name].wait()
            self._start(name)
        elif kind in ("cut", "silence"):
            getattr(proxy, kind)()
        elif kind in ("drop", "repeat"):
            proxy.corrupt("drop" if kind == "drop" else "repeat", to_target=rng.random() < 0.5)
        elif kind == "delay":
            proxy.delay(rng.uniform(0.05, 0.5))
            self._end_fault_after(rng.uniform(0.2, 2.0), lambda: proxy.delay(0.0))
        elif kind == "freeze":
            proxy.freeze(on=True)
            self._end_fault_after(rng.uniform(0.2, 2.0), lambda: proxy.freeze(on=False))
        else:
            proxy.refuse(on=True)
            proxy.cut()
            self._end_fault_after(rng.uniform(0.2, 2.0), lambda: proxy.refuse(on=False))

    def _end_fault_after(self, seconds: float, end: Callable[[], None]) -> None:
        self._fault_ends.append((time.monotonic() + seconds, end))

    def wait(self, seconds: float) -> None:
        """Pause, end the faults that are over, and restart processes that ended by themselves, which is a problem."""
        deadline = time.monotonic() + seconds
        while True:
            now = time.monotonic()
            for entry in [entry for entry in self._fault_ends if entry[0] <= now]:
                self._fault_ends.remove(entry)
                entry[1]()
            for name, process in self._processes.items():
                if process.poll() is not None:
                    self._note_end(name, process.returncode)
                    self._start(name)
            if now >= deadline:
                return
            time.sleep(min(0.01, deadline - now))

    def wait_for_report(self, name: str, seconds: float) -> None:
        """Wait until this incarnation of an actor has reported rows as recorded."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            report = _report_path(self._directory, name, self._incarnations[name])
            if report.exists() and report.stat().st_size:
                return
            self.wait(0.01)

    def settle(self) -> None:
        """Let the actors deliver their rows, the reader sample the rest, and the server close its store."""
        self._fault_ends.clear()
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
                    self._report.problems.append(f"{name}: did not finish in {SETTLE_S:.0f} s")
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
    role, directory, incarnation, *rest = arguments
    roles: dict[str, Callable[..., None]] = {"actor": _actor, "server": _server, "reader": _reader}
    roles[role](Path(directory), int(incarnation), *rest)


def _is_over(directory: Path, role: str) -> bool:
    """Whether the parent wants this process to finish; ends it if the parent is gone."""
    if os.getppid() != _PARENT:
        raise SystemExit("the parent is gone")
    return (directory / f"finish-{role}").exists()


def _report_path(directory: Path, actor: str, incarnation: int) -> Path:
    return directory / "reports" / f"{actor}.{incarnation:04d}.jsonl"


def _server(directory: Path, incarnation: int, port: str) -> None:
    with (
        Store.open(directory / "store", segment_bytes=SEGMENT_BYTES) as store,
        Server(store, ServerConfig(port=int(port))) as server,
    ):
        while not _is_over(directory, "server") and not server.failed.wait(0.05):
            pass
        if server.failure is not None:
            raise server.failure


def _actor(
    directory: Path, incarnation: int, name: str, address: str, seed: str, encoded: str, report_early: str
) -> None:
    contents = Contents(encoded=encoded == "1")
    rng = random.Random(f"{seed} {name} {incarnation}")
    report = os.open(_report_path(directory, name, incarnation), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    with connect(address) as remote:
        writer = remote.writer(
            name,
            contents.spec,
            spool=directory / "spool" / name,
            commit_steps=rng.randint(1, 30),
            flush_each_episode=rng.random() < 0.7,
            config=OutboxConfig(block_timeout_s=SETTLE_S),
        )
        reports = _RowReports(report, writer, report_early=report_early == "1")
        while not _is_over(directory, "actor"):
            _write_episode(writer, contents, reports, rng)
            while writer.delivery.recorded > MAX_BACKLOG_ROWS and not _is_over(directory, "actor"):
                time.sleep(0.01)
        writer.flush()
        reports.send()
        if not writer.wait_delivered(SETTLE_S - 5):
            raise DeliveryError(f"{writer.delivery}")
        writer.close()


def _write_episode(writer: RemoteWriter, contents: Contents, reports: _RowReports, rng: random.Random) -> None:
    seed = rng.getrandbits(60)
    writer.begin(EpisodeInfo(seed=seed, actor=writer.name))
    num_steps = rng.randrange(1, MAX_STEPS)
    for index in range(num_steps):
        writer.append(contents.step(seed, index, last=index == num_steps - 1))
        reports.add(seed, index + 1)
        time.sleep(rng.uniform(0.0, 0.01))
        if rng.random() < 0.05:
            writer.flush()
        reports.send()
    writer.end(contents.observation(seed, num_steps))
    reports.add(seed, num_steps + 1)
    reports.send()


class _RowReports:
    """The rows that an actor has written and not reported yet."""

    def __init__(self, file: int, writer: RemoteWriter, *, report_early: bool):
        self._file = file
        self._writer = writer
        self._tell_early = report_early
        self._waiting: dict[int, int] = {}  # rows by episode seed

    def add(self, seed: int, rows: int) -> None:
        self._waiting[seed] = rows

    def send(self) -> None:
        """Report all rows, if all are recorded."""
        if self._waiting and (self._tell_early or self._writer.num_uncommitted == 0):
            os.write(self._file, (json.dumps(list(self._waiting.items())) + "\n").encode())
            self._waiting.clear()


def _reader(directory: Path, incarnation: int, encoded: str) -> None:
    contents = Contents(encoded=encoded == "1")
    output = directory / "reader"
    saved: dict[str, Any] = {"sampler": None, "log_bytes": 0}
    if (output / "state.json").exists():
        saved = json.loads((output / "state.json").read_text())
    with (output / "log.jsonl").open("ab") as log, _store_with_steps(directory) as reader:
        log.truncate(saved["log_bytes"])  # what was sampled and not saved is sampled again
        sampler = Sampler(reader, EVERYTHING, batch_size=MAX_BATCH, selector=Fifo())
        if saved["sampler"] is not None:
            sampler.restore(saved["sampler"])
        while True:
            is_over = _is_over(directory, "reader")  # asked before `follow`, which sees all that is committed by then
            available = sampler.follow()
            if not available and is_over:
                break
            if not available:
                time.sleep(0.01)
                continue
            batch = sampler.sample(size=min(available, MAX_BATCH))
            rows = [[int(e), int(i)] for e, i in zip(batch.episode, batch.index, strict=True)]
            log.write(
                (json.dumps({"rows": rows, "different": _num_different(reader, contents, batch)}) + "\n").encode()
            )
            log.flush()
            state = {"sampler": sampler.state(), "log_bytes": log.tell()}
            files.write_atomically(output / "state.json", json.dumps(state).encode())
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


def _num_different(reader: Reader, contents: Contents, batch: Any) -> int:
    """How many transitions are not what their actor wrote; the policy version holds the index of the step."""
    different = 0
    for row, (episode, index) in enumerate(zip(batch.episode.tolist(), batch.policy_version.tolist(), strict=True)):
        seed = reader.record(episode).info.seed
        assert seed is not None
        step = contents.step(seed, index, last=bool(batch.terminated[row]))
        wanted = {
            **trees.flatten(step.observation, "now"),
            **trees.flatten(contents.observation(seed, index + 1), "next"),
            "action": step.action,
        }
        found = {
            **trees.flatten(batch.observation, "now"),
            **trees.flatten(batch.next_observation, "next"),
            "action": batch.action,
        }
        good = all(contents.leaf_equals(path, value, found[path][row]) for path, value in wanted.items())
        different += not (good and batch.reward[row] == step.reward)
    return different


# ---- comparing


def _check_store(directory: Path, contents: Contents, report: ChainReport) -> None:
    """Compare the actors' reports with the store."""
    reported: dict[int, int] = {}
    for path in sorted((directory / "reports").iterdir()):
        for line in path.read_text().splitlines(keepends=True):
            if line.endswith("\n"):  # else the kill came in the middle of it
                reported.update(json.loads(line))
    report.recorded = sum(reported.values())
    if not reported:
        report.problems.append("actors: recorded nothing, so the test shows nothing; run more events")
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
                report.different += not contents.row_equals(columns, index, seed, last=not is_step)
    report.durable = sum((seed, index) in seen for seed, rows in reported.items() for index in range(rows))
    report.duplicated += seen.total() - len(seen)
    report.unreported = len(seen) - report.durable


def _check_reader(directory: Path, report: ChainReport) -> None:
    """Check that the reader sampled each step of the store once, and those of an episode in order."""
    following: Counter[int] = Counter()  # by episode: the index of its next step
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
        stored = sum(max(record.num_rows - 1, 0) for record in reader.episodes("1"))
    if report.consumed != stored:
        report.problems.append(f"reader: sampled {report.consumed} steps of {stored}")


if __name__ == "__main__":
    main(sys.argv[1:])

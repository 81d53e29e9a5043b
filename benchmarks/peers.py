"""Replay buffers of other projects and ours at the same work: two 128x128 cameras, batches of 256 transitions.

    python benchmarks/peers.py --work peers-work        # virtual environments are kept there for the next time
    python benchmarks/peers.py --only numpy understudy cpprb --steps 1000 --out /tmp/results

Each buffer lives in a process of its own (peers_worker.py), in a virtual environment of its own. All are alive at once
and are told in turn to insert some episodes or to sample some batches, so that what else the machine does falls on all
of them. Then each, in new processes, inserts, saves if there is something to call, inserts again, is killed with
SIGKILL, and is opened again. What cannot be installed or run says so in its row. Writes `benchmarks/peers.json`.

| process | waits for | woken by |
|---|---|---|
| this one | the answer of one worker, at most `ANSWER_TIMEOUT_S` | its line, or its end |
| workers | a line on standard input | this process; the end of the pipe ends them |
"""

from __future__ import annotations

import json
import os
import selectors
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import tyro
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
EPISODE_STEPS = 100
BATCHES_A_TURN = 5
INSERT_TURNS = 8
KILL_EPISODES = 10  # before the save, and as many after it
INSTALL_TIMEOUT_S = 600.0
ANSWER_TIMEOUT_S = 300.0


@dataclass(frozen=True, kw_only=True)
class Peer:
    """A buffer, and how its environment is made; without `installs` it runs in this interpreter."""

    name: str
    title: str
    python: str = "3.11"
    installs: tuple[tuple[str, ...], ...] = ()  # arguments of `pip install`, in order


TORCH = ("torch==2.13.0",)
PEERS = (
    Peer(name="numpy", title="`numpy.take` into a batch that is there (the limit)"),
    Peer(name="understudy", title="Understudy, into a batch used again"),
    Peer(name="understudy-new", title="Understudy, a new batch each time"),
    Peer(name="cpprb", title="cpprb `ReplayBuffer`", installs=(("cpprb==11.0.0",),)),
    Peer(name="torchrl", title="TorchRL `LazyMemmapStorage`", installs=(TORCH, ("torchrl==0.14.1",))),
    Peer(
        name="lerobot",
        title="LeRobot `ReplayBuffer`",
        installs=(
            TORCH,
            ("--no-deps", "lerobot==0.4.4"),  # it asks for an older torch than the others
            (
                "numpy<2.4",
                "datasets<5",
                "huggingface-hub<0.36",
                "accelerate<2",
                "av<16",
                "pandas<2.4",
                "pillow",
                "tqdm",
            ),
        ),
    ),
    Peer(
        name="reverb",
        title="Reverb, server in the same process",
        python="3.10",
        installs=(("dm-reverb==0.14.0", "tensorflow-cpu==2.15.*"),),
    ),
    Peer(
        name="rlinf",
        title="RLinf `TrajectoryReplayBuffer`",
        installs=(TORCH, ("--no-deps", "rlinf==0.3.0"), ("ray==2.60.0", "numpy", "omegaconf", "hydra-core")),
    ),
)


@dataclass(kw_only=True)
class Row:
    """What was found of one buffer. Times are medians over the turns; None is what could not be measured."""

    name: str
    title: str
    installs: tuple[tuple[str, ...], ...]
    version: str | None = None
    python: str | None = None
    sample_cpu_ms: float | None = None  # of a batch
    sample_cpu_quartiles_ms: tuple[float, float] | None = None
    sample_wall_ms: float | None = None
    times_the_limit: float | None = None
    insert_steps_per_s: float | None = None
    insert_steps_per_cpu_s: float | None = None
    memory_bytes_per_step: float | None = None
    disk_bytes_per_step: float | None = None
    wrong_in_a_batch: int | None = None
    killed: Killed | None = None
    error: str | None = None


@dataclass(frozen=True, kw_only=True)
class Killed:
    """What a new process found after SIGKILL. Half of the steps were inserted before the save, half after it."""

    inserted: int
    found: int
    wrong_in_a_batch: int
    saving: str | None  # what was called between the halves
    save_s: float
    error: str | None = None  # of opening it again


class WorkerError(Exception):
    """A worker that failed, did not answer, or could not be started."""


def main(
    *,
    steps: int = 4_000,
    rounds: int = 9,
    only: tuple[str, ...] = (),
    out: Path = Path("docs"),
    work: Path | None = None,
) -> int:
    """Compare replay buffers; the exit code is 1 if ours could not be run.

    Args:
        steps: Steps in each buffer, in episodes of 100.
        rounds: Turns of five batches to measure, after one that is not counted.
        only: Names of the buffers; all by default.
        out: Where to put the figures.
        work: Where to make virtual environments and data; a temporary directory by default. Environments that are
            there already are used, data is removed afterwards.
    """
    console = Console()
    unknown = set(only) - {peer.name for peer in PEERS}
    if unknown or steps < EPISODE_STEPS * INSERT_TURNS:
        wanted = f"--only of {', '.join(p.name for p in PEERS)}; --steps from {EPISODE_STEPS * INSERT_TURNS}"
        console.print(f"expected {wanted}; got {sorted(unknown)} and {steps}", style="red")
        return 1
    peers = [peer for peer in PEERS if not only or peer.name in only]
    with ExitStack() as stack:
        if work is None:
            work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="peers-")))
        work.mkdir(parents=True, exist_ok=True)
        data = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="data-", dir=work.resolve())))
        bench = Bench(peers, work.resolve(), data, console)
        bench.measure(steps, rounds)
        bench.kill()
        rows = list(bench.rows.values())
    _compare_with_limit(rows)
    content = {"steps": steps, "rounds": rounds, "batches_a_turn": BATCHES_A_TURN, "rows": [asdict(r) for r in rows]}
    (out / "benchmarks").mkdir(parents=True, exist_ok=True)
    (out / "benchmarks" / "peers.json").write_text(json.dumps(content, indent=2) + "\n")
    console.print(_table(rows))
    return int(any(row.error for row in rows if row.name == "understudy"))


# ---- measuring


class Bench:
    """The rows of all buffers; one that fails keeps its error and is left out of what follows."""

    def __init__(self, peers: Sequence[Peer], work: Path, data: Path, console: Console):
        self.rows = {p.name: Row(name=p.name, title=p.title, installs=p.installs) for p in peers}
        self._data = data
        self._work = work
        self._console = console
        self._num_turns = 0
        self._pythons: dict[str, Path] = {}
        for peer in peers:
            console.print(f"{peer.name}: environment")
            try:
                self._pythons[peer.name] = _environment(peer, work)
            except WorkerError as error:
                self._give_up(peer.name, error)

    def measure(self, steps: int, rounds: int) -> None:
        """Inserting, bytes and sampling, with all workers alive."""
        steps -= steps % (EPISODE_STEPS * INSERT_TURNS)
        with ExitStack() as stack:
            workers: dict[str, Worker] = {}
            for name in self._running():
                try:
                    worker = workers[name] = stack.enter_context(self._start(name, "measure", steps))
                    row = self.rows[name]
                    row.version, row.python = worker.hello["version"], worker.hello["python"]
                except WorkerError as error:
                    self._give_up(name, error)
            self._insert(workers, steps // EPISODE_STEPS // INSERT_TURNS)
            for name, answer in self._ask(workers, do="settle").items():
                row = self.rows[name]
                row.memory_bytes_per_step = answer["memory_bytes"] / steps
                row.disk_bytes_per_step = answer["disk_bytes"] / steps
                row.wrong_in_a_batch = answer["wrong"]
            self._sample(workers, rounds)

    def _insert(self, workers: dict[str, Worker], episodes: int) -> None:
        turns: dict[str, list[dict[str, Any]]] = {name: [] for name in workers}
        for turn in range(INSERT_TURNS):
            self._console.print(f"insert, turn {turn + 1} of {INSERT_TURNS}")
            for name, answer in self._ask(workers, do="insert", first=turn * episodes, episodes=episodes).items():
                turns[name].append(answer)
        num_steps = episodes * EPISODE_STEPS
        for name, answers in turns.items():
            if answers:
                self.rows[name].insert_steps_per_s = num_steps / statistics.median(a["wall_s"] for a in answers)
                self.rows[name].insert_steps_per_cpu_s = num_steps / statistics.median(a["cpu_s"] for a in answers)

    def _sample(self, workers: dict[str, Worker], rounds: int) -> None:
        turns: dict[str, list[dict[str, Any]]] = {name: [] for name in workers}
        for turn in range(rounds + 1):
            self._console.print(f"sample, turn {turn} of {rounds}")
            for name, answer in self._ask(workers, do="sample", batches=BATCHES_A_TURN).items():
                if turn:  # the first is to warm up
                    turns[name].append(answer)
        for name, answers in turns.items():
            if answers:
                cpu_ms = [answer["cpu_s"] / BATCHES_A_TURN * 1e3 for answer in answers]
                row = self.rows[name]
                row.sample_cpu_ms = statistics.median(cpu_ms)
                row.sample_cpu_quartiles_ms = _quartiles(cpu_ms)
                row.sample_wall_ms = statistics.median(a["wall_s"] for a in answers) / BATCHES_A_TURN * 1e3

    def kill(self) -> None:
        """Insert, save, insert, SIGKILL, and open again in a new process."""
        capacity = 2 * KILL_EPISODES * EPISODE_STEPS
        for name in self._running():
            self._console.print(f"{name}: kill -9")
            try:
                with self._start(name, "kill", capacity) as worker:
                    worker.ask(do="insert", first=0, episodes=KILL_EPISODES)
                    saved = worker.ask(do="save")
                    worker.ask(do="insert", first=KILL_EPISODES, episodes=KILL_EPISODES)
                    worker.kill()
            except WorkerError as error:
                self.rows[name].error = f"while inserting or saving: {error}"
                continue
            found, failure = {"steps": 0, "wrong": 0}, None
            try:
                with self._start(name, "kill", capacity) as worker:
                    found = worker.ask(do="recover")
            except WorkerError as error:
                failure = str(error)
            self.rows[name].killed = Killed(
                inserted=capacity,
                found=found["steps"],
                wrong_in_a_batch=found["wrong"],
                saving=saved["saving"],
                save_s=saved["wall_s"],
                error=failure,
            )
            shutil.rmtree(self._data / "kill" / name, ignore_errors=True)

    def _running(self) -> list[str]:
        return [name for name, row in self.rows.items() if row.error is None]

    def _start(self, name: str, what: str, capacity: int) -> Worker:
        return Worker(name, self._pythons[name], self._data / what / name, capacity, self._work / f"{name}.log")

    def _ask(self, workers: dict[str, Worker], **order: Any) -> dict[str, dict[str, Any]]:
        """Tell all workers in turn, each time from another one on; those that fail are taken out."""
        answers = {}
        turn = deque(workers)
        turn.rotate(self._num_turns)
        self._num_turns += 1
        for name in turn:
            try:
                answers[name] = workers[name].ask(**order)
            except WorkerError as error:
                workers.pop(name).kill()
                self._give_up(name, error)
        return answers

    def _give_up(self, name: str, error: WorkerError) -> None:
        self.rows[name].error = str(error)
        self._console.print(f"{name}: {error}", style="red")


def _quartiles(values: list[float]) -> tuple[float, float]:
    if len(values) < 2:
        return values[0], values[0]
    first, _, third = statistics.quantiles(values, n=4)
    return first, third


def _compare_with_limit(rows: list[Row]) -> None:
    limit = next((row.sample_cpu_ms for row in rows if row.name == "numpy"), None)
    for row in rows:
        if limit and row.sample_cpu_ms:
            row.times_the_limit = row.sample_cpu_ms / limit


# ---- processes


class Worker:
    """A process with one buffer. Its own threads are at most one for numerics, so that CPU time is comparable."""

    def __init__(self, name: str, python: Path, directory: Path, capacity: int, log: Path):
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3", "HF_HUB_OFFLINE": "1"}
        if name.startswith("understudy"):
            environment["PYTHONPATH"] = str(ROOT / "src")
        script = Path(__file__).with_name("peers_worker.py")
        with log.open("a") as errors:
            self._process = subprocess.Popen(
                [python, script, name, directory, str(capacity)],
                env=environment,
                cwd=log.parent,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
            )
        try:
            self.hello = self._answer()
        except WorkerError:
            self.kill()
            raise

    def ask(self, **order: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(order).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise WorkerError(f"the process ended before {order['do']!r}") from error
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        """The next line; there is never more than one on its way."""
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as ready:
            ready.register(self._process.stdout, selectors.EVENT_READ)
            if not ready.select(ANSWER_TIMEOUT_S):
                raise WorkerError(f"no answer within {ANSWER_TIMEOUT_S:.0f} s")
        line = self._process.stdout.readline()
        if not line:
            raise WorkerError(f"the process ended with code {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise WorkerError(answer["error"])
        return answer

    def kill(self) -> None:
        """SIGKILL."""
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()


def _environment(peer: Peer, work: Path) -> Path:
    """The interpreter of a peer's virtual environment, which is made if it is not there."""
    if not peer.installs:
        return Path(sys.executable)
    directory = work / peer.name
    python = directory / "bin" / "python"
    finished = directory / "installed.json"  # what is in it, once it is complete
    if finished.exists() and json.loads(finished.read_text()) == [list(i) for i in peer.installs]:
        return python
    shutil.rmtree(directory, ignore_errors=True)
    _run([_interpreter(peer.python), "-m", "venv", directory])
    for arguments in peer.installs:
        _run([python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments])
    finished.write_text(json.dumps(peer.installs))
    return python


def _interpreter(version: str) -> str:
    if sys.version_info[:2] == tuple(int(part) for part in version.split(".")):
        return sys.executable
    found = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    on_path = shutil.which(f"python{version}")
    if not found and on_path is None:
        raise WorkerError(f"there is no Python {version} on the path or in ~/.pyenv; install one")
    return str(found[-1]) if found else str(on_path)


def _run(command: Sequence[str | Path]) -> None:
    told = " ".join(str(part) for part in command[1:])
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise WorkerError(f"`{told}` took more than {INSTALL_TIMEOUT_S:.0f} s") from error
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()
        raise WorkerError(f"`{told}`: {lines[-1] if lines else f'code {done.returncode}'}")


# ---- telling


def _table(rows: list[Row]) -> Table:
    table = Table()
    for name in ("buffer", "CPU ms", "x limit", "steps/s", "per CPU s", "RAM kB", "disk kB", "kept", "save"):
        table.add_column(name, justify="left" if name == "buffer" else "right")
    for row in rows:
        if row.error is not None:
            table.add_row(f"{row.name}: {row.error}")
        else:
            table.add_row(
                row.name,
                _told(row.sample_cpu_ms, ".1f"),
                _told(row.times_the_limit, ".2f"),
                _told(row.insert_steps_per_s, ",.0f"),
                _told(row.insert_steps_per_cpu_s, ",.0f"),
                _told(row.memory_bytes_per_step, ",.1f", 1e3),
                _told(row.disk_bytes_per_step, ",.1f", 1e3),
                *_told_kill(row.killed),
            )
    return table


def _told(value: float | None, form: str, unit: float = 1.0) -> str:
    return "-" if value is None else format(value / unit, form)


def _told_kill(killed: Killed | None) -> tuple[str, str]:
    if killed is None:
        return "-", "-"
    wrong = f", {killed.wrong_in_a_batch} of 256 wrong" if killed.wrong_in_a_batch else ""
    failed = f" ({killed.error})" if killed.error else ""
    save = f"{killed.saving} {killed.save_s:.1f} s" if killed.saving else "-"
    return f"{killed.found:,} of {killed.inserted:,}{wrong}{failed}", save


if __name__ == "__main__":
    sys.exit(tyro.cli(main))

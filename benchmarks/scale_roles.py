"""The processes of the study of scale beside the servers: simulated environments, and a learner that samples.

| process, thread | does | waits for |
|---|---|---|
| environments, main | hears what to do, tells what came of it | the study |
| environments, one thread each | appends steps of its environment, in chunks | its clock; the server's disk |
| learner | draws batches from all shards | the study; the servers |

An environment appends its steps on a clock of its own and, with each `commit_steps`-th, waits until the server has all
of them on disk. The latency of a commit is from the moment at which that step was *due* until it is durable, so that an
environment that is held up does not hide it. Without a rate it lives as fast as its chunks become durable.

Hundreds of environments share an interpreter here, where each would have its own: those of one process append in turns.
Without that, hundreds of threads want the interpreter's lock at once and spend two cores on asking for it.
"""

from __future__ import annotations

import multiprocessing
import resource
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from understudy.core import Step
from understudy.core.examples import random_steps, robot_spec
from understudy.replay import EVERYTHING, Reader
from understudy.service import OutboxConfig, RemoteWriter, connect

TIMEOUT_S = 300.0
NUM_PICTURES = 32  # that are made beforehand and seen in turn
EPISODE_CHUNKS = 10
Turn = AbstractContextManager[Any]  # a lock that its holder may take again


@dataclass(frozen=True, kw_only=True)
class Phase:
    """What environments do, or the learner, from `start_s` on the monotonic clock, which all processes share."""

    start_s: float
    seconds: float
    rate_hz: float | None  # of each environment, or of the learner's batches; None: as fast as it goes


@dataclass(frozen=True, kw_only=True)
class Lived:
    """Of one environment in one phase."""

    number: int
    num_steps: int  # in all phases so far
    latencies_s: tuple[float, ...]  # of commits


class Process:
    """A process of ours, from its first word to its end: it gets phases and tells what came of each."""

    def __init__(self, target: Any, *args: Any):
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=target, args=(theirs, *args), daemon=True)
        self._process.start()
        theirs.close()
        self.pid = self._process.pid or 0

    def tell(self, phase: Phase | None) -> None:
        """The next phase; None is the last word."""
        self._pipe.send(phase)

    def hear(self) -> Any:
        if not self._pipe.poll(TIMEOUT_S):
            raise TimeoutError(f"{self._process.name} said nothing for {TIMEOUT_S:.0f} s")
        try:
            return self._pipe.recv()
        except EOFError:
            self._process.join()
            raise RuntimeError(f"{self._process.name} ended with {self._process.exitcode}; see above") from None

    def close(self) -> None:
        """Let it end, or end it."""
        self._process.join(30.0)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._pipe.close()


@contextmanager
def processes(*made: tuple[Any, ...]) -> Iterator[list[Process]]:
    """All of these, ready; at the end all are gone."""
    started: list[Process] = []
    try:
        started += [Process(*one) for one in made]
        for process in started:
            process.hear()
        yield started
    finally:
        for process in started:
            try:
                process.tell(None)
            except OSError:
                continue
        for process in started:
            process.close()


# ---- environments


def environments(pipe: Any, addresses: str, numbers: Sequence[int], commit_steps: int, size: int) -> None:
    """A process with an environment, a writer and a connection of its own for each number."""
    raise_file_limit()
    seen = _pictures(size)
    config = OutboxConfig(queue_steps=4 * commit_steps, block_timeout_s=TIMEOUT_S)
    with ExitStack() as undo:
        living, turn = [], threading.RLock()
        for number in numbers:
            remote = undo.enter_context(connect(addresses))
            writer = remote.writer(f"env-{number:04d}", robot_spec(size), commit_steps=commit_steps, config=config)
            undo.callback(writer.close)
            living.append(Environment(number, writer, seen, commit_steps, turn))
        pool = undo.enter_context(ThreadPoolExecutor(len(living)))
        while not all(one.writer.delivery.connected for one in living):
            time.sleep(0.05)
        pipe.send("connected")
        while (phase := pipe.recv()) is not None:
            running = [pool.submit(one.live, phase) for one in living]
            pipe.send([future.result() for future in running])


class Environment:
    """Real steps of no simulator: two cameras, state and action, and each says whose it is and which one."""

    def __init__(self, number: int, writer: RemoteWriter, seen: np.ndarray[Any, Any], commit_steps: int, turn: Turn):
        self.number = number
        self.writer = writer
        self.num_steps = 0
        self._seen = seen
        self._commit_steps = commit_steps
        self._turn = turn
        self._action = np.zeros(7, np.float32)
        self._rng = np.random.default_rng(number)

    def live(self, phase: Phase) -> Lived:
        """Whole chunks until the time is over, and at least one; all of it is durable then."""
        period_s = 0.0 if phase.rate_hz is None else 1 / phase.rate_hz
        due = phase.start_s + self._rng.random() * period_s * self._commit_steps  # so that they do not commit at once
        end_s = phase.start_s + phase.seconds
        latencies, chunks, asked = [], 0, due
        while chunks == 0 or (time.monotonic() if phase.rate_hz is None else due) < end_s:
            first, last = chunks % EPISODE_CHUNKS == 0, (chunks + 1) % EPISODE_CHUNKS == 0
            _sleep_until(due)
            with self._turn if phase.rate_hz is None else nullcontext():  # no clock: a whole chunk in one turn
                for step in range(self._commit_steps):
                    _sleep_until(due)
                    asked = time.monotonic() if phase.rate_hz is None else due
                    end = step + 1 == self._commit_steps
                    self._append(first=first and step == 0, last=last and end, record=end)
                    due += period_s
            self._wait()
            latencies.append(time.monotonic() - asked)
            chunks += 1
        if chunks % EPISODE_CHUNKS:
            self.writer.cut(self._observe(self.num_steps))
            self._wait()
        return Lived(number=self.number, num_steps=self.num_steps, latencies_s=tuple(latencies))

    def _append(self, *, first: bool, last: bool, record: bool) -> None:
        step = Step(
            observation=self._observe(self.num_steps), action=self._action, reward=0.0, terminated=False, truncated=last
        )
        with self._turn:
            if first:
                self.writer.begin(task=f"env-{self.number}")
            self.writer.append(step)
            self.num_steps += 1
            if last:
                self.writer.end(self._observe(self.num_steps))
            if record:  # what it takes to make the message is part of the turn
                self.writer.flush()

    def _wait(self) -> None:
        if not self.writer.wait_delivered(TIMEOUT_S):
            raise TimeoutError(f"env {self.number}: not delivered after {TIMEOUT_S:.0f} s: {self.writer.delivery}")

    def _observe(self, index: int) -> dict[str, Any]:
        picture = self._seen[picture_of(self.number, index)]
        return {"wrist_1": picture, "wrist_2": self._seen[0], "state": state_of(self.number, np.array([index]))[0]}


def picture_of(number: int, index: Any) -> Any:
    """Which picture an environment's first camera sees at a step; the second one always sees the first picture."""
    return (7 * number + index) % NUM_PICTURES


def state_of(number: int, index: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """A row of state for each step."""
    state = np.ones((len(index), 20), np.float32)
    state[:, 0], state[:, 1], state[:, 2] = number, index, number + index
    return state


def _pictures(size: int) -> np.ndarray[Any, Any]:
    steps, _ = random_steps(robot_spec(size), NUM_PICTURES, seed=0)
    return np.stack([step.observation["wrist_1"] for step in steps])


def _sleep_until(due_s: float) -> None:
    left = due_s - time.monotonic()
    if left > 0:
        time.sleep(left)


def raise_file_limit() -> None:
    """As far as this user may."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


# ---- the learner


def learner(pipe: Any, addresses: str, batch_size: int) -> None:
    """A process that draws batches from all shards and tells how long it waited for each."""
    with connect(addresses) as remote:
        sampler = remote.sharded_sampler(EVERYTHING, batch_size=batch_size, seed=1)
        pipe.send("ready")
        batch = None
        while (phase := pipe.recv()) is not None:
            while sampler.follow() < batch_size:
                time.sleep(0.05)
            batch = sampler.sample(batch)  # the first is not measured: the streams open with it
            waited: list[float] = []
            due, end_s = phase.start_s, phase.start_s + phase.seconds
            while not waited or time.monotonic() < end_s:
                _sleep_until(due)
                asked = time.monotonic()
                batch = sampler.sample(batch)
                waited.append(time.monotonic() - asked)
                due = max(due + (0.0 if phase.rate_hz is None else 1 / phase.rate_hz), asked)
            pipe.send(waited)
        sampler.close()


# ---- checking


def compare(stores: Sequence[Path], num_steps: dict[int, int], size: int) -> list[str]:
    """What is wrong: each step of each environment must be in one store, once, bit for bit."""
    seen = _pictures(size)
    found: dict[int, list[np.ndarray[Any, Any]]] = {number: [] for number in num_steps}
    problems: list[str] = []
    lock = threading.Lock()

    def read(store: Path) -> None:
        with Reader(store) as reader:
            for record in reader.episodes():
                _, columns = reader.rows(record.id)  # checked against their checksums
                state = columns["observation/state"]
                number, index = int(state[0, 0]), state[:, 1].astype(np.int64)
                same = np.array_equal(state, state_of(number, index[0] + np.arange(len(index))))
                same = same and np.array_equal(columns["observation/wrist_1"], seen[picture_of(number, index)])
                same = same and bool((columns["observation/wrist_2"] == seen[0]).all())
                with lock:
                    if not same:
                        problems.append(f"{store.name}: episode {record.id} of env {number} is not as it was appended")
                    found[number].append(index[columns["is_step"]])

    with ThreadPoolExecutor(len(stores)) as pool:
        list(pool.map(read, stores))
    for number, wanted in num_steps.items():
        indices = np.sort(np.concatenate(found[number])) if found[number] else np.zeros(0)
        if not np.array_equal(indices, np.arange(wanted)):
            problems.append(f"env {number}: {wanted} steps were appended, {len(indices)} are there")
    return problems

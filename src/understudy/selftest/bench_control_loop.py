"""Bench of a control loop: what `append` costs it while the server is well, slow, dead, or comes and goes.

| process | does | ends when |
|---|---|---|
| `bench_control loop ...` | appends a step at each tick, with a spool on disk | it has told its times |
| `bench serve STORE` | serves a store | it is killed, or its standard input ends |
| this one | stops, kills and starts the server | all is in the store and has been compared |

The loop is alone in its process: nothing that disturbs the server runs there.
"""

from __future__ import annotations

import resource
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from understudy.core import Step, UnderstudyError
from understudy.core.examples import robot_spec
from understudy.replay.read.reader import Reader
from understudy.selftest.bench_delivery import TIMEOUT_S, Child, serve_new, tell
from understudy.service.client.remote import connect

Array = np.ndarray[Any, Any]

EPISODE_STEPS = 500
NUM_FRAMES = 64  # that differ
STOPPED_S, RUNNING_S = 2.0, 1.0  # the slow server, in turns
AWAY_S, THERE_S = 1.0, 3.0  # the one that restarts
LOOK_S = 0.2


@dataclass(frozen=True, kw_only=True)
class ControlLoopConfig:
    """Where and how long to measure."""

    directory: Path
    seconds: float  # of each phase
    rate_hz: float = 100.0

    def __post_init__(self) -> None:
        if self.seconds <= 0 or self.rate_hz <= 0 or self.num_steps < 1:
            raise UnderstudyError(
                f"control-loop: expected seconds and rate above 0 and at least one step, got {self.seconds} s at "
                f"{self.rate_hz} Hz"
            )

    @property
    def num_steps(self) -> int:
        return int(self.seconds * self.rate_hz)


@dataclass(frozen=True, kw_only=True)
class PhaseResult:
    """One phase. Times are of `append` alone."""

    name: str
    num_steps: int
    p50_ms: float
    p99_ms: float
    p999_ms: float
    max_ms: float
    num_late: int  # ticks that began more than half a period late, whatever held them up
    num_lost: int  # steps that are not in the store
    num_different: int  # or not as they were appended
    client_peak_bytes: int  # resident
    spool_peak_bytes: int
    catch_up_s: float  # from the end of the loop until all was delivered


def measure_control_loop(
    config: ControlLoopConfig, say: Callable[[str], None], phases: tuple[str, ...] | None = None
) -> tuple[PhaseResult, ...]:
    """Run the loop through all phases, each with a store and a spool of its own; `say` is told which one it is."""
    results = []
    for name in phases or tuple(PHASES):
        say(name)
        results.append(_measure(config, name))
    return tuple(results)


def _measure(config: ControlLoopConfig, name: str) -> PhaseResult:
    place = config.directory / name
    place.mkdir()
    with _Patient(place / "store") as server:
        words = ("loop", server.address, str(place / "spool"), str(config.num_steps), str(config.rate_hz))
        with Child("understudy.selftest.bench_control_loop", *words) as loop:
            loop.tell("go")
            watch = _Watch(loop, place / "spool")
            PHASES[name](server, watch.over)
            times = watch.result()
            server.recover()
            loop.tell("deliver")
            end = loop.hear()
    num_lost, num_different = _compare(place / "store", config.num_steps)
    shutil.rmtree(place)
    return PhaseResult(
        name=name,
        num_steps=config.num_steps,
        **times,
        num_lost=num_lost,
        num_different=num_different,
        spool_peak_bytes=watch.peak_bytes,
        **end,
    )


class _Watch:
    """Waits for the loop in a thread, and looks at the size of its spool meanwhile."""

    def __init__(self, loop: Child, spool: Path):
        self.over = threading.Event()
        self.peak_bytes = 0
        self._spool = spool
        self._heard: list[dict[str, Any]] = []
        self._threads = [threading.Thread(target=run, args=(loop,)) for run in (self._hear, self._look)]
        for thread in self._threads:
            thread.start()

    def _hear(self, loop: Child) -> None:
        try:
            self._heard.append(loop.hear())
        finally:
            self.over.set()

    def _look(self, loop: Child) -> None:
        while not self.over.wait(LOOK_S):
            self.peak_bytes = max(self.peak_bytes, _size_of(self._spool))

    def result(self) -> dict[str, Any]:
        for thread in self._threads:
            thread.join()
        if not self._heard:
            raise UnderstudyError("control-loop: the loop ended early; its error stands above")
        return self._heard[0]


def _size_of(directory: Path) -> int:
    size = 0
    for path in directory.rglob("*"):
        try:
            size += path.stat().st_size
        except FileNotFoundError:  # delivered meanwhile
            continue
    return size


# ---- what happens to the server


class _Patient:
    """A server at one address, however often it dies."""

    def __init__(self, store: Path):
        self._store = store
        self._child: Child | None = serve_new(store)
        self.address = self._child.address

    def kill(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child.close()
            self._child = None

    def recover(self) -> None:
        """Running again, whatever was done to it."""
        if self._child is None:
            self._child = serve_new(self._store, int(self.address.rpartition(":")[2]))
        self._child.signal(signal.SIGCONT)

    def stop(self) -> None:
        assert self._child is not None
        self._child.signal(signal.SIGSTOP)

    def __enter__(self) -> _Patient:
        return self

    def __exit__(self, *error: object) -> None:
        if self._child is not None:
            self._child.signal(signal.SIGCONT)
            self._child.close()


def _healthy(server: _Patient, over: threading.Event) -> None:
    over.wait()


def _slow(server: _Patient, over: threading.Event) -> None:
    while not over.wait(RUNNING_S):
        server.stop()
        over.wait(STOPPED_S)
        server.recover()


def _dead(server: _Patient, over: threading.Event) -> None:
    over.wait(AWAY_S)  # the connection has been made
    server.kill()
    over.wait()


def _restarting(server: _Patient, over: threading.Event) -> None:
    while not over.wait(THERE_S):
        server.kill()
        over.wait(AWAY_S)
        server.recover()


PHASES: dict[str, Callable[[_Patient, threading.Event], None]] = {
    "healthy": _healthy,
    "slow": _slow,
    "dead": _dead,
    "restarting": _restarting,
}


# ---- the loop


def _loop(address: str, spool: str, num_steps: str, rate_hz: str) -> None:
    """Append at each tick; then, when told so, wait until all is delivered."""
    spent_ns = np.zeros(int(num_steps), np.int64)
    late_s = np.zeros(int(num_steps))
    period_s = 1 / float(rate_hz)
    frames = _frames()
    with connect(address) as remote, remote.writer("loop", robot_spec(), spool=spool) as writer:
        tell({"address": address})
        sys.stdin.readline()
        begun = time.perf_counter()
        for number in range(len(spent_ns)):
            tick = begun + number * period_s
            time.sleep(max(tick - time.perf_counter(), 0))
            late_s[number] = time.perf_counter() - tick
            step = _step(number, len(spent_ns), frames)
            if number % EPISODE_STEPS == 0:
                writer.begin()
            before = time.perf_counter_ns()
            writer.append(step)
            spent_ns[number] = time.perf_counter_ns() - before
            if step.truncated:
                writer.end(_observe(number + 1, frames))
        p50, p99, p999 = (float(value) / 1e6 for value in np.percentile(spent_ns, (50, 99, 99.9)))
        num_late = int((late_s > period_s / 2).sum())
        tell(
            {"p50_ms": p50, "p99_ms": p99, "p999_ms": p999, "max_ms": float(spent_ns.max()) / 1e6, "num_late": num_late}
        )
        sys.stdin.readline()
        begun = time.perf_counter()
        if not writer.wait_delivered(TIMEOUT_S):
            raise UnderstudyError(f"control-loop: not delivered after {TIMEOUT_S:.0f} s: {writer.delivery}")
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        tell({"catch_up_s": time.perf_counter() - begun, "client_peak_bytes": peak})


def _frames() -> Array:
    return np.random.default_rng(0).integers(0, 256, (NUM_FRAMES, 128, 128, 3), np.uint8)


def _observe(number: int, frames: Array) -> dict[str, Array]:
    """What is seen at a step; it can be told from all others."""
    state = np.full(20, number, np.float32)
    return {"wrist_1": frames[number % NUM_FRAMES], "wrist_2": frames[number * 7 % NUM_FRAMES], "state": state}


def _step(number: int, num_steps: int, frames: Array) -> Step:
    last = (number + 1) % EPISODE_STEPS == 0 or number + 1 == num_steps
    return Step(
        observation=_observe(number, frames),
        action=np.zeros(7, np.float32),
        reward=0.0,
        terminated=False,
        truncated=last,
    )


def _compare(store: Path, num_steps: int) -> tuple[int, int]:
    """How many steps are missing, and how many rows are there twice or with other bytes."""
    frames = _frames()
    found: set[int] = set()
    num_different = 0
    with Reader(store) as reader:
        for record in reader.episodes():
            _, columns = reader.rows(record.id)
            for row, (number, is_step) in enumerate(
                zip(columns["observation/state"][:, 0], columns["is_step"], strict=True)
            ):
                same = all(
                    (columns[f"observation/{name}"][row] == value).all()
                    for name, value in _observe(int(number), frames).items()
                )
                num_different += not same or (bool(is_step) and int(number) in found)
                if is_step:
                    found.add(int(number))
    return num_steps - len(found & set(range(num_steps))), num_different


if __name__ == "__main__":
    _loop(*sys.argv[2:])

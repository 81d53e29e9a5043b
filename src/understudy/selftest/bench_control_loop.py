"""Bench of a control loop: how long `append` takes while the server is healthy, slow, dead, or restarting.

| process | does | ends when |
|---|---|---|
| `bench_control_loop loop ...` | appends a step at each tick, with a spool on disk | it has reported its times |
| `bench_delivery serve STORE` | serves a store | it is killed, or its standard input ends |
| the parent | stops, kills and starts the server | all steps are in the store and have been compared |

The loop has a process of its own: what disturbs the server does not run there.
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
from understudy.selftest.bench_delivery import TIMEOUT_S, Child, report, start_server
from understudy.service.client.remote import connect

Array = np.ndarray[Any, Any]

EPISODE_STEPS = 500
NUM_FRAMES = 64  # that differ
STOPPED_S, RUNNING_S = 2.0, 1.0  # of the slow server, in turns
DOWN_S, UP_S = 1.0, 3.0  # of the restarting server
POLL_S = 0.2


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
    num_late: int  # ticks that began more than half a period late, for any reason
    num_lost: int  # steps that are not in the store
    num_different: int  # steps that are not as they were appended
    client_peak_bytes: int  # resident
    spool_peak_bytes: int
    catch_up_s: float  # from the end of the loop until all was delivered


def measure_control_loop(
    config: ControlLoopConfig, on_phase: Callable[[str], None], phases: tuple[str, ...] | None = None
) -> tuple[PhaseResult, ...]:
    """Run the loop through all phases, each with its own store and spool; `on_phase` is called with its name."""
    results = []
    for name in phases or tuple(PHASES):
        on_phase(name)
        results.append(_measure(config, name))
    return tuple(results)


def _measure(config: ControlLoopConfig, name: str) -> PhaseResult:
    directory = config.directory / name
    directory.mkdir()
    with _RestartableServer(directory / "store") as server:
        arguments = ("loop", server.address, str(directory / "spool"), str(config.num_steps), str(config.rate_hz))
        with Child("understudy.selftest.bench_control_loop", *arguments) as loop:
            loop.send("start")
            watch = _Watch(loop, directory / "spool")
            PHASES[name](server, watch.over)
            times = watch.result()
            server.recover()
            loop.send("deliver")
            end = loop.receive()
    num_lost, num_different = _compare(directory / "store", config.num_steps)
    shutil.rmtree(directory)
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
    """Waits for the loop in a thread, and measures its spool meanwhile."""

    def __init__(self, loop: Child, spool: Path):
        self.over = threading.Event()
        self.peak_bytes = 0
        self._spool = spool
        self._messages: list[dict[str, Any]] = []
        self._threads = [threading.Thread(target=run, args=(loop,)) for run in (self._receive, self._watch_spool)]
        for thread in self._threads:
            thread.start()

    def _receive(self, loop: Child) -> None:
        try:
            self._messages.append(loop.receive())
        finally:
            self.over.set()

    def _watch_spool(self, loop: Child) -> None:
        while not self.over.wait(POLL_S):
            self.peak_bytes = max(self.peak_bytes, _size_of(self._spool))

    def result(self) -> dict[str, Any]:
        for thread in self._threads:
            thread.join()
        if not self._messages:
            raise UnderstudyError("control-loop: the loop ended early; see its error above")
        return self._messages[0]


def _size_of(directory: Path) -> int:
    size = 0
    for path in directory.rglob("*"):
        try:
            size += path.stat().st_size
        except FileNotFoundError:  # delivered meanwhile
            continue
    return size


# ---- faults of the server


class _RestartableServer:
    """A server that keeps its address when it is killed and started again."""

    def __init__(self, store: Path):
        self._store = store
        self._child: Child | None = start_server(store)
        self.address = self._child.address

    def kill(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child.close()
            self._child = None

    def recover(self) -> None:
        """Let it run again, whether it was stopped or killed."""
        if self._child is None:
            self._child = start_server(self._store, int(self.address.rpartition(":")[2]))
        self._child.signal(signal.SIGCONT)

    def stop(self) -> None:
        assert self._child is not None
        self._child.signal(signal.SIGSTOP)

    def __enter__(self) -> _RestartableServer:
        return self

    def __exit__(self, *error: object) -> None:
        if self._child is not None:
            self._child.signal(signal.SIGCONT)
            self._child.close()


def _healthy(server: _RestartableServer, over: threading.Event) -> None:
    over.wait()


def _slow(server: _RestartableServer, over: threading.Event) -> None:
    while not over.wait(RUNNING_S):
        server.stop()
        over.wait(STOPPED_S)
        server.recover()


def _dead(server: _RestartableServer, over: threading.Event) -> None:
    over.wait(DOWN_S)  # the connection has been made
    server.kill()
    over.wait()


def _restarting(server: _RestartableServer, over: threading.Event) -> None:
    while not over.wait(UP_S):
        server.kill()
        over.wait(DOWN_S)
        server.recover()


PHASES: dict[str, Callable[[_RestartableServer, threading.Event], None]] = {
    "healthy": _healthy,
    "slow": _slow,
    "dead": _dead,
    "restarting": _restarting,
}


# ---- the loop


def _loop(address: str, spool: str, num_steps: str, rate_hz: str) -> None:
    """Append at each tick; then, when the parent says so, wait until all is delivered."""
    spent_ns = np.zeros(int(num_steps), np.int64)
    late_s = np.zeros(int(num_steps))
    period_s = 1 / float(rate_hz)
    frames = _frames()
    with connect(address) as remote, remote.writer("loop", robot_spec(), spool=spool) as writer:
        report({"address": address})
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
        report(
            {"p50_ms": p50, "p99_ms": p99, "p999_ms": p999, "max_ms": float(spent_ns.max()) / 1e6, "num_late": num_late}
        )
        sys.stdin.readline()
        begun = time.perf_counter()
        if not writer.wait_delivered(TIMEOUT_S):
            raise UnderstudyError(f"control-loop: not delivered after {TIMEOUT_S:.0f} s: {writer.delivery}")
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        report({"catch_up_s": time.perf_counter() - begun, "client_peak_bytes": peak})


def _frames() -> Array:
    return np.random.default_rng(0).integers(0, 256, (NUM_FRAMES, 128, 128, 3), np.uint8)


def _observe(number: int, frames: Array) -> dict[str, Array]:
    """The observation at a step, which differs from all others."""
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

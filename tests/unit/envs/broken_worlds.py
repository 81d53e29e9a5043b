"""Worlds that go wrong on purpose, each in one way, for the tests of workers."""

from __future__ import annotations

import os
import re
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from understudy.core import ArraySpec, Spec, StepSpec, Tree
from understudy.core.spec import text
from understudy.envs.suite import Suite, Task
from understudy.envs.world import World
from understudy.envs.world_factory import WorldFactory

ROOT = Path(__file__).resolve().parents[3]
EPISODE_STEPS = 20


def source(factory: str = "Broken", **options: Any) -> WorldFactory:
    return WorldFactory(
        factory=f"tests.unit.envs.broken_worlds:{factory}", options=options, env={"PYTHONPATH": str(ROOT)}
    )


def action(value: float) -> np.ndarray[Any, Any]:
    return np.full(2, value, np.float32)


def break_down(how: str, faults: Iterable[str]) -> np.ndarray[Any, Any]:
    """The action on which a Broken with these faults shows the one."""
    known = list(faults)
    return np.array([0.0, -(known.index(how) + 0.5) / len(known)], np.float32)


class Numbers(World):
    """A good one: counts, draws and remembers; an action of 1 succeeds."""

    simulated = True

    step_spec = StepSpec(
        observation=Spec(
            {
                "state": ArraySpec(shape=(4,), dtype="float64"),
                "camera": {"front": ArraySpec(shape=(8, 8, 3), dtype="uint8")},
                "touch": ArraySpec(shape=(), dtype="bool"),
                "prompt": text(),
                "points": ArraySpec(shape=(None, 2), dtype="float32"),
            }
        ),
        action=Spec(ArraySpec(shape=(2,), dtype="float32", low=-1.0, high=1.0)),
    )
    suite = Suite(
        name="numbers",
        tasks=(
            Task(name="count", instruction="count on", num_starts=10, max_steps=EPISODE_STEPS),
            Task(name="draw", instruction="draw \N{CAT FACE}", num_starts=10, max_steps=EPISODE_STEPS),
        ),
    )

    num_observed = 0

    def begin(self, task: Task, start: int, rng: np.random.Generator) -> None:
        self.rng = rng
        self.state = np.array([start, 0.0, 0.0, self.suite.tasks.index(task)])
        self.closed = False

    def advance(self, action: Tree) -> tuple[float, bool, bool, dict[str, Any]]:
        self.state[1:3] += action + self.rng.normal(size=2)
        success = bool(action[0] == 1.0)
        info = {"success": success, "state": self.state, "looks": np.int64(self.num_observed), "pid": os.getpid()}
        return float(self.state[1]), success, False, info

    def observe(self) -> Tree:
        self.num_observed += 1
        seen = np.abs(self.state).sum()
        return {
            "state": self.state.copy(),
            "camera": {"front": np.full((8, 8, 3), int(seen * 7) % 256, np.uint8)},
            "touch": np.asarray(seen > 3),
            "prompt": f"seen {seen} \N{CAT FACE}\n",
            "points": np.full((int(seen) % 5, 2), seen, np.float32),
        }

    def close(self) -> None:
        print("closed itself", flush=True)


class Broken(Numbers):
    """Does as told by `at_start`, `at_reset` and so on; `at_step` in the step with the number `step` and after.

    It may name several faults, of which the action chooses; see `break_down` above.
    """

    def __init__(self, at_start="", at_reset="", at_step="", at_observe="", at_close="", step=1, file="", **options):
        self.at_reset, self.at_step, self.at_observe, self.at_close = at_reset, at_step, at_observe, at_close
        self.bad_step, self.file, self.options = step, file, options
        self.count = 0
        self.leak: list[Any] = []
        self.break_down(at_start)

    def begin(self, task: Task, start: int, rng: np.random.Generator) -> None:
        super().begin(task, start, rng)
        self.count = 0
        self.break_down(self.at_reset)

    def advance(self, action: Tree) -> tuple[float, bool, bool, dict[str, Any]]:
        self.count += 1
        reward, terminated, truncated, info = super().advance(action)
        if self.count >= self.bad_step or action[1] < 0:
            faults = self.at_step.split(",")
            fault = faults[int(max(0.0, -action[1]) * len(faults))]
            self.break_down(fault)
            if fault == "nan":
                reward = float("nan")
            if fault == "object":
                info["object"] = object()
            if fault == "list":
                return [reward]  # type: ignore[return-value]
        return reward, terminated, truncated, info

    def observe(self) -> Tree:
        seen = super().observe()
        if self.at_observe == "shape":
            seen["state"] = seen["state"][:3]
        if self.at_observe == "dtype":
            seen["state"] = seen["state"].astype(np.float32)
        if self.at_observe == "missing":
            del seen["touch"]
        return seen

    def close(self) -> None:
        self.break_down(self.at_close)
        super().close()

    def break_down(self, how: str) -> None:
        if how:
            print(f"about to: {how}", flush=True)
        if how == "raise":
            raise RuntimeError("no such joint")
        if how == "sleep":
            time.sleep(10_000)
        if how == "busy":
            re.match(r"(a+)+$", "a" * 64 + "b")  # for ever, and with the interpreter's lock held
        if how == "exit":
            os._exit(7)
        if how == "sys_exit":
            sys.exit(3)
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "segfault":
            os.kill(os.getpid(), signal.SIGSEGV)
        if how == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if how == "leak":
            self.leak.append(np.ones(self.options["leak_bytes"], np.uint8))
        if how == "leak_and_sleep":
            self.leak.append(np.ones(self.options["leak_bytes"], np.uint8))
            time.sleep(10_000)
        if how == "slow":
            time.sleep(self.options["slow_s"])
        if how == "print":
            for _ in range(200):
                sys.stdout.write("x" * 50_000)
            print("\nlast words", flush=True)
        if how == "ignore_sigterm":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if how in ("garbage", "text", "lie", "number"):
            self.write_to_channel(
                {
                    "garbage": os.urandom(2000) + b"\n",
                    "text": b"Hello, I am a simulator!\n",
                    "number": b"7\n",
                    "lie": b'{"id": 1000000, "ragged": {}}\n',
                }[how]
            )
        if how == "close_channel":
            os.close(channel_descriptor())
            time.sleep(10_000)
        if how in ("grandchild", "grandchild_and_exit"):
            grandchild = subprocess.Popen(["sleep", "10000"])
            with Path(self.file).open("a") as file:
                print(grandchild.pid, file=file)
            if how == "grandchild_and_exit":
                os._exit(0)
        if how == "fork_and_exit":
            if os.fork() == 0:
                time.sleep(10_000)  # keeps the channel open
            os._exit(5)

    def write_to_channel(self, data: bytes) -> None:
        os.write(channel_descriptor(), data)


def channel_descriptor() -> int:
    """The descriptor that no world should know."""
    for entry in list(Path("/proc/self/fd").iterdir()):
        descriptor = int(entry.name)
        try:
            if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                with socket.socket(fileno=os.dup(descriptor)) as sock:
                    if sock.family == socket.AF_UNIX:
                        return descriptor
        except OSError:
            continue
    raise AssertionError

"""For workers.py: a world that breaks down when its action says so, and a bare process that steps any world.

python benchmarks/workers_world.py FACTORY OPTIONS BLOCK_STEPS SECONDS   # for each line: steps, prints its figures
"""

from __future__ import annotations

import json
import os
import re
import signal
import stat
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from understudy.core import ArraySpec, Spec, StepSpec, Tree
from understudy.core.examples import random_tree
from understudy.envs.suite import Suite, Task
from understudy.envs.world import World
from understudy.envs.world_factory import build

FAULTS = ("none", "raise", "hang", "busy", "exit", "kill", "segfault", "garbage", "nonsense", "leak", "wait")
LEAK_BYTES = 120 * 2**20
MAX_STEPS = 200


class Faulty(World):
    """Sees the token it was last given, and does the fault it is told to."""

    step_spec = StepSpec(
        observation=Spec(
            {
                "token": ArraySpec(shape=(), dtype="int64"),
                "frame": ArraySpec(shape=(64, 64, 3), dtype="uint8"),
            }
        ),
        action=Spec(
            {
                "token": ArraySpec(shape=(), dtype="int64"),
                "fault": ArraySpec(shape=(), dtype="int64", low=0, high=len(FAULTS) - 1),
            }
        ),
    )
    suite = Suite(name="faulty", tasks=(Task(name="go", instruction="go on", num_starts=10, max_steps=MAX_STEPS),))

    def begin(self, task: Task, start: int, rng: np.random.Generator) -> None:
        self.token = start

    def advance(self, action: Tree) -> tuple[float, bool, bool, dict[str, Any]]:
        self.token = int(action["token"])
        time.sleep(0.002)
        fault = FAULTS[int(action["fault"])]
        if fault != "none":
            print("about to", fault, flush=True)
            _break_down(fault)
        reward = float("nan") if fault == "nonsense" else self.token % 1000
        return reward, False, False, {"success": False}

    def observe(self) -> Tree:
        return {"token": np.asarray(self.token), "frame": np.full((64, 64, 3), self.token % 256, np.uint8)}

    def close(self) -> None:
        pass


class Numbers(World):
    """Stands for a simulator without images: about a millisecond of arithmetic, and 20 numbers of state."""

    step_spec = StepSpec(
        observation=Spec({"state": ArraySpec(shape=(20,), dtype="float64")}),
        action=Spec(ArraySpec(shape=(7,), dtype="float32", low=-1.0, high=1.0)),
    )
    suite = Suite(name="numbers", tasks=(Task(name="go", instruction="go on", num_starts=10, max_steps=MAX_STEPS),))

    def begin(self, task: Task, start: int, rng: np.random.Generator) -> None:
        self.matrix = rng.normal(size=(20, 20)) / 10
        self.state = rng.normal(size=20)

    def advance(self, action: Tree) -> tuple[float, bool, bool, dict[str, Any]]:
        for _ in range(250):
            self.state = np.tanh(self.matrix @ self.state + action[0])
        return 0.0, False, False, {"success": False}

    def observe(self) -> Tree:
        return {"state": self.state.copy()}

    def close(self) -> None:
        pass


def _break_down(fault: str) -> None:
    if fault == "raise":
        raise RuntimeError("no such joint")
    if fault == "busy":
        re.match(r"(a+)+$", "a" * 64 + "b")  # for ever, with the interpreter's lock held
    if fault == "exit":
        os._exit(7)
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
    if fault == "garbage":
        for entry in list(Path("/proc/self/fd").iterdir()):
            _write_garbage(int(entry.name))
    if fault == "leak":
        kept = np.ones(LEAK_BYTES, np.uint8)
        time.sleep(len(kept))
    if fault in ("hang", "wait"):
        time.sleep(10_000)


def _write_garbage(descriptor: int) -> None:
    try:
        if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            os.write(descriptor, os.urandom(1000) + b"\n")
    except OSError:
        pass  # one that listing them had opened


def main(factory: str, options: str, block_steps: str, seconds: str) -> None:
    """Step a world in this process, as fast as it goes."""
    world = build(factory, json.loads(options))
    actions = random_actions(world.step_spec)
    world.reset(seed=0)
    print("ready", flush=True)
    while sys.stdin.readline():
        print(json.dumps(stepping(world, actions, int(block_steps), float(seconds))), flush=True)


def random_actions(spec: StepSpec) -> list[Tree]:
    rng = np.random.default_rng(0)
    return [random_tree(spec.action, rng) for _ in range(64)]


def stepping(
    world: World, actions: list[Tree], block_steps: int, seconds: float, clock: Callable[[], float] = time.monotonic
) -> dict[str, float]:
    """Do blocks of actions and look after each, with a reset after each end."""
    began, cpu = clock(), time.process_time()
    num_steps = num_blocks = 0
    while not num_steps or clock() < began + seconds:
        first = num_blocks * block_steps
        num_blocks += 1
        for index in range(first, first + block_steps):
            _, terminated, truncated, _ = world.step_without_observation(actions[index % len(actions)])
            num_steps += 1
            if terminated or truncated:
                break
        world.observe()
        if terminated or truncated:
            world.reset(seed=num_blocks)
    return {"steps_per_s": num_steps / (clock() - began), "cpu_s": (time.process_time() - cpu) / num_steps}


if __name__ == "__main__":
    main(*sys.argv[1:])

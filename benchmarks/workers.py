"""Workers under fire, and what they cost.

    python benchmarks/workers.py faults                        # 8 workers for 5 minutes, one broken every moment
    python benchmarks/workers.py throughput                    # against bare processes, in turns

`faults` breaks one of the workers at random about every moment: its world raises, hangs (asleep, or with the
interpreter's lock held), exits, is killed from inside and from outside, crashes, writes garbage to the channel, gives a
reward that is no number, or takes too much memory. Every command must end in the outcome that was promised, every
observation must be the one asked for, no slot may be lost, and memory and open files of the caller must stay flat.

`throughput` steps worlds through a Vector and bare in as many processes, in turns, with and without images, one action
and several in a round trip. Both write their figures to `benchmarks/workers_*.json` below `--out`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent))
from workers_world import FAULTS, random_actions

from understudy.core import Tree
from understudy.envs.workers.outcomes import (
    Command,
    Observed,
    Outcome,
    Reset,
    Stepped,
    Steps,
    WorkerDied,
    WorkerFailure,
    WorkerGarbage,
    WorkerHung,
    WorkerRaised,
    WorkerTooLarge,
)
from understudy.envs.workers.restarting_worker import Limits
from understudy.envs.workers.vector import Vector
from understudy.envs.world_factory import WorldFactory

HERE = str(Path(__file__).resolve().parent)
MAX_GROWTH_BYTES = 8 * 2**20  # of the caller, from the second fifth of the run to the last
WANTED_RATIO = 0.85
AFTERWARDS_S = 60.0  # for every slot to step once more when the faults are over

PROMISED: dict[str, type[WorkerFailure]] = {
    "raise": WorkerRaised,
    "hang": WorkerHung,
    "busy": WorkerHung,
    "exit": WorkerDied,
    "kill": WorkerDied,
    "segfault": WorkerDied,
    "garbage": WorkerGarbage,
    "nonsense": WorkerGarbage,
    "leak": WorkerTooLarge,
    "wait": WorkerDied,
}


def faults(
    *, seconds: float = 300.0, workers: int = 8, every_s: float = 0.7, seed: int = 0, out: Path | None = Path("docs")
) -> int:
    """Break workers at random; the exit code is 1 if a promise is not kept.

    Args:
        seconds: How long.
        workers: How many slots.
        every_s: Mean time between two faults.
        seed: Of the faults.
        out: Where to put the figures; None: nowhere.
    """
    console = Console()
    summary = FaultRun(seconds=seconds, num_workers=workers, every_s=every_s, seed=seed).run()
    holds = not summary["problems"]
    for problem in summary["problems"][:5]:
        console.print(problem, style="red")
    console.print(
        f"{summary['num_faults']} faults in {seconds:g} s on {workers} workers: {summary['faults']}; "
        f"{summary['num_steps']:,} steps answered, per slot {summary['slot_steps']}; caller's memory "
        f"{summary['rss_bytes'][0] / 2**20:.1f} to {summary['rss_bytes'][1] / 2**20:.1f} MiB "
        f"(first and last fifth), files {summary['files']}; back within {summary['back_s_p50']:.2f} s (median) and "
        f"{summary['back_s_max']:.2f} s (longest)",
        style="green" if holds else "red",
        highlight=False,
    )
    _save(out, "workers_faults", summary)
    return 0 if holds else 1


class FaultRun:
    """A vector, what each slot was told, and what must come of it."""

    def __init__(self, *, seconds: float, num_workers: int, every_s: float, seed: int):
        self.seconds, self.every_s = seconds, every_s
        self.rng = np.random.default_rng(seed)
        self.slots = range(num_workers)
        self.fault: dict[int, str] = {}  # of the command on its way, by slot
        self.token = dict.fromkeys(self.slots, 0)
        self.failed_at: dict[int, float] = {}
        self.back_s: list[float] = []
        self.slot_steps = [0] * num_workers
        self.counts: Counter[str] = Counter()
        self.problems: list[str] = []

    def run(self) -> dict[str, Any]:
        limits = Limits(step_s=2.0, stack_s=5.0, max_rss_bytes=120 * 2**20)
        sources = [WorldFactory(factory="workers_world:Faulty", env={"PYTHONPATH": HERE})] * len(self.slots)
        sizes: list[int] = []
        files: list[int] = []
        with Vector(sources, limits=limits) as vector:
            vector.start()
            for slot in self.slots:
                vector.send(slot, Reset(seed=slot))
            began = time.monotonic()
            next_fault_at = next_sample_at = began
            finished: set[int] = set()  # slots that have stepped after the last fault
            while len(finished) < len(self.slots):
                now = time.monotonic()
                running = now < began + self.seconds
                for slot, outcome in vector.ready(timeout_s=0.2):
                    command = self._judge(slot, outcome)
                    if not running and isinstance(outcome, Stepped):
                        finished.add(slot)
                        continue
                    if running and now >= next_fault_at and isinstance(command, Steps):
                        next_fault_at = now + self.rng.exponential(self.every_s)
                        command = self._break(slot)
                    vector.send(slot, command)
                    if self.fault.get(slot) == "wait":  # killed from outside, while it works
                        os.kill(vector.workers[slot].pid or 0, signal.SIGKILL)
                if running and now >= next_sample_at:
                    next_sample_at = now + 0.5
                    sizes.append(_rss_bytes())
                    files.append(sum(1 for _ in Path("/proc/self/fd").iterdir()))
                if now > began + self.seconds + AFTERWARDS_S:
                    self.problems.append(
                        f"slots {sorted(set(self.slots) - finished)}: lost, no step in {AFTERWARDS_S} s"
                    )
                    break
        return self._summary(sizes, files)

    def _steps(self, slot: int, fault: str) -> Steps:
        actions = []
        for _ in range(int(self.rng.integers(1, 5))):
            self.token[slot] += 1
            actions.append({"token": np.asarray(self.token[slot]), "fault": np.asarray(0)})
        actions[0]["fault"] = np.asarray(FAULTS.index(fault))  # the first, since the step limit may cut a block
        return Steps(actions=actions)

    def _break(self, slot: int) -> Steps:
        fault = str(self.rng.choice(FAULTS[1:]))
        self.fault[slot] = fault
        self.counts[fault] += 1
        return self._steps(slot, fault)

    def _judge(self, slot: int, outcome: Outcome) -> Command:
        """Compare an outcome with what was promised; gives back what to do next."""
        fault = self.fault.pop(slot, None)
        if isinstance(outcome, WorkerFailure):
            if fault is None or type(outcome) is not PROMISED[fault]:
                self.problems.append(f"slot {slot}: expected the outcome of {fault}, got {outcome!r}")
            self.failed_at[slot] = time.monotonic()
            return Reset(seed=slot)
        if fault is not None:
            self.problems.append(f"slot {slot}: expected the outcome of {fault}, got {type(outcome).__name__}")
        if slot in self.failed_at:
            self.back_s.append(time.monotonic() - self.failed_at.pop(slot))
        if isinstance(outcome, Observed):
            self.token[slot] = int(outcome.observation["token"])
            return self._steps(slot, "none")
        self.slot_steps[slot] += len(outcome)
        seen = outcome.observation
        token = self.token[slot] if not outcome.last else int(seen["token"])  # the step limit cuts a block short
        if int(seen["token"]) != token or (seen["frame"] != token % 256).any():
            self.problems.append(f"slot {slot}: expected token {token}, got {seen['token']}")
        return Reset(seed=slot) if outcome.last else self._steps(slot, "none")

    def _summary(self, sizes: list[int], files: list[int]) -> dict[str, Any]:
        fifth = max(1, len(sizes) // 5)
        first, last = (float(np.median(part)) for part in (sizes[fifth : 2 * fifth] or sizes, sizes[-fifth:]))
        if last > first + MAX_GROWTH_BYTES:
            self.problems.append(f"memory: expected it flat, got {first / 2**20:.1f} and then {last / 2**20:.1f} MiB")
        if max(files[-fifth:]) > max(files[: 2 * fifth]) + 4:  # a slot that is down has some fewer
            self.problems.append(f"files: expected them flat, got {files[0]} and then {files[-1]}")
        return {
            "seconds": self.seconds,
            "workers": len(self.slots),
            "num_faults": sum(self.counts.values()),
            "faults": dict(sorted(self.counts.items())),
            "num_steps": sum(self.slot_steps),
            "slot_steps": self.slot_steps,
            "rss_bytes": [first, last],
            "files": [min(files), max(files)],
            "back_s_p50": float(np.median(self.back_s or [0])),
            "back_s_max": max(self.back_s, default=0.0),
            "problems": self.problems,
        }


def throughput(
    *,
    workers: int = 4,
    seconds: float = 0.5,
    rounds: int = 12,
    blocks: tuple[int, ...] = (1, 8, 64),
    size: int = 64,
    out: Path | None = Path("docs"),
) -> int:
    """Compare steps per second through workers and bare; the exit code is 1 if a ratio is below 0.85.

    Args:
        workers: Processes on each side.
        seconds: Of each turn.
        rounds: Turns of each side.
        blocks: Actions per round trip, one after the other.
        size: Of the images, in pixels.
        out: Where to put the figures; None: nowhere.
    """
    toy = "understudy.envs.toy:ToyTable"
    cases = {
        "toy table with images": WorldFactory(factory=toy, options={"size": size}),
        "1 ms of arithmetic": WorldFactory(factory="workers_world:Numbers", env={"PYTHONPATH": HERE}),
        "toy table without": WorldFactory(factory=toy, options={"cameras": False}),
    }
    rows: list[dict[str, Any]] = [
        {
            "world": name,
            "block_steps": block_steps,
            **compare(source, num_workers=workers, block_steps=block_steps, seconds=seconds, rounds=rounds),
        }
        for name, source in cases.items()
        for block_steps in blocks
    ]
    table = Table("world", "block", "bare steps/s", "steps/s", "ratio", "bare CPU", "worker's", "caller's", "CPU ratio")
    for row in rows:
        table.add_row(
            row["world"],
            str(row["block_steps"]),
            f"{row['bare_steps_per_s']:,.0f}",
            f"{row['steps_per_s']:,.0f}",
            f"{row['ratio']:.2f}",
            *(f"{row[name] * 1e6:,.0f} µs" for name in ("bare_cpu_s", "worker_cpu_s", "caller_cpu_s")),
            f"{row['cpu_ratio']:.2f}",
        )
    Console(width=130).print(table)
    _save(out, "workers_throughput", {"workers": workers, "size": size, "rows": rows})
    # A step of some microseconds is no simulator: that world shows what a round trip costs, and is not judged.
    return 0 if all(row["ratio"] >= WANTED_RATIO for row in rows if row["bare_cpu_s"] > 2e-4) else 1


def compare(
    source: WorldFactory, *, num_workers: int, block_steps: int, seconds: float, rounds: int
) -> dict[str, float]:
    """Medians over turns that alternate, so that what else the machine does hits both sides."""
    bare: list[dict[str, float]] = []
    through: list[dict[str, float]] = []
    with Vector([source] * num_workers) as vector, BareProcesses(source, num_workers, block_steps, seconds) as others:
        vector.start()
        actions = random_actions(vector.workers[0].step_spec)
        for _ in range(rounds):
            bare.append(others.turn())
            through.append(_through(vector, actions, block_steps, seconds))
    ratios = [b["steps_per_s"] / a["steps_per_s"] for a, b in zip(bare, through, strict=True)]

    def median(rows: list[dict[str, float]], name: str) -> float:
        return float(np.median([row[name] for row in rows]))

    cpu_ratios = [a["cpu_s"] / (b["worker_cpu_s"] + b["caller_cpu_s"]) for a, b in zip(bare, through, strict=True)]
    return {
        "bare_steps_per_s": median(bare, "steps_per_s"),
        "steps_per_s": median(through, "steps_per_s"),
        "ratio": float(np.median(ratios)),
        "bare_cpu_s": median(bare, "cpu_s"),
        "worker_cpu_s": median(through, "worker_cpu_s"),
        "caller_cpu_s": median(through, "caller_cpu_s"),
        "cpu_ratio": float(np.median(cpu_ratios)),
    }


class BareProcesses:
    """The same worlds, each stepping in a process of its own, with no one to talk to."""

    def __init__(self, source: WorldFactory, num_workers: int, block_steps: int, seconds: float):
        options = json.dumps(dict(source.options))
        command = [sys.executable, f"{HERE}/workers_world.py", source.factory, options, str(block_steps), str(seconds)]
        variables = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        self._processes = [
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=variables)
            for _ in range(num_workers)
        ]
        for process in self._processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"

    def turn(self) -> dict[str, float]:
        """Let all of them step for some time."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        told = [json.loads(process.stdout.readline()) for process in self._processes if process.stdout is not None]
        cpu_s = float(np.mean([one["cpu_s"] for one in told]))
        return {"steps_per_s": sum(one["steps_per_s"] for one in told), "cpu_s": cpu_s}

    def __enter__(self) -> BareProcesses:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.communicate()


def _through(vector: Vector, actions: list[Tree], block_steps: int, seconds: float) -> dict[str, float]:
    """Step all slots for some time, each by itself."""
    num_steps = 0
    place = dict.fromkeys(range(len(vector)), 0)
    for slot in range(len(vector)):
        vector.send(slot, Reset(seed=0))
    caller, workers = time.process_time(), _cpu_s(vector)
    began = time.monotonic()
    while not num_steps or time.monotonic() < began + seconds:
        for slot, outcome in vector.ready(timeout_s=1.0):
            if isinstance(outcome, WorkerFailure):
                raise outcome
            if isinstance(outcome, Stepped):
                num_steps += len(outcome)
            if isinstance(outcome, Stepped) and outcome.last:
                vector.send(slot, Reset(seed=place[slot]))
                continue
            first = place[slot]
            place[slot] = (first + block_steps) % len(actions)
            block = [actions[index % len(actions)] for index in range(first, first + block_steps)]
            vector.send(slot, Steps(actions=block))
    took = time.monotonic() - began
    figures = {
        "steps_per_s": num_steps / took,
        "worker_cpu_s": (_cpu_s(vector) - workers) / num_steps,
        "caller_cpu_s": (time.process_time() - caller) / num_steps,
    }
    while vector.num_pending:
        vector.ready(timeout_s=1.0)
    return figures


def _cpu_s(vector: Vector) -> float:
    return sum(int(Path(f"/proc/{worker.pid}/schedstat").read_text().split()[0]) for worker in vector.workers) / 1e9


def _rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _save(out: Path | None, name: str, figures: dict[str, Any]) -> None:
    if out is not None:
        path = out / "benchmarks" / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(tyro.extras.subcommand_cli_from_dict({"faults": faults, "throughput": throughput}))

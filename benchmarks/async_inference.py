"""Asynchronous acting in real time: whether a control loop keeps its rate, and how rough it moves where blocks meet.

    python -m benchmarks.async_inference                                # 5 minutes at 30 Hz, inference takes 100 ms
    python -m benchmarks.async_inference --minutes 0.2 --updates 500 --out /tmp/results

A flow policy is trained on demonstrations of a slalom (worlds/slalom.py), which pass each post on either side; with
`--policy FILE` it is kept there, or taken from there. Each of its calls is stretched to `--inference-ms` by sleeping,
as a policy on a GPU or another machine takes its time without using this CPU. Real-time chunking runs in real time for
as long as `--minutes` says, with the delays that come about. The others run as many steps in simulated time, with the
mean of those delays, rounded up: `instant` acts without any delay, `switch` changes over to the next block without heed
to the current one, and `blend` averages the two. `--fifo` runs the real-time part at a real-time priority, for which
the process must be root, so that other programs on the machine do not make steps late.

A jump is the largest change of a number of the action (1 is full speed) from one step to the next. Writes
`benchmarks/async_inference.json` and `images/async_inference.svg` below `--out`.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro
from benchmarks.worlds.slalom import INSTRUCTION, Slalom, demonstrations
from matplotlib import pyplot as plt
from rich.console import Console

from understudy.algorithms.sft import SFT, Blocks, SFTUpdateConfig
from understudy.dashboard.report.plots import STYLE
from understudy.envs.pace import Pace, PaceReport
from understudy.policies import Acted, Sampling
from understudy.policies.flow import FlowConfig, FlowPolicy
from understudy.policies.rtc import AsyncBlocks, AsyncReport, RTCConfig

Array = np.ndarray[Any, Any]

BLOCK_STEPS, N_ACTION_STEPS = 24, 12
NUM_DEMONSTRATIONS, BATCH_SIZE = 60, 256
COLOURS = {"instant": "#777777", "switch": "#c8553d", "blend": "#d8a03d", "rtc": "#2a6f97"}
LABELS = {
    "instant": "no delay",
    "switch": "delay, switch",
    "blend": "delay, blend",
    "rtc": "delay, real-time chunking",
}
SHOWN_STEPS = 240


class Slowed:
    """A policy each of whose calls takes as long as wanted."""

    def __init__(self, policy: Any, inference_s: float):
        self._policy, self._inference_s = policy, inference_s

    def act(self, *args: Any, **options: Any) -> Acted:
        until = time.monotonic() + self._inference_s
        acted: Acted = self._policy.act(*args, **options)
        time.sleep(max(0.0, until - time.monotonic()))
        return acted

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)


@dataclass(frozen=True, kw_only=True)
class Motion:
    """What was executed, over many episodes."""

    episodes: list[Array]  # actions [T, 2] of each
    ways: list[Array]  # positions [T, 2] of each
    seams: list[list[int]]  # the steps of each at which a new block took over
    num_successes: int
    blocks: AsyncReport
    pace: PaceReport | None

    def jumps(self, *, at_seams: bool) -> Array:
        """Largest change of an action, at the steps where a block took over, or at all others."""
        found: list[float] = []
        for actions, seams in zip(self.episodes, self.seams, strict=True):
            change = np.abs(np.diff(actions, axis=0)).max(axis=1)
            is_seam = np.isin(np.arange(1, len(actions)), seams)
            found += change[is_seam == at_seams].tolist()
        return np.array(found)

    def numbers(self) -> dict[str, Any]:
        seam, other = self.jumps(at_seams=True), self.jumps(at_seams=False)
        return {
            "steps": sum(len(actions) for actions in self.episodes),
            "episodes": len(self.episodes),
            "successes": self.num_successes,
            "seams": len(seam),
            "seam_jump_mean": round(float(seam.mean()), 4),
            "seam_jump_p95": round(float(np.percentile(seam, 95)), 4),
            "other_jump_mean": round(float(other.mean()), 4),
            "mean_delay_steps": round(self.blocks.mean_delay, 2),
            "max_delay_steps": self.blocks.max_delay,
            "waits": self.blocks.num_waits,
            **({} if self.pace is None else {"late_steps": self.pace.num_missed, "rate_hz": round(self.pace.rate, 3)}),
            **({} if self.pace is None else {"late_max_ms": round(1e3 * self.pace.late_max_s, 2)}),
        }


def train(updates: int, *, seed: int) -> FlowPolicy:
    """A policy that imitates the demonstrations."""
    states, blocks = demonstrations(NUM_DEMONSTRATIONS, BLOCK_STEPS, seed=seed)
    policy = FlowPolicy.new(FlowConfig(block_steps=BLOCK_STEPS), Slalom.step_spec, [INSTRUCTION], seed=seed)
    sft = SFT(SFTUpdateConfig(), policy, total_updates=updates, seed=seed)
    rng = np.random.default_rng(seed)
    weight = np.ones((BATCH_SIZE, BLOCK_STEPS), np.float32)
    for _ in range(updates):
        rows = rng.integers(len(states), size=BATCH_SIZE)
        said = (INSTRUCTION,) * BATCH_SIZE
        sft.update(
            Blocks(observation={"state": states[rows]}, instruction=said, action=blocks[rows], weight=weight),
            report=False,
        )
    return policy


def run(world: Slalom, policy: Any, config: RTCConfig, *, num_steps: int, hz: float | None, seed: int) -> Motion:
    """Act until there are as many steps; with `hz` in real time."""
    pace = None if hz is None else Pace(hz)
    episodes, ways, seams, num_successes, done = [], [], [], 0, 0
    starts = world.suite.starts(world.task, "eval")
    with AsyncBlocks(policy, config, sampling=Sampling(), seed=seed) as blocks:
        while done < num_steps:
            start = starts[len(episodes) % len(starts)]
            observation, info = world.reset(seed=seed, options={"task": world.task.name, "start": start})
            blocks.begin(info)
            actions: list[Any] = []
            way: list[Any] = []
            ended, outcome = False, {}
            while not ended:
                action, _ = blocks(observation)
                if pace is not None:
                    pace.wait() if actions else pace.begin()
                observation, _, terminated, truncated, outcome = world.step(action)
                actions.append(action)
                way.append(world.at)
                ended = terminated or truncated
            episodes.append(np.stack(actions))
            ways.append(np.stack(way))
            seams.append(list(blocks.seams))
            num_successes += bool(outcome["success"])
            done += len(actions)
        report = blocks.report
    return Motion(
        episodes=episodes,
        ways=ways,
        seams=seams,
        num_successes=num_successes,
        blocks=report,
        pace=None if pace is None else pace.report,
    )


def compare(
    policy: FlowPolicy, *, minutes: float, hz: float, inference_ms: float, fifo: bool, seed: int
) -> dict[str, Motion]:
    """Real-time chunking in real time, and the others in as many steps."""
    world = Slalom()
    config = RTCConfig(n_action_steps=N_ACTION_STEPS)
    num_steps = round(60 * minutes * hz)
    if fifo:  # as control loops are run on robots; the thread of the policy inherits it
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    chunked = run(world, Slowed(policy, inference_ms / 1e3), config, num_steps=num_steps, hz=hz, seed=seed)
    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    delay = min(math.ceil(chunked.blocks.mean_delay), N_ACTION_STEPS)
    others = {
        "instant": replace(config, method="switch", inference_delay=0),
        "switch": replace(config, method="switch", inference_delay=delay),
        "blend": replace(config, method="blend", inference_delay=delay),
    }
    simulated = {
        name: run(world, policy, other, num_steps=num_steps, hz=None, seed=seed) for name, other in others.items()
    }
    return {**simulated, "rtc": chunked}


def draw(motions: Mapping[str, Motion], hz: float, path: Path) -> None:
    """The actions of one episode of each, and how large the jumps are where blocks meet."""
    with plt.rc_context(STYLE):
        figure, (left, right) = plt.subplots(1, 2, figsize=(8.4, 3.2), width_ratios=(3, 2))
        for offset, (name, motion) in enumerate(reversed(list(motions.items()))):
            index = max(range(len(motion.episodes)), key=lambda at: min(len(motion.episodes[at]), SHOWN_STEPS))
            sideways = motion.episodes[index][:SHOWN_STEPS, 1] + 2.5 * offset
            times = np.arange(len(sideways)) / hz
            left.plot(times, sideways, color=COLOURS[name], linewidth=1.0)
            met = [step for step in motion.seams[index] if step < len(sideways)]
            left.plot(times[met], sideways[met], "o", color=COLOURS[name], markersize=2.5)
        left.set(xlabel="seconds", ylabel="action sideways; dots: a new block", yticks=[])
        for name, motion in motions.items():
            jumps = np.sort(motion.jumps(at_seams=True))
            share = np.arange(1, len(jumps) + 1) / len(jumps)
            right.plot(jumps, 100 * share, color=COLOURS[name], label=f"{LABELS[name]}: mean {jumps.mean():.3f}")
        right.set(xlabel="jump of the action where blocks meet", ylabel="% of seams up to this")
        right.legend(loc="lower right")
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Date": None})
        plt.close(figure)


def main(
    *,
    minutes: float = 5.0,
    hz: float = 30.0,
    inference_ms: float = 100.0,
    updates: int = 3000,
    seed: int = 0,
    policy: Path | None = None,
    fifo: bool = False,
    out: Path = Path("docs"),
) -> int:
    """Measure, print and draw; the exit code is 1 if a step was late or the seams are rougher than without delay."""
    torch.set_num_threads(1)
    if policy is not None and policy.exists():
        trained = FlowPolicy.load(policy, Slalom.step_spec)
    else:
        trained = train(updates, seed=seed)
        if policy is not None:
            trained.save(policy)
    motions = compare(trained, minutes=minutes, hz=hz, inference_ms=inference_ms, fifo=fifo, seed=seed)
    numbers = {name: motion.numbers() for name, motion in motions.items()}
    console = Console(highlight=False)
    for name, found in numbers.items():
        console.print(f"{name}: {json.dumps(found)}", soft_wrap=True)
    console.print(f"{motions['rtc'].pace}\n{motions['rtc'].blocks}", soft_wrap=True)
    conditions = {"minutes": minutes, "hz": hz, "inference_ms": inference_ms, "updates": updates, "seed": seed}
    written = out / "benchmarks" / "async_inference.json"
    written.parent.mkdir(parents=True, exist_ok=True)
    written.write_text(json.dumps({**conditions, **numbers}, indent=1) + "\n")
    draw(motions, hz, out / "images" / "async_inference.svg")
    is_smooth = numbers["rtc"]["seam_jump_mean"] <= numbers["instant"]["seam_jump_mean"]
    return 0 if is_smooth and numbers["rtc"]["late_steps"] == 0 else 1


if __name__ == "__main__":
    raise SystemExit(tyro.cli(main))

"""What Ray costs: the same run of GRPO in plain processes and on a Ray of one node, in turns.

    python benchmarks/cluster.py                       # the toy world, and Metaworld if it is there
    python benchmarks/cluster.py --rounds 5 --workers 2

Steps per second are those of the world while episodes are collected; updates per second those of the learner's part.
Both sides have as many simulators. A round runs one after the other, with the first changing from round to round; a
ratio is the median over rounds of ours on Ray / plain: 1 is no cost. Starting up is not counted, and is printed.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import tyro

from understudy.algorithms.policy_gradient import PolicyGradientConfig
from understudy.envs.known import KNOWN
from understudy.policies.vla import VLAConfig, VLAPolicy
from understudy.training.collection import Collector, FilterConfig, PlanConfig
from understudy.training.metrics import read_metrics
from understudy.training.onpolicy.config import OnPolicyConfig, WorkersConfig
from understudy.training.run import Run
from understudy.training.trials import TrialsConfig

sys.path.insert(0, str(Path(__file__).parent))
from onpolicy import METAWORLD, TOY


@dataclass(frozen=True)
class Speed:
    """Of one run, without its first iteration."""

    steps_per_s: float
    updates_per_s: float
    rest_s: float  # starting, two evaluations, ending


def main(env: tuple[str, ...] = (), rounds: int = 3, iterations: int = 6, workers: int = 2) -> int:
    """Run and compare.

    Args:
        env: Worlds; by default the toy, and Metaworld if it is there.
        rounds: Of both sides.
        iterations: Of a run; the first is not counted.
        workers: Simulators of each side.
    """
    for name in env or (TOY, *([METAWORLD] if KNOWN["metaworld"].ready else [])):
        with tempfile.TemporaryDirectory() as folder:
            compare(Path(folder), name, rounds, iterations, workers)
    return 0


def compare(folder: Path, env: str, rounds: int, iterations: int, workers: int) -> None:
    config = make_config(folder / "start.safetensors", env, iterations, workers)
    places = {
        "plain": [],
        "workers of one simulator": ["--cluster", "here", "--place.rollout.num", str(workers)],
        "one worker": ["--cluster", "here", "--place.rollout.num", "1", "--place.rollout.envs", str(workers)],
    }
    speeds: dict[str, list[Speed]] = {name: [] for name in places}
    for number in range(rounds):
        order = list(places) if number % 2 == 0 else list(places)[::-1]
        for name in order:
            speeds[name].append(measure(folder / f"{name}-{number}".replace(" ", "-"), config, places[name]))
            one = speeds[name][-1]
            print(f"  round {number}, {name}: {one.steps_per_s:.0f} steps/s, {one.updates_per_s:.2f} updates/s, "
                  f"{one.rest_s:.0f} s to start and end", flush=True)  # fmt: skip
    for name in list(places)[1:]:
        pairs = list(zip(speeds[name], speeds["plain"], strict=True))
        steps = statistics.median(one.steps_per_s / plain.steps_per_s for one, plain in pairs)
        updates = statistics.median(one.updates_per_s / plain.updates_per_s for one, plain in pairs)
        print(f"{env.partition('?')[0]}, {name}: steps {steps:.2f}x, updates {updates:.2f}x of plain", flush=True)


def make_config(policy: Path, env: str, iterations: int, workers: int) -> OnPolicyConfig:
    with Collector(env, num_parallel_envs=1) as collector:
        texts = [task.instruction or task.name for task in collector.tasks]
        VLAPolicy.new(VLAConfig(), collector.step_spec, texts, seed=0).save(policy)
    return OnPolicyConfig(
        policy=str(policy), env=env, iterations=iterations, max_steps=50, clip_actions=True,
        plan=PlanConfig(n_samples=4, data_batch_size=32), filters=FilterConfig(filter_accuracy=False),
        algorithm=PolicyGradientConfig(), workers=WorkersConfig(num_parallel_envs=workers),
        evaluation=TrialsConfig(episodes=2, sampling="sampled"), eval_every=1000, checkpoint_every=1000,
    )  # fmt: skip


def measure(path: Path, config: OnPolicyConfig, options: list[str]) -> Speed:
    Run.create(path, "grpo", config)
    began = time.time()
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # as Ray gives to an actor of one CPU
    command = [sys.executable, "-m", "understudy", "resume", str(path), *options]
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
    train = [line for line in read_metrics(path / "metrics.jsonl") if line["kind"] == "train"]
    steps = sum(line["steps_per_s"] * line["collect_s"] for line in train[1:])
    return Speed(
        steps_per_s=steps / sum(line["collect_s"] for line in train[1:]),
        updates_per_s=(train[-1]["update"] - train[0]["update"]) / sum(line["learn_s"] for line in train[1:]),
        rest_s=time.time() - began - sum(line["collect_s"] + line["learn_s"] for line in train),
    )


if __name__ == "__main__":
    sys.exit(tyro.cli(main))

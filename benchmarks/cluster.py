"""What Ray costs: the same run in plain processes and on a Ray of one node, in turns.

    python benchmarks/cluster.py                       # GRPO; the toy world, and Metaworld if it is there
    python benchmarks/cluster.py --rounds 5 --workers 2
    python benchmarks/cluster.py --rlpd                # plain is `understudy serve`, `actor` and `learner`

Steps per second are those of the world while episodes are collected; updates per second those of the learner's part.
Both sides have as many simulators. A round runs one after the other, with the first changing from round to round; a
ratio is the median over rounds of ours on Ray / plain: 1 is no cost. Starting up is not counted, and is printed.
In RLPD actor and learner work at the same time, each at most so far ahead of the other; both speeds are by the clock.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import tyro

from understudy.algorithms.onpolicy.policy_gradient import PolicyGradientConfig
from understudy.cli import main as understudy
from understudy.envs.registry import WORLD_REGISTRY
from understudy.policies.vla import VLAConfig, VLAPolicy
from understudy.selftest.faulty_proxy import free_port
from understudy.training.collection.collector import Collector
from understudy.training.collection.group_filter import FilterConfig
from understudy.training.collection.task_start_plan import PlanConfig
from understudy.training.offpolicy.rlpd import InterventionConfig, RLPDConfig
from understudy.training.onpolicy.config import OnPolicyConfig, WorkersConfig
from understudy.training.onpolicy.multi_task_evaluation import TaskEvaluationConfig
from understudy.training.runs.evaluate import EvaluationConfig
from understudy.training.runs.metrics import read_metrics
from understudy.training.runs.run import Run

sys.path.insert(0, str(Path(__file__).parent))
from killed import ENV as STATE
from killed import Role
from onpolicy import METAWORLD, TOY


@dataclass(frozen=True)
class Speed:
    """Of one run, without its first iteration."""

    steps_per_s: float
    updates_per_s: float
    rest_s: float  # starting, evaluations, ending

    def __str__(self) -> str:
        return (
            f"{self.steps_per_s:.0f} steps/s, {self.updates_per_s:.2f} updates/s, {self.rest_s:.0f} s to start and end"
        )


def main(
    env: tuple[str, ...] = (),
    rounds: int = 3,
    iterations: int = 6,
    workers: int = 2,
    rlpd: bool = False,
    steps: int = 2_000,
) -> int:
    """Run and compare.

    Args:
        env: Worlds; by default the toy, and Metaworld if it is there.
        rounds: Of both sides.
        iterations: Of a run; the first is not counted.
        workers: Simulators of each side.
        rlpd: Compare runs of RLPD in the toy world instead, with one actor.
        steps: Of such a run.
    """
    if rlpd:
        with tempfile.TemporaryDirectory() as folder:
            compare_rlpd(Path(folder), rounds, steps)
        return 0
    for name in env or (TOY, *([METAWORLD] if WORLD_REGISTRY["metaworld"].ready else [])):
        with tempfile.TemporaryDirectory() as folder:
            compare(Path(folder), name, rounds, iterations, workers)
    return 0


def compare(folder: Path, env: str, rounds: int, iterations: int, workers: int) -> None:
    config = make_config(folder / "start.safetensors", env, iterations, workers)
    sides = {
        "plain": [],
        "workers of one simulator": ["--cluster", "local", "--cluster.rollout.num", str(workers)],
        "one worker": ["--cluster", "local", "--cluster.rollout.num", "1", "--cluster.rollout.envs", str(workers)],
    }
    take_turns(
        env, rounds, {name: partial(measure, config=config, options=options) for name, options in sides.items()}, folder
    )


def compare_rlpd(folder: Path, rounds: int, steps: int) -> None:
    demos = folder / "demos"
    if understudy(["record", str(demos), "--env", STATE, "--successes", "5"]):
        raise SystemExit("the demonstrations could not be recorded")
    config = RLPDConfig(
        env=STATE,
        demos=str(demos),
        steps=steps,
        eval_every=10 * steps,
        checkpoint_every=10 * steps,
        cloning_updates=0,
        intervention=InterventionConfig(source="script"),
        evaluation=EvaluationConfig(episodes=2),
        max_pending_updates=400,
    )
    take_turns(
        STATE,
        rounds,
        {
            "plain": partial(measure_rlpd, config=config, on_ray=False),
            "on Ray": partial(measure_rlpd, config=config, on_ray=True),
        },
        folder,
    )


def take_turns(env: str, rounds: int, sides: dict[str, Callable[[Path], Speed]], folder: Path) -> None:
    speeds: dict[str, list[Speed]] = {name: [] for name in sides}
    for number in range(rounds):
        for name in list(sides) if number % 2 == 0 else list(sides)[::-1]:
            speeds[name].append(sides[name](folder / f"{name}-{number}".replace(" ", "-")))
            print(f"  round {number}, {name}: {speeds[name][-1]}", flush=True)
    for name in list(sides)[1:]:
        pairs = list(zip(speeds[name], speeds["plain"], strict=True))
        steps = statistics.median(one.steps_per_s / plain.steps_per_s for one, plain in pairs)
        updates = statistics.median(one.updates_per_s / plain.updates_per_s for one, plain in pairs)
        print(f"{env.partition('?')[0]}, {name}: steps {steps:.2f}x, updates {updates:.2f}x of plain", flush=True)


def make_config(policy: Path, env: str, iterations: int, workers: int) -> OnPolicyConfig:
    with Collector(env, num_parallel_envs=1) as collector:
        texts = [task.instruction or task.name for task in collector.tasks]
        VLAPolicy.new(VLAConfig(), collector.step_spec, texts, seed=0).save(policy)
    return OnPolicyConfig(
        policy=str(policy),
        env=env,
        iterations=iterations,
        max_steps=50,
        clip_actions=True,
        plan=PlanConfig(n_samples=4, data_batch_size=32),
        filters=FilterConfig(filter_accuracy=False),
        algorithm=PolicyGradientConfig(),
        workers=WorkersConfig(num_parallel_envs=workers),
        evaluation=TaskEvaluationConfig(episodes=2, sampling="sampled"),
        eval_every=1000,
        checkpoint_every=1000,
    )


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


def measure_rlpd(path: Path, config: RLPDConfig, on_ray: bool) -> Speed:
    """Between a quarter and the end of all updates."""
    run = Run.create(path, "rlpd", config)
    os.environ["OMP_NUM_THREADS"] = "1"
    if on_ray:
        roles = [Role(path / "log", "resume", str(path), "--cluster", "local", "--cluster.max-lag", "1")]
    else:
        port = str(free_port())
        roles = [
            Role(path / "server.log", "serve", str(run.store), "--port", port),
            Role(path / "actor.log", "actor", str(path), f"127.0.0.1:{port}", "--spool", str(path / "spool")),
            Role(path / "learner.log", "learner", str(path), f"127.0.0.1:{port}"),
        ]
    began = time.monotonic()
    marks: list[tuple[float, dict[str, float]]] = []
    with ExitStack() as undo:
        for role in roles:
            undo.callback(role.kill)
            role.start()
        while not roles[-1].done:
            time.sleep(0.05)
            lines = list(read_metrics(path / "metrics.jsonl", "train")) if (path / "metrics.jsonl").exists() else []
            if lines and lines[-1]["update"] >= config.num_updates / 4 and (not marks or lines[-1] != marks[-1][1]):
                marks.append((time.monotonic(), lines[-1]))
        took_s = time.monotonic() - began
    (first_s, first), (last_s, last) = marks[0], marks[-1]
    busy_s = last_s - first_s
    return Speed(
        steps_per_s=(last["step"] - first["step"]) / busy_s,
        updates_per_s=(last["update"] - first["update"]) / busy_s,
        rest_s=took_s - busy_s * last["update"] / (last["update"] - first["update"]),
    )


if __name__ == "__main__":
    sys.exit(tyro.cli(main))

"""A VLA on two tasks of LIBERO, the whole way: demonstrations, imitation, a GRPO iteration, evaluation.

    python benchmarks/libero_vla.py --place /tmp/libero_vla

LIBERO has no scripted expert for libero_spatial; the demonstrations are by that of worlds/libero_expert.py, which is
told where bowl and plate are. All that follows is the command line, as it is printed. It shows that the loop works
on this simulator and what it costs. So few demonstrations and one iteration teach a policy next to nothing, and the
scores are printed as they are. Needs `understudy env setup libero`.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import tyro

from understudy.envs.registry import WORLD_REGISTRY
from understudy.envs.teleop.takeover import AlwaysScript, Takeover
from understudy.envs.workers import IsolatedWorld
from understudy.envs.world_factory import WorldFactory
from understudy.training import RecordConfig, RecordReport, open_target
from understudy.training.data.record import record
from understudy.training.runs.metrics import read_metrics

WORLDS = str(Path(__file__).resolve().parent / "worlds")
SUITE, SIZE = "libero_spatial", 64
TASKS = (
    "pick_up_the_black_bowl_from_table_center_and_place_it_on_the_plate",
    "pick_up_the_black_bowl_next_to_the_plate_and_place_it_on_the_plate",
)
MAX_STEPS = 140  # of practice; the expert needs about 95


def main(
    *,
    place: Path | None = None,
    demos: int = 12,
    updates: int = 300,
    episodes: int = 8,
    practice: int = 16,
    workers: int = max(os.cpu_count() or 1, 2),
    seed: int = 0,
) -> int:
    """Go the whole way, and print what came of each part of it.

    Args:
        place: Directory for demonstrations and runs; by default a new one. Demonstrations and imitation that are there
            already are not made again.
        demos: Successful ones of each task.
        updates: Of imitation.
        episodes: Of each evaluation, over both tasks.
        practice: Episodes of the GRPO iteration, in groups of eight.
        workers: Simulators at the same time.
        seed: Of everything.
    """
    place = place or Path(tempfile.mkdtemp(prefix="libero_vla_"))
    env = f"libero:{SUITE}?tasks={json.dumps(TASKS, separators=(',', ':'))}&size={SIZE}"
    _record(place / "demos", demos, seed)
    if not (place / "sft" / "policy.safetensors").exists():
        _run(
            "sft",
            place / "sft",
            "--env",
            env,
            "--demos",
            place / "demos",
            "--updates",
            updates,
            "--seed",
            seed,
            "--batch-size",
            32,
            "--vla.max-words",
            20,
            "--vla.block-steps",
            8,
            "--vla.use-proprio",
            "state",
            "--evaluation.episodes",
            episodes,
        )
    loss = list(read_metrics(place / "sft" / "metrics.jsonl", "train"))
    print(f"imitation: loss {loss[0]['loss']:.3f} at update {loss[0]['update']}, {loss[-1]['loss']:.3f} at the end")
    _show("sft", place / "sft")
    _run(
        "train",
        "grpo",
        place / "grpo",
        "--policy",
        place / "sft",
        "--env",
        env,
        "--iterations",
        1,
        "--seed",
        seed,
        "--plan.n-samples",
        8,
        "--plan.data-batch-size",
        practice,
        "--filters.no-filter-accuracy",
        "--max-steps",
        MAX_STEPS,
        "--workers.num-parallel-envs",
        workers,
        "--evaluation.episodes",
        episodes,
    )
    _show("grpo", place / "grpo")
    _run("evaluate", place / "grpo", "--episodes", episodes, "--workers", workers)
    score = json.loads((place / "grpo" / "evaluations" / "evaluation.json").read_text())["score"]
    print(f"evaluate: {_said(score)}")
    return 0


def _record(store: Path, successes: int, seed: int) -> None:
    known = WORLD_REGISTRY["libero"]
    source = WorldFactory(
        factory="libero_expert:BowlsWorld",
        options={"suite": SUITE, "tasks": TASKS, "size": SIZE},
        python=str(known.python),
        env={**known.variables, "PYTHONPATH": WORLDS},
    )
    rng = np.random.default_rng(seed)
    with IsolatedWorld(source, limits=known.limits) as world, open_target(str(store)) as target:
        expert = AlwaysScript(lambda: world.expert_action(noise=0.1, rng=rng).action)
        for task in TASKS:
            began = time.monotonic()
            config = RecordConfig(task=task, successes=successes, max_episodes=3 * successes, seed=seed)
            found: RecordReport = record(world, target, Takeover(expert), config)
            print(
                f"demonstrations: {found.num_successes} of {found.num_episodes} succeed, {task}, {found.num_steps} "
                f"steps in {time.monotonic() - began:.0f} s",
                flush=True,
            )


def _run(*words: Any) -> None:
    """`understudy` with these words, in a process."""
    argv = [str(word) for word in words]
    print("$ understudy " + shlex.join(argv), flush=True)
    began = time.monotonic()
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}  # the simulators need the other cores
    subprocess.run([sys.executable, "-m", "understudy", *argv], check=True, env=one_thread)
    print(f"  {time.monotonic() - began:.0f} s", flush=True)


def _show(name: str, run: Path) -> None:
    """What a run wrote down of iterations and evaluations."""
    for line in read_metrics(run / "metrics.jsonl"):
        if line["kind"] == "evaluation":
            print(f"{name}, evaluation after update {line['update']}: {_said(line)}")
        elif line["kind"] == "train" and "collect_s" in line:
            print(
                f"{name}, iteration: {line['rollouts']} episodes in {line['collect_s']:.0f} s "
                f"({line['steps_per_s']:.1f} steps/s), {100 * line['success']:.0f} % succeed; "
                f"learned in {line['learn_s']:.1f} s, ratio {line['ratio']:.3f}, gradient {line['gradient']:.3f}"
            )


def _said(score: dict[str, Any]) -> str:
    def one(part: dict[str, Any]) -> str:
        return f"{part['success'] * part['episodes']:.0f} of {part['episodes']}"

    tasks = "; ".join(f"{name}: {one(part)}" for name, part in score["tasks"].items())
    return f"{one(score)} {score['sampling']} episodes of {score['split']} starts succeed ({tasks})"


if __name__ == "__main__":
    sys.exit(tyro.cli(main))

"""How busy the simulators of each rank are while rollouts are collected: `python -m benchmarks.ranks_busy`.

Runs GRPO in a world whose episodes differ in length, with one task on four ranks and nine tasks on two, and prints the
`busy` metric of each iteration: of the rank with the least. With `--static` each rank runs its own share alone.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from statistics import median

import torch
from benchmarks.worlds.waiting import WaitingWorld

from understudy.algorithms.onpolicy.policy_gradient import PolicyGradientConfig
from understudy.policies.vla import VLAConfig, VLAPolicy
from understudy.training.collection.group_filter import FilterConfig
from understudy.training.collection.task_start_plan import PlanConfig
from understudy.training.distributed.config import EngineConfig
from understudy.training.distributed.launch import launch_function
from understudy.training.distributed.ranks import join
from understudy.training.onpolicy.config import OnPolicyConfig, TaskEvaluationConfig, WorkersConfig
from understudy.training.onpolicy.onpolicy_run import OnPolicyRun
from understudy.training.runs.metrics import read_metrics
from understudy.training.runs.run import Run

ITERATIONS = 3
POLICY = VLAConfig(
    block_steps=5, num_bins=8, patch=8, shuffle=2, vision_hidden=16, vision_layers=1, vision_heads=2, hidden=16,
    layers=1, heads=2, max_words=4,
)  # fmt: skip


def train(place: str, tasks: int, step_ms: float, static: bool) -> None:
    """What each rank does."""
    torch.set_num_threads(1)
    with join(device="cpu") as ranks:
        path = Path(place) / "run"
        if ranks.first:
            world = WaitingWorld(tasks=tasks)
            policy = Path(place) / "policy.safetensors"
            texts = [task.instruction for task in world.suite.tasks]
            VLAPolicy.new(POLICY, world.step_spec, texts, seed=0).save(policy)
            config = OnPolicyConfig(
                policy=str(policy),
                env=f"benchmarks.worlds.waiting:WaitingWorld?tasks={tasks}&step_ms={step_ms}",
                device="cpu",
                iterations=ITERATIONS,
                plan=PlanConfig(n_samples=8, data_batch_size=144, wave_groups=18),
                filters=FilterConfig(filter_accuracy=False),
                algorithm=PolicyGradientConfig(ppo_mini_batch_size=512, ppo_micro_batch_size=64),
                engine=EngineConfig(parallel="ddp"),
                workers=WorkersConfig(num_parallel_envs=4 * ranks.size),
                evaluation=TaskEvaluationConfig(episodes=18, videos=0),
                eval_every=ITERATIONS,
            )
            Run.create(path, "grpo", config)
        ranks.barrier("the run is there")
        with OnPolicyRun(Run(path), ranks=ranks) as run:
            if static:
                run._sharing = lambda tickets: None  # type: ignore[method-assign]
            run.run()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--static", action="store_true", help="each rank runs its own share alone")
    parser.add_argument("--step-ms", type=float, default=40.0, help="how long a step of the world takes")
    options = parser.parse_args()
    root = str(Path(__file__).parents[1])
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    for tasks, ranks in ((1, 4), (9, 2)):
        with tempfile.TemporaryDirectory() as place:
            code = launch_function(ranks, "benchmarks.ranks_busy:train", place=place, tasks=tasks, **vars(options))
            assert code == 0, code
            busy = [line["busy"] for line in read_metrics(Path(place) / "run" / "metrics.jsonl", "train")]
        each = ", ".join(f"{one:.2f}" for one in busy)
        print(f"{tasks} tasks on {ranks} ranks: busy {median(busy):.2f} (iterations: {each})")


if __name__ == "__main__":
    main()

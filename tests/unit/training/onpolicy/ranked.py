"""What each rank does in tests of several: the same small runs, one for each number of tasks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from tests.unit.training.onpolicy.killed import kill_during
from tests.unit.training.onpolicy.making import make_config

from understudy.training.distributed.ranks import join
from understudy.training.onpolicy.onpolicy_run import OnPolicyRun
from understudy.training.runs.run import Run


def train_until_killed(place: str, write: int, **options: Any) -> None:
    """As `train`; the last rank is killed in an update that it makes while it writes the shard of its n-th checkpoint,
    so that the others have written theirs and wait for it."""
    if int(os.environ["RANK"]) + 1 == int(os.environ["WORLD_SIZE"]):
        kill_during(write)
    train(place, **options)


def train(place: str, tasks: list[int], parallel: str, until: int | None = None, max_lag: int = 0) -> None:
    """Runs `place/tasks-ranks` with the policies that are there. With `until` they are left after so many iterations,
    which must be a checkpoint; runs that are there already go on."""
    torch.set_num_threads(1)
    with join() as ranks:
        for number in tasks:
            path = Path(place) / f"{number}-{ranks.size if ranks.size > 1 else 1}"
            config = make_config(
                Path(place) / "policy.safetensors",
                tasks=number,
                iterations=3,
                engine={"parallel": parallel if ranks.size > 1 else "none"},
                workers={"num_parallel_envs": ranks.size},
                plan={"wave_groups": 5},
                algorithm={"ppo_mini_batch_size": 13},
                save_policy_every=2,
                max_lag=max_lag,
            )
            if ranks.first and not path.exists():
                Run.create(path, "grpo", config)
            ranks.barrier("the run is there")
            with OnPolicyRun(Run(path), ranks=ranks) as run:
                if until is not None:
                    run.evaluate()  # as `run` does first
                while until is not None and run.iteration < until:
                    run.iterate()
                if until is not None:
                    run._save()
                else:
                    run.run()

"""A small run in a process of its own, for tests that kill it: `python -m tests.system.train_process RUN DEMOS`."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from understudy.algorithms import SACConfig
from understudy.policies import ActorConfig
from understudy.training.offpolicy.local_run import LocalRun
from understudy.training.offpolicy.rlpd import InterventionConfig, RLPDConfig
from understudy.training.runs.evaluate import EvaluationConfig
from understudy.training.runs.run import CONFIG, Run

ENV = "toy:touch_purple?cameras=false"
SAC = SACConfig(actor=ActorConfig(hidden=(32, 32)), critic_hidden=(32, 32), num_critics=3)


def small_config(demos: str | None, **changes: object) -> RLPDConfig:
    given = {
        "env": ENV,
        "demos": demos,
        "steps": 400,
        "start_steps": 50,
        "updates_per_step": 2,
        "batch_size": 32,
        "cloning_updates": 20,
        "intervention": InterventionConfig(source="script", patience_steps=30),
        "eval_every": 150,
        "evaluation": EvaluationConfig(episodes=3),
        "checkpoint_every": 80,
        "sac": SAC,
        **changes,
    }
    return RLPDConfig(**given)  # type: ignore[arg-type]


def main() -> None:
    torch.set_num_threads(1)
    path = Path(sys.argv[1])
    run = Run(path) if (path / CONFIG).exists() else Run.create(path, "rlpd", small_config(sys.argv[2]))
    with LocalRun(run) as local:
        print("\n".join(local.restored), flush=True)
        local.run()


if __name__ == "__main__":
    main()

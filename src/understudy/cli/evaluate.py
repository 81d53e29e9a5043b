"""`understudy evaluate`: a policy alone, on start states that training has never seen."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro
from rich.console import Console
from rich.progress import Progress

from understudy.cli.show import needs_extra
from understudy.core import Split, UnderstudyError
from understudy.envs.known import open_world
from understudy.training.evaluate import EvaluationConfig, Trial, evaluate
from understudy.training.run import Run
from understudy.training.score import fingerprint

with needs_extra("train"):
    from understudy.policies import ActorPolicy
    from understudy.training.rlpd import policy_act


def command(
    policy: Annotated[Path, tyro.conf.Positional],
    *,
    env: str | None = None,
    episodes: int = 100,
    split: Split = "eval",
    sampled: bool = False,
    seed: int = 0,
    videos: int = 0,
    out: Path | None = None,
) -> int:
    """Play held-out episodes with a policy alone; prints its success with an interval and a fingerprint.

    Args:
        policy: Directory of a run, or a policy.safetensors.
        env: The world and its task; by default that of the run.
        episodes: How many; with more than there are starts, starts are used again.
        split: Which starts: eval, those that training never sees, or train.
        sampled: Draw actions as in practice; by default the policy does what it thinks best.
        seed: Of what the start does not decide, and of the draws.
        videos: Films of the worst episodes, if the world has cameras.
        out: Directory for the result and the films; by default evaluations/ in the run.
    """
    console = Console(highlight=False)
    run = Run(policy) if policy.is_dir() else None
    said = None if run is None else run.said["config"]
    env = env or (None if said is None else said["env"])
    if env is None:
        raise UnderstudyError("env: expected the name of a world, since a policy file does not say where it acts")
    path = policy if run is None else run.policy
    out = out or (None if run is None else run.path / "evaluations")
    config = EvaluationConfig(episodes=episodes, split=split, videos=videos)
    with open_world(env) as world, Progress(console=console, transient=True) as bar:
        loaded = ActorPolicy.load(path, world.step_spec)
        line = bar.add_task("evaluating", total=episodes)

        def progress(trial: Trial) -> None:
            del trial
            bar.advance(line)

        act = policy_act(loaded, np.random.default_rng(seed), deterministic=not sampled)
        found = evaluate(world, act, config, seed=seed, films=out, progress=progress)
        made_of = fingerprint(
            config={"evaluation": [episodes, split, sampled, seed], "run": said}, parameters=loaded.parameters(),
            env=env, versions=world.versions(),
        )  # fmt: skip
    console.print(
        f"{found.score} succeed, on {found.num_starts} {split} starts of {world.task.name}",
        style="green",
        soft_wrap=True,
    )
    console.print(f"policy {made_of.parameters}, code {made_of.code}, config {made_of.config}", soft_wrap=True)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        result = {"score": found.to_json(), "fingerprint": made_of.to_json()}
        (out / "evaluation.json").write_text(json.dumps(result, indent=1))
        console.print(f"{out / 'evaluation.json'}" + "".join(f", {name}" for name in found.films), soft_wrap=True)
    return 0

"""`understudy evaluate`: a policy alone, on start states that training has never seen."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import tyro
from rich.console import Console
from rich.progress import Progress

from understudy.cli.console import needs_extra
from understudy.core import Tree, UnderstudyError
from understudy.envs.registry import open_world
from understudy.training.runs.evaluate import EvaluationConfig, evaluate
from understudy.training.runs.run import CONFIG, Run
from understudy.training.runs.score import Fingerprint, fingerprint

with needs_extra("train"):
    from understudy.policies import ActorPolicy
    from understudy.policies.load import is_actor, load_block_policy
    from understudy.policies.openvla.config import OpenVLAConfig
    from understudy.training.collection import Collector
    from understudy.training.offpolicy.rlpd import policy_act
    from understudy.training.onpolicy.evaluate_tasks import TrialsConfig, run_trials
    from understudy.training.onpolicy.policies import policy_path


def command(
    policy: Annotated[Path, tyro.conf.Positional],
    *,
    env: str | None = None,
    episodes: int = 100,
    split: Literal["eval", "train", "all"] = "eval",
    sampled: bool = False,
    temperature: float = 1.0,
    seed: int = 0,
    workers: int | None = None,
    videos: int = 0,
    out: Path | None = None,
) -> int:
    """Play held-out episodes with a policy alone; prints its success with an interval and a fingerprint.

    Args:
        policy: Directory of a run, or a policy.safetensors.
        env: The world and its task; by default that of the run. A vision-language-action policy plays all its tasks.
        episodes: How many; with more than there are starts, starts are used again.
        split: Which starts: eval, those that training never sees; train; or all, as benchmarks do, which the score
            then says. All is for vision-language-action policies.
        sampled: Draw actions as in practice; by default the policy does what it thinks best.
        temperature: Of the draws of a vision-language-action policy.
        seed: Of what the start does not decide, and of the draws.
        workers: Processes that play, for a vision-language-action policy; by default as many as there are cores.
        videos: Films of the worst episodes, if the world has cameras.
        out: Directory for the result and the films; by default evaluations/ in the run.
    """
    run = Run(policy) if Run.is_at(policy) or (policy.is_dir() and not (policy / CONFIG).exists()) else None
    said = None if run is None else run.said["config"]
    env = env or (None if said is None else said["env"])
    if env is None:
        raise UnderstudyError("env: expected the name of a world, since a policy file does not say where it acts")
    asked = Asked(
        policy=policy if run is None else policy_path(str(policy)),
        env=env,
        episodes=episodes,
        split=split,
        sampled=sampled,
        temperature=temperature,
        seed=seed,
        workers=workers,
        videos=videos,
        said=said,
        out=out or (None if run is None else run.path / "evaluations"),
    )
    console = Console(highlight=False)
    with Progress(console=console, transient=True) as bar:
        line = bar.add_task("evaluating", total=episodes)
        play = _play if is_actor(asked.policy) else _play_blocks
        score, made_of, text = play(asked, lambda: bar.advance(line))
    console.print(text, style="green", soft_wrap=True)
    console.print(f"policy {made_of.parameters}, code {made_of.code}, config {made_of.config}", soft_wrap=True)
    if asked.out is not None:
        asked.out.mkdir(parents=True, exist_ok=True)
        result = {"score": score, "fingerprint": made_of.to_json()}
        (asked.out / "evaluation.json").write_text(json.dumps(result, indent=1))
        films = "".join(f", {name}" for name in score["films"])
        console.print(f"{asked.out / 'evaluation.json'}{films}", soft_wrap=True)
    return 0


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What was asked for, all defaults found."""

    policy: Path
    env: str
    episodes: int
    split: Literal["eval", "train", "all"]
    sampled: bool
    temperature: float
    seed: int
    workers: int | None
    videos: int
    said: dict[str, Any] | None  # the config of the run that the policy is of
    out: Path | None

    @property
    def openvla(self) -> OpenVLAConfig | None:
        """How a checkpoint of OpenVLA is to be read; only a run says that."""
        found = (self.said or {}).get("openvla")
        return None if found is None else OpenVLAConfig.from_json(found)

    def fingerprint(self, parameters: Tree, versions: Mapping[str, str]) -> Fingerprint:
        evaluation = [self.episodes, self.split, self.sampled, self.seed, self.temperature]
        return fingerprint(
            config={"evaluation": evaluation, "run": self.said}, parameters=parameters, env=self.env, versions=versions
        )


def _play(asked: Asked, over: Callable[[], None]) -> tuple[dict[str, Any], Fingerprint, str]:
    """One task, step by step."""
    if asked.split == "all" or asked.temperature != 1.0 or asked.workers is not None:
        raise UnderstudyError(
            "split all, temperature, workers: are for vision-language-action policies, and this is none; leave them out"
        )
    config = EvaluationConfig(episodes=asked.episodes, split=asked.split, videos=asked.videos)
    with open_world(asked.env) as world:
        loaded = ActorPolicy.load(asked.policy, world.step_spec)
        act = policy_act(loaded, np.random.default_rng(asked.seed), deterministic=not asked.sampled)
        found = evaluate(world, act, config, seed=asked.seed, films=asked.out, progress=lambda trial: over())
        made_of = asked.fingerprint(loaded.parameters(), world.versions())
    text = f"{found.score} succeed, on {found.num_starts} {asked.split} starts of {world.task.name}"
    return found.to_json(), made_of, text


def _play_blocks(asked: Asked, over: Callable[[], None]) -> tuple[dict[str, Any], Fingerprint, str]:
    """All tasks of the world, in several processes."""
    config = TrialsConfig(
        episodes=asked.episodes,
        protocol="held-out" if asked.split == "eval" else "benchmark",
        split=asked.split,
        sampling="sampled" if asked.sampled else "greedy",
        temperature=asked.temperature,
        videos=asked.videos,
    )
    clip_actions = bool((asked.said or {}).get("clip_actions", False))
    workers = asked.workers or os.cpu_count() or 1
    with Collector(asked.env, num_parallel_envs=workers, clip_actions=clip_actions) as collector:
        loaded = load_block_policy(asked.policy, collector.step_spec, openvla=asked.openvla)
        found = run_trials(collector, loaded, config, seed=asked.seed, films=asked.out, progress=lambda trial: over())
        made_of = asked.fingerprint(loaded.parameters(), collector.versions)
    tasks = "".join(f"\n  {name}: {score}" for name, score in found.tasks.items())
    return found.to_json(), made_of, f"{found}{tasks}"

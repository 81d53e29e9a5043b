"""What `understudy evaluate` runs. Needs torch."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
from rich.console import Console

from understudy.cli.operator import open_pace
from understudy.cli.progress import ProgressLine
from understudy.core import NO_VERSION, Tree, UnderstudyError
from understudy.core.spec import describe
from understudy.durable import files
from understudy.envs.registry import open_world
from understudy.envs.world import World
from understudy.policies import ActorPolicy, Sampling
from understudy.policies.lerobot.checkpoint import LeRobotCheckpoint
from understudy.policies.lerobot.config import LeRobotConfig
from understudy.policies.load import is_actor, load_block_policy
from understudy.policies.openvla.config import OpenVLAConfig
from understudy.policies.rtc import AsyncBlocks, RTCConfig
from understudy.processes.python_path import import_object
from understudy.training.collection.collector import Collector
from understudy.training.data.run_episode import Act
from understudy.training.offpolicy.rlpd import RLPDConfig, actor_spec, policy_act
from understudy.training.onpolicy.config import TaskEvaluationConfig
from understudy.training.onpolicy.multi_task_evaluation import evaluate_tasks
from understudy.training.runs import config as configs
from understudy.training.runs.evaluate import EvaluationConfig, evaluate
from understudy.training.runs.fingerprint import Fingerprint, fingerprint
from understudy.training.runs.run import CONFIG, Run, policy_path, run_of
from understudy.training.runs.threads import check_threads, use_threads

SCORE = "evaluation.json"
Split: TypeAlias = Literal["eval", "train", "all"]


def run_evaluation(
    policy: Path,
    *,
    env: str | None,
    episodes: int,
    split: Split,
    sampled: bool,
    temperature: float,
    seed: int,
    workers: int | None,
    threads: int | None,
    videos: int,
    out: Path | None,
    async_inference: bool,
    hz: float | None,
    rtc: RTCConfig,
    openvla: OpenVLAConfig,
    lerobot: LeRobotConfig,
) -> int:
    """Evaluate a policy, print the result and write it to `out`; returns the exit code."""
    if not async_inference and (rtc != RTCConfig() or hz is not None):
        raise UnderstudyError("rtc, hz: these options have no effect without --async-inference; give it, or omit them")
    own = is_python_path(policy)
    if not own and not policy.exists():
        raise UnderstudyError(f"{policy}: there is no such run or policy file; check the path")
    run = None if own else run_of(policy)
    if run is None and not own and policy.is_dir() and not (policy / CONFIG).exists():
        run = Run(policy)  # which says below that it is none
    run_config = None if run is None else run.metadata["config"]
    of_lerobot = run is None and not own and LeRobotCheckpoint.is_at(policy)
    if lerobot != LeRobotConfig() and not of_lerobot:
        raise UnderstudyError(f"lerobot: {policy} is no policy of lerobot; omit these options")
    if openvla != OpenVLAConfig() and (of_lerobot or run is not None or not policy.is_dir()):
        raise UnderstudyError(f"openvla: {policy} is no OpenVLA checkpoint, or a run with options of its own; omit it")
    env = env or (None if run_config is None else run_config["env"])
    if env is None:
        raise UnderstudyError(
            "env: expected the name of a world, because a policy file does not name one; pass --env, such as "
            "--env toy:pick_red"
        )
    request = EvaluationRequest(
        policy=policy if run is None else policy_path(str(policy)),
        env=env,
        episodes=episodes,
        split=split,
        sampled=sampled,
        temperature=temperature,
        seed=seed,
        workers=workers,
        videos=videos,
        rtc=rtc if async_inference else None,
        hz=hz,
        run_config=run_config,
        openvla=_openvla_of(run_config) if run is not None else openvla if policy.is_dir() and not of_lerobot else None,
        lerobot=lerobot if of_lerobot else None,
        out=out or (None if run is None else policy / "evaluations"),
    )
    console = Console(highlight=False)
    check_threads(threads)
    small = own or is_actor(request.policy)  # it acts on one observation at a time
    if small and async_inference:
        raise UnderstudyError(
            f"async_inference: expected a policy that decides on blocks, got {policy}, which decides at each step; "
            f"leave the option out"
        )
    in_real_time = async_inference and (hz is not None or rtc.inference_delay is None)
    console.print(str(use_threads(threads, large=not small)), soft_wrap=True)
    with ProgressLine(console, "evaluate", "episodes") as progress:
        large = evaluate_in_real_time if in_real_time else evaluate_vla
        run_episodes = evaluate_own if own else evaluate_actor if small else large
        score, made_of, text = run_episodes(request, lambda: progress.advance(episodes))
    console.print(text, style="green", soft_wrap=True)
    _print_what_was_measured(console, request, made_of)
    if request.out is not None:
        written = write_score(request.out, {"score": score, "fingerprint": made_of.to_json()})
        videos_text = "".join(f", {name}" for name in score["videos"])
        console.print(f"{written}{videos_text}", soft_wrap=True)
    return 0


def _print_what_was_measured(console: Console, request: EvaluationRequest, made_of: Fingerprint) -> None:
    """The fingerprint, with the world and the run's limit of steps, without which two scores cannot be compared."""
    run_config = request.run_config or {}
    limit = run_config.get("max_steps")
    at_most = "" if limit is None else f", at most {limit} steps an episode as in the run's config"
    console.print(f"world {made_of.env}{at_most}", soft_wrap=True, markup=False)
    trained = run_config.get("env", made_of.env)
    if trained != made_of.env:
        console.print(f"this policy was trained in {trained}", style="yellow", soft_wrap=True, markup=False)
    console.print(f"policy {made_of.parameters}, code {made_of.code}, config {made_of.config}", soft_wrap=True)


def write_score(directory: Path, result: Mapping[str, Any]) -> Path:
    """Write evaluation.json. A score there that measured something else is kept as evaluation-1.json, -2.json, ..."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / SCORE
    if path.exists() and _fingerprint_of(path) != result["fingerprint"]:
        numbers = (directory / f"evaluation-{number}.json" for number in count(1))
        path.rename(next(older for older in numbers if not older.exists()))
    files.write_durably(path, json.dumps(result, indent=1).encode())
    return path


def _fingerprint_of(path: Path) -> Any:
    try:
        return json.loads(path.read_text())["fingerprint"]
    except (ValueError, LookupError, TypeError):
        return None


@dataclass(frozen=True, kw_only=True)
class EvaluationRequest:
    """The options of `understudy evaluate`, with all defaults filled in."""

    policy: Path
    env: str
    episodes: int
    split: Split
    sampled: bool
    temperature: float
    seed: int
    workers: int | None
    videos: int
    rtc: RTCConfig | None  # how to act asynchronously
    hz: float | None  # control rate for a world that has none
    run_config: dict[str, Any] | None  # of the policy's run, if it has one
    openvla: OpenVLAConfig | None  # how to read an OpenVLA checkpoint
    lerobot: LeRobotConfig | None  # how to use a policy of lerobot
    out: Path | None

    def fingerprint(self, parameters: Tree, versions: Mapping[str, str]) -> Fingerprint:
        evaluation = [self.episodes, self.split, self.sampled, self.seed, self.temperature]
        config: dict[str, Any] = {"evaluation": evaluation, "run": self.run_config}
        if self.rtc is not None:
            config |= {"rtc": self.rtc.to_json(), "hz": self.hz}
        if self.run_config is None and self.openvla is not None:
            config["openvla"] = self.openvla.to_json()
        if self.lerobot is not None:
            config["lerobot"] = self.lerobot.to_json()
        return fingerprint(
            config=config,
            parameters=parameters,
            env=self.env,
            versions=versions,
        )


def _openvla_of(run_config: Mapping[str, Any] | None) -> OpenVLAConfig | None:
    """How a run reads its OpenVLA checkpoint."""
    found = (run_config or {}).get("openvla")
    return None if found is None else OpenVLAConfig.from_json(found)


def is_python_path(policy: Path) -> bool:
    """Whether this names a function, as my_policy:act, and not a file."""
    return ":" in policy.name and not policy.exists()


def evaluate_own(request: EvaluationRequest, on_episode: Callable[[], None]) -> tuple[dict[str, Any], Fingerprint, str]:
    """Evaluate a function of the user on one task, in this process. Its fingerprint is that of its file."""
    if request.sampled:
        raise UnderstudyError("sampled: a function of your own decides this itself; leave the option out")
    found = import_object(str(request.policy), UnderstudyError)
    if not callable(found):
        raise UnderstudyError(f"{request.policy}: expected a function of an observation, got {describe(found)}")
    module = sys.modules[str(request.policy).partition(":")[0]]
    source = Path(module.__file__).read_bytes() if module.__file__ else b""

    with open_world(request.env) as world:

        def act(observation: Tree) -> tuple[Tree, int]:
            answer = found(observation)
            action, version = answer if isinstance(answer, tuple) and len(answer) == 2 else (answer, NO_VERSION)
            world.step_spec.action.check(action, "the action that the policy returned")
            return action, version

        return _evaluate_act(request, on_episode, world, act, {"file": np.frombuffer(source, np.uint8)})


def evaluate_actor(
    request: EvaluationRequest, on_episode: Callable[[], None]
) -> tuple[dict[str, Any], Fingerprint, str]:
    """Evaluate an actor on one task, in this process."""
    with _world_of_actor(request) as world:
        loaded = ActorPolicy.load(request.policy, actor_spec(world))
        rng = np.random.default_rng(request.seed)
        act = policy_act(loaded, rng, deterministic=not request.sampled, world=world)
        return _evaluate_act(request, on_episode, world, act, loaded.parameters())


def _world_of_actor(request: EvaluationRequest) -> World:
    """The world, with the base policy whose actions the actor of a run changes, or whose noise it chooses."""
    if request.run_config is None or request.run_config.get("base_policy") is None:
        return open_world(request.env)
    return replace(configs.from_json(RLPDConfig, request.run_config), env=request.env).open_world()


def _evaluate_act(
    request: EvaluationRequest, on_episode: Callable[[], None], world: World, act: Act, parameters: Tree
) -> tuple[dict[str, Any], Fingerprint, str]:
    if request.split == "all" or request.temperature != 1.0 or request.workers is not None:
        raise UnderstudyError(
            "split all, temperature, workers: these options are for vision-language-action policies; leave them out"
        )
    config = EvaluationConfig(episodes=request.episodes, split=request.split, videos=request.videos)
    found = evaluate(world, act, config, seed=request.seed, videos=request.out, progress=lambda _: on_episode())
    made_of = request.fingerprint(parameters, world.versions())
    text = f"{found.success_rate} succeed on {found.num_starts} {request.split} starts of {world.task.name}"
    return found.to_json(), made_of, text


def evaluate_vla(request: EvaluationRequest, on_episode: Callable[[], None]) -> tuple[dict[str, Any], Fingerprint, str]:
    """Evaluate a VLA on all tasks of the world, with simulators in subprocesses."""
    config = TaskEvaluationConfig(
        episodes=request.episodes,
        protocol="held-out" if request.split == "eval" else "benchmark",
        split=request.split,
        sampling="sampled" if request.sampled else "greedy",
        temperature=request.temperature,
        videos=request.videos,
    )
    run_config = request.run_config or {}
    with Collector(
        request.env,
        num_parallel_envs=request.workers or os.cpu_count() or 1,
        max_steps=run_config.get("max_steps"),  # as in the evaluations of the run itself
        clip_actions=bool(run_config.get("clip_actions", False)),
        rtc=request.rtc,
    ) as collector:
        loaded = load_block_policy(
            request.policy, collector.step_spec, openvla=request.openvla, lerobot=request.lerobot
        )
        found = evaluate_tasks(
            collector, loaded, config, seed=request.seed, videos=request.out, progress=lambda _: on_episode()
        )
        made_of = request.fingerprint(loaded.parameters(), collector.versions)
    tasks = "".join(f"\n  {name}: {score}" for name, score in found.tasks.items())
    return found.to_json(), made_of, f"{found}{tasks}"


def evaluate_in_real_time(
    request: EvaluationRequest, on_episode: Callable[[], None]
) -> tuple[dict[str, Any], Fingerprint, str]:
    """Evaluate a block policy on one task, in this process; a thread computes the next block meanwhile."""
    assert request.rtc is not None
    if request.split == "all" or request.workers is not None:
        raise UnderstudyError(
            "split all, workers: expected neither in real time, where one world runs one task; leave them out"
        )
    with open_world(request.env) as world:
        pace = open_pace(world, request.hz, human=False)
        if pace is None and world.hz is None:
            raise UnderstudyError(
                f"rtc/inference_delay: expected a number of steps, because {request.env} waits for the policy; set it "
                f"to the inference time times the control rate, or run in real time with --hz"
            )
        policy = load_block_policy(request.policy, world.step_spec, openvla=request.openvla, lerobot=request.lerobot)
        sampling = Sampling(temperature=request.temperature, greedy=not request.sampled)
        config = EvaluationConfig(episodes=request.episodes, split=request.split, videos=request.videos)
        with AsyncBlocks(policy, request.rtc, sampling=sampling, seed=request.seed) as blocks:
            found = evaluate(
                world,
                blocks,
                config,
                seed=request.seed,
                videos=request.out,
                progress=lambda _: on_episode(),
                pace=pace,
                on_reset=blocks.begin,
            )
        made_of = request.fingerprint(policy.parameters(), world.versions())
        kept = pace or getattr(world, "pace", None)
        text = f"{found.success_rate} succeed on {found.num_starts} {request.split} starts of {world.task.name}"
        return found.to_json(), made_of, f"{text}\n  {blocks.report}" + (f"\n  {kept.report}" if kept else "")

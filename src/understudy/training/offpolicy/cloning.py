"""A run of behaviour cloning: imitate the demonstrations of a store, then evaluate the policy.

A resumed run ends with the same bits as one that was not stopped or killed: a checkpoint holds the algorithm's whole
state, the commit of the store that batches are drawn from, and the number of the next batch.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from understudy.algorithms import CloningConfig
from understudy.core import StepSpec, TransitionBatch, Tree
from understudy.envs.registry import open_world
from understudy.envs.world import World
from understudy.policies import ActorConfig, Inputs, Stats
from understudy.processes.stop import StopRequest
from understudy.replay import DEMO, Sampler
from understudy.training.offpolicy.rlpd import STATS_STEPS, policy_act
from understudy.training.runs.checkpoint import newest_checkpoint, read_checkpoint
from understudy.training.runs.config import ConfigError
from understudy.training.runs.device import AUTO, choose_device
from understudy.training.runs.evaluate import EvaluationConfig, EvaluationResult, count_episodes, evaluate
from understudy.training.runs.fingerprint import fingerprint
from understudy.training.runs.health import HEALTH, Health
from understudy.training.runs.imitation_loop import ImitationLoop, no_demonstrations, open_demonstrations
from understudy.training.runs.metrics import MetricLog, rewind
from understudy.training.runs.run import Run
from understudy.training.runs.threads import check_threads, use_threads

if TYPE_CHECKING:  # the config of a run is read without torch
    from understudy.algorithms import Cloning
    from understudy.policies import ActorPolicy

KIND = "cloning"


@dataclass(frozen=True, kw_only=True)
class CloningRunConfig:
    """A run of behaviour cloning."""

    env: str = "toy:press_button?cameras=false&state=task"
    """World to evaluate in, as `understudy env list` names it, with its options."""
    demos: str | None = None
    """Directory of a store with demonstrations; None uses the run's own store."""
    updates: int = 1_500
    """Number of updates of the whole run."""
    report_every: int = 500
    """Number of updates between two lines of metrics."""
    checkpoint_every: int = 200
    """Number of updates between two checkpoints."""
    keep_checkpoints: int = 2
    """Number of the newest checkpoints that are kept."""
    batch_size: int = 128
    """Number of demonstrated steps in a batch."""
    seed: int = 0
    """Seed of all random numbers of the run."""
    device: str = AUTO
    """Device that torch trains on: cpu, cuda, cuda:1, or auto, which is a GPU where there is one and else the CPU."""
    threads: int | None = None
    """Number of CPU threads of torch; None: OMP_NUM_THREADS if it is set, else one, or one per core for cameras."""
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    cloning: CloningConfig = field(default_factory=lambda: CloningConfig(actor=ActorConfig(hidden=(128, 128))))

    def __post_init__(self) -> None:
        check_threads(self.threads)
        for name in ("updates", "report_every", "checkpoint_every", "keep_checkpoints", "batch_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: expected a number from 1, got {getattr(self, name)}")


def run_cloning(
    run: Run,
    say: Callable[[str], None],
    *,
    note: Callable[[str], None] = lambda text: None,
    progress: Callable[[int, int], None] = lambda done, total: None,
    stop: StopRequest | None = None,
) -> EvaluationResult:
    """Imitate, from the newest checkpoint if there is one, and evaluate; policy and metrics are written to the run.

    `say` gets what it is doing now, and `note` what the user should know later too. `progress` gets the number of
    updates that are done, and of all. After a `stop` request it saves and raises Stopped.
    """
    config = run.config(CloningRunConfig)
    stop = stop or StopRequest()
    health = Health(run.path / HEALTH, role="local", name=run.kind)
    with run, health, open_world(config.env) as world, ExitStack() as undo:
        config.evaluation.starts(world)  # raises now, and not after all updates
        cloning, sampler = _open(run, config, world.step_spec, note, undo)
        log = MetricLog(run.metrics)
        undo.callback(log.close)
        loop = ImitationLoop(run, config, cloning, sampler, log=log, health=health, stop=stop)
        with loop.saving_when_stopped():
            loop.run_updates(say, progress, doing="cloning")
            policy = cloning.policy(version=cloning.num_updates)
            policy.save(run.policy)
            found = _evaluate(run, config, policy, world, health, stop, say)
        made_of = fingerprint(
            config=run.metadata["config"], parameters=policy.parameters(), env=config.env, versions=found.versions
        )
        log.write(
            "evaluation",
            step=len(sampler),
            update=config.updates,
            **found.to_json(),
            fingerprint=made_of.to_json(),
        )
    return found


def _open(
    run: Run, config: CloningRunConfig, spec: StepSpec, note: Callable[[str], None], undo: ExitStack
) -> tuple[Cloning, Sampler[TransitionBatch]]:
    """The algorithm and its data, new or restored from the newest checkpoint."""
    from understudy.algorithms import Cloning  # only now: the config of a run is read without torch

    store = run.store if config.demos is None else Path(config.demos)
    newest = newest_checkpoint(run.checkpoints)
    saved = None if newest is None else read_checkpoint(newest)
    rewind(run.metrics, 0 if saved is None else int(saved.facts["metrics"]))
    encoder = config.cloning.actor.encoder
    inputs = Inputs(spec.observation, encoder.inputs, encoder.image_size)
    reader = undo.enter_context(open_demonstrations(store, config.env))
    sampler: Sampler[TransitionBatch] = Sampler(
        reader, DEMO, batch_size=config.batch_size, seed=config.seed, spec=spec, resize=inputs.batch_resize
    )
    undo.callback(sampler.close)
    if saved is not None:
        sampler.restore(saved.facts["demos"])
    elif not sampler.follow():
        raise no_demonstrations(store, config.env)
    device = choose_device(config.device)
    note(str(use_threads(config.threads, large=bool(inputs.cameras))))
    note(str(device))
    if saved is not None:
        cloning = Cloning(config.cloning, spec, Stats.none(inputs), seed=config.seed, device=device.name)
        cloning.restore(saved.state)
    else:
        stats = Stats.of_data(inputs, [sampler.sample(size=STATS_STEPS).observation])
        cloning = Cloning(config.cloning, spec, stats, seed=config.seed, device=device.name)
    return cloning, sampler


def _evaluate(
    run: Run,
    config: CloningRunConfig,
    policy: ActorPolicy,
    world: World,
    health: Health,
    stop: StopRequest,
    say: Callable[[str], None],
) -> EvaluationResult:
    """Evaluate the policy on held-out starts; a run that is stopped in here evaluates again when it is resumed."""
    greedy = policy_act(policy, np.random.default_rng(0), deterministic=True)
    ended = count_episodes(config.evaluation.episodes, say)

    def act(observation: Tree) -> tuple[Tree, int]:
        health.progress("evaluating")
        stop.check()
        return greedy(observation)

    return evaluate(world, act, config.evaluation, seed=0, videos=run.videos, progress=ended)

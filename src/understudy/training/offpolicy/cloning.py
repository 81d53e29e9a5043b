"""A run of behaviour cloning: imitate the demonstrations of a store, then evaluate the policy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from understudy.algorithms import CloningConfig
from understudy.core import StoreError, Tree
from understudy.envs.registry import open_world
from understudy.policies import ActorConfig, Inputs, Stats
from understudy.replay import DEMO, Reader, Sampler
from understudy.training.offpolicy.rlpd import STATS_STEPS, policy_act
from understudy.training.runs.device import check_device
from understudy.training.runs.evaluate import EvaluationConfig, EvaluationResult, evaluate
from understudy.training.runs.fingerprint import fingerprint
from understudy.training.runs.health import HEALTH, Health
from understudy.training.runs.metrics import MetricLog
from understudy.training.runs.run import Run
from understudy.training.runs.threads import check_threads, use_threads


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
    batch_size: int = 128
    """Number of demonstrated steps in a batch."""
    seed: int = 0
    """Seed of all random numbers of the run."""
    device: str = "cpu"
    """Device that torch trains on, such as cpu or cuda:0."""
    threads: int | None = None
    """Number of CPU threads of torch; None: OMP_NUM_THREADS if it is set, else one, or one per core for cameras."""
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    cloning: CloningConfig = field(default_factory=lambda: CloningConfig(actor=ActorConfig(hidden=(128, 128))))

    def __post_init__(self) -> None:
        check_threads(self.threads)


def run_cloning(
    run: Run,
    say: Callable[[str], None],
    *,
    note: Callable[[str], None] = lambda text: None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> EvaluationResult:
    """Imitate and evaluate; the policy and the metrics are written to the run.

    `say` gets what it is doing now, and `note` what the user should know later too. `progress` gets the number of
    updates that are done, and of all.
    """
    from understudy.algorithms import Cloning  # only now: the config of a run is read without torch

    config = run.config(CloningRunConfig)
    store = run.store if config.demos is None else config.demos
    health = Health(run.path / HEALTH, role="local", name=run.kind)
    with run, health, open_world(config.env) as world, Reader(store) as reader:
        sampler = Sampler(reader, DEMO, batch_size=config.batch_size, seed=config.seed)
        log = MetricLog(run.metrics)
        try:
            if not sampler.follow():
                raise StoreError(f"{store}: has no demonstrations; run `understudy record {store} --env {config.env}`")
            check_device(config.device)
            inputs = Inputs(world.step_spec.observation, config.cloning.actor.encoder.inputs)
            note(str(use_threads(config.threads, large=bool(inputs.cameras))))
            stats = Stats.of_data(inputs, [sampler.sample(size=STATS_STEPS).observation])
            cloning = Cloning(config.cloning, world.step_spec, stats, seed=config.seed, device=config.device)
            for number in range(1, config.updates + 1):
                report = number % config.report_every == 0 or number == config.updates
                metrics = cloning.update(sampler.sample(), report=report)
                health.progress("cloning", update=number)
                progress(number, config.updates)
                if report:
                    log.write("train", step=len(sampler), update=number, **metrics)
                    say(f"update {number:,} of {config.updates:,}, loss {metrics['loss']:.4f}")
            policy = cloning.policy(version=cloning.num_updates)
            policy.save(run.policy)
            say("evaluating")
            greedy = policy_act(policy, np.random.default_rng(0), deterministic=True)

            def act(observation: Tree) -> tuple[Tree, int]:
                health.progress("evaluating")
                return greedy(observation)

            found = evaluate(world, act, config.evaluation, seed=0, videos=run.videos)
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
        finally:
            log.close()
            sampler.close()
    return found

"""Builds the parts of an on-policy run from its config: health, backend, plan, exchange and learner."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from understudy.core import StepSpec
from understudy.durable import files
from understudy.training.collection.collector import TicketRunner
from understudy.training.collection.task_start_plan import Plan, PlannedTask
from understudy.training.distributed.ranks import Ranks
from understudy.training.onpolicy.config import OnPolicyConfig
from understudy.training.onpolicy.policy_files import load_policy
from understudy.training.onpolicy.policy_gradient_learner import PolicyGradientLearner
from understudy.training.onpolicy.reference_policy import AdapterOff, Frozen, ReferencePolicy
from understudy.training.onpolicy.rollout_backend import RolloutBackend, RolloutBackendFactory
from understudy.training.onpolicy.rollout_exchange import RolloutExchange
from understudy.training.runs.fingerprint import digest_of_policy
from understudy.training.runs.health import HEALTH, Health
from understudy.training.runs.run import Run, policy_path

FAILURES = "failures"  # directory: batches whose gradient was not finite
REFERENCE = "reference.safetensors"  # the policy that KL is measured from: the one that the run started from


@dataclass(frozen=True, kw_only=True, eq=False)
class RunParts:
    """The parts of an on-policy run."""

    health: Health
    backend: RolloutBackend
    plan: Plan
    exchange: RolloutExchange
    learner: PolicyGradientLearner
    start_digest: str  # of the policy that the run started from


def build_parts(
    run: Run, config: OnPolicyConfig, ranks: Ranks, backend_factory: RolloutBackendFactory, undo: ExitStack
) -> RunParts:
    """Lock the run (rank 0) and build its parts; `undo` closes them. All ranks call this."""
    if ranks.first:
        undo.enter_context(run)
    ranks.barrier("the run is locked")
    health = Health(run.path / HEALTH, role="local" if ranks.size == 1 else f"rank-{ranks.rank}", name=run.kind)
    health.progress("starting workers")
    backend = backend_factory(run, config, ranks)
    undo.callback(backend.close)
    plan = _plan(config, backend.runner)
    exchange = RolloutExchange(ranks)
    start = policy_path(config.policy)
    start_digest = digest_of_policy(start)
    learner = _learner(run, config, backend, exchange, health, start)
    backend.open(learner.policy)
    return RunParts(
        health=health, backend=backend, plan=plan, exchange=exchange, learner=learner, start_digest=start_digest
    )


def _plan(config: OnPolicyConfig, runner: TicketRunner) -> Plan:
    starts = runner.suite.starts
    tasks = [PlannedTask(name=task.name, starts=tuple(starts(task, "train"))) for task in runner.tasks]
    return Plan(replace(config.plan, seed=config.plan.seed + config.seed), tasks)


def _learner(
    run: Run,
    config: OnPolicyConfig,
    backend: RolloutBackend,
    exchange: RolloutExchange,
    health: Health,
    start: Path,
) -> PolicyGradientLearner:
    spec = backend.runner.step_spec
    config = replace(config, device=str(exchange.ranks.device))  # the policy is made where the engine trains it
    policy = load_policy(config, start, spec, adapted=True)
    policy.version = 0
    learner = PolicyGradientLearner(
        policy,
        config.algorithm.with_max_lag(1 if backend.prefetches else 0),
        config.engine,
        exchange,
        config.sampling,
        seed=config.seed,
        progress=health.progress,
        failures=run.path / FAILURES,
    )
    if config.algorithm.kl_in != "none":
        learner.reference = _reference(run, config, learner, spec, start)
    return learner


def _reference(
    run: Run, config: OnPolicyConfig, learner: PolicyGradientLearner, spec: StepSpec, start: Path
) -> ReferencePolicy:
    if config.lora.rank:
        return AdapterOff(learner.policy)
    ranks = learner.engine.ranks
    policy = load_policy(config, _reference_path(run, ranks, start), spec, adapted=False)
    return Frozen(policy, config.engine, ranks)


def _reference_path(run: Run, ranks: Ranks, start: Path) -> Path:
    """The path of the policy that the run started from: a file is copied into the run, a directory is used in place."""
    if start.is_dir():
        return start
    copy = run.path / REFERENCE
    if ranks.first and not copy.exists():
        files.write_durably(copy, start.read_bytes())
    ranks.barrier("the reference is copied")
    return copy

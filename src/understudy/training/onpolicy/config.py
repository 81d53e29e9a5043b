"""What an on-policy run is asked to do."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from understudy.algorithms.onpolicy.config import AdvEstimator, PolicyGradientConfig
from understudy.policies import Sampling
from understudy.policies.openvla.config import OpenVLAConfig
from understudy.training.collection import FilterConfig, PlanConfig
from understudy.training.distributed.config import EngineConfig
from understudy.training.onpolicy.evaluate_tasks import TrialsConfig
from understudy.training.onpolicy.policies import AdapterConfig
from understudy.training.runs.config import ConfigError
from understudy.training.runs.metrics import SinkName

# Of each kind of run.
ESTIMATORS: dict[str, AdvEstimator] = {
    "grpo": "grpo",
    "rloo": "rloo",
    "reinforce": "reinforce_plus_plus",
    "ppo": "gae",
}


@dataclass(frozen=True, kw_only=True)
class WorkersConfig:
    """Who lives the episodes. None of it changes what is learned."""

    num_parallel_envs: int = field(default_factory=lambda: max(os.cpu_count() or 1, 2))  # processes, over all ranks
    max_attempts: int = 3  # at an episode whose worker died, hung or spoke nonsense
    task_affinity: int = 10  # tasks that a worker keeps loaded, so that it is given these first

    def __post_init__(self) -> None:
        if self.num_parallel_envs < 1:
            raise ConfigError(f"num_parallel_envs: expected a number from 1, got {self.num_parallel_envs}")


@dataclass(frozen=True, kw_only=True)
class OnPolicyConfig:
    """A run of GRPO, RLOO, REINFORCE++ or PPO. An iteration lives a batch of episodes and learns from it."""

    policy: str  # where it starts from: a policy file, a checkpoint of OpenVLA, or a run (`understudy sft`)
    openvla: OpenVLAConfig = field(default_factory=OpenVLAConfig)  # if that is a checkpoint of OpenVLA
    lora: AdapterConfig = field(default_factory=AdapterConfig)
    env: str = "toy"
    iterations: int = 80
    max_empty: int = 3  # iterations in a row without a group that teaches anything, which end the run
    max_steps: int | None = None  # of an episode, if that is fewer than the task's own
    clip_actions: bool = False  # into their bounds, instead of refusing a policy that leaves them
    sampling: Sampling = field(default_factory=Sampling)  # in practice
    plan: PlanConfig = field(default_factory=PlanConfig)
    filters: FilterConfig = field(default_factory=FilterConfig)
    algorithm: PolicyGradientConfig = field(default_factory=PolicyGradientConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    workers: WorkersConfig = field(default_factory=WorkersConfig)
    seed: int = 0
    eval_every: int = 20  # iterations
    evaluation: TrialsConfig = field(default_factory=lambda: TrialsConfig(sampling="sampled"))
    checkpoint_every: int = 5  # iterations
    keep_checkpoints: int = 3
    sinks: tuple[SinkName, ...] = ()
    device: str = "cpu"

    def __post_init__(self) -> None:
        for name in ("iterations", "max_empty", "eval_every", "checkpoint_every", "keep_checkpoints"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: expected a number from 1, got {getattr(self, name)}")
        if self.seed < 0:
            raise ConfigError(f"seed: expected 0 or more, got {self.seed}")


def default_config(kind: str, *, policy: str) -> OnPolicyConfig:
    """GRPO and RLOO compare the episodes of a group, so that groups of one outcome teach nothing; the others need no
    groups."""
    grouped = kind in ("grpo", "rloo")
    return OnPolicyConfig(
        policy=policy,
        algorithm=PolicyGradientConfig(adv_estimator=ESTIMATORS[kind]),
        plan=PlanConfig(n_samples=8 if grouped else 1),
        filters=FilterConfig(filter_accuracy=grouped),
    )

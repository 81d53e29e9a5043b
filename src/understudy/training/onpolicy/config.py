"""The config of an on-policy run."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from typing import Literal

from understudy.algorithms.onpolicy.config import AdvEstimator, PolicyGradientConfig
from understudy.policies import Sampling
from understudy.policies.openvla.config import OpenVLAConfig
from understudy.training.collection.group_filter import FilterConfig
from understudy.training.collection.task_start_plan import PlanConfig
from understudy.training.distributed.config import EngineConfig
from understudy.training.runs.config import ConfigError
from understudy.training.runs.device import AUTO
from understudy.training.runs.metrics import SinkName
from understudy.training.runs.threads import check_threads

# The advantage estimator of each kind of run.
ESTIMATORS: dict[str, AdvEstimator] = {
    "grpo": "grpo",
    "rloo": "rloo",
    "reinforce": "reinforce_plus_plus",
    "ppo": "gae",
}

ALPHA = 16.0  # of LoRA, if the config gives none


_MEANING = {
    "eval": "held-out: starts of the eval split, which training never sees",
    "train": "benchmark: starts of the train split, which training may have seen; says nothing about new ones",
    "all": "benchmark: all starts, as in published scores, those included that training may have seen; says little "
    "about new ones",
}


@dataclass(frozen=True, kw_only=True)
class TaskEvaluationConfig:
    """How many episodes an evaluation has, from which start states, and how the policy samples its actions."""

    episodes: int = 100
    """Number of episodes in all, divided evenly among the tasks."""
    protocol: Literal["held-out", "benchmark"] = "held-out"
    """Start states to evaluate on: held-out are those that training never sees, benchmark also uses the others."""
    split: Literal["eval", "train", "all"] | None = None
    """Split of the start states; None means eval for held-out and all for benchmark."""
    sampling: Literal["greedy", "sampled"] = "greedy"
    """Whether the policy takes its most likely action or samples one."""
    temperature: float = 1.0
    """Sampling temperature, if actions are sampled."""
    videos: int = 0
    """Number of the worst episodes to write as videos, if the world has cameras."""

    def __post_init__(self) -> None:
        if self.episodes < 1 or self.videos < 0:
            raise ConfigError(
                f"evaluation: expected episodes from 1 and videos from 0, got {self.episodes} and {self.videos}"
            )
        for name, known in (
            ("protocol", ("held-out", "benchmark")),
            ("sampling", ("greedy", "sampled")),
            ("split", (None, "eval", "train", "all")),
        ):
            if getattr(self, name) not in known:
                raise ConfigError(f"{name}: expected one of {', '.join(map(str, known))}, got {getattr(self, name)!r}")
        if self.split is not None and (self.protocol == "held-out") != (self.split == "eval"):
            raise ConfigError(
                f"split: expected {'eval' if self.protocol == 'held-out' else 'train or all'} with protocol "
                f"{self.protocol!r}, got {self.split!r}; only eval is held out"
            )
        self.to_sampling()  # raises for a bad temperature
        if self.sampling == "greedy" and self.temperature != TaskEvaluationConfig.temperature:
            raise ConfigError(
                f"temperature: has no effect on greedy actions, got {self.temperature}; leave it out, "
                f"or set sampling to 'sampled'"
            )

    @property
    def starts(self) -> Literal["eval", "train", "all"]:
        """The split of start states that is used."""
        return self.split or ("eval" if self.protocol == "held-out" else "all")

    @property
    def meaning(self) -> str:
        """What the success rate measures, in words."""
        return _MEANING[self.starts]

    def to_sampling(self) -> Sampling:
        return Sampling(temperature=self.temperature, greedy=self.sampling == "greedy")


@dataclass(frozen=True, kw_only=True)
class WorkersConfig:
    """The simulator processes that run the episodes. They do not change what is learned."""

    num_parallel_envs: int = field(default_factory=lambda: max(os.cpu_count() or 1, 2))
    """Number of simulator processes, over all ranks."""
    max_attempts: int = 3
    """Number of attempts at an episode whose worker died, hung or answered nonsense."""
    task_affinity: int = 10
    """Number of tasks that a worker keeps loaded; it gets episodes of these tasks first."""
    batch_wait_ms: float = 0.0
    """Milliseconds for which an observation may wait for those of other simulators before the policy acts on all of
    them at once; 0 acts on those that are there."""

    def __post_init__(self) -> None:
        if self.num_parallel_envs < 1:
            raise ConfigError(f"num_parallel_envs: expected a number from 1, got {self.num_parallel_envs}")
        if not 0 <= self.batch_wait_ms < math.inf:
            raise ConfigError(f"batch_wait_ms: expected a number of milliseconds from 0, got {self.batch_wait_ms}")


@dataclass(frozen=True, kw_only=True)
class AdapterConfig:
    """LoRA: which layers get an adapter, and its size. All other weights are frozen, except a value head."""

    rank: int = 0
    """Rank of the adapter matrices; 0 trains the whole network without an adapter."""
    alpha: float = ALPHA
    """Scale of the adapter: its output is multiplied by alpha / rank."""
    targets: tuple[str, ...] = ()
    """Names of the layers that get an adapter, such as q_proj v_proj; none means every linear layer but the heads."""

    def __post_init__(self) -> None:
        if self.rank < 0:
            raise ConfigError(f"lora.rank: expected 0 for none, or more, got {self.rank}")
        if self.rank == 0 and (self.alpha, self.targets) != (ALPHA, ()):
            raise ConfigError("lora.rank: is 0, so alpha and targets would have no effect; set a rank")


@dataclass(frozen=True, kw_only=True)
class OnPolicyConfig:
    """A run of GRPO, RLOO, REINFORCE++ or PPO. Each iteration collects a batch of episodes and learns from it."""

    policy: str
    """Policy to start from: a policy file, the directory of an OpenVLA checkpoint, or a run (`understudy sft`)."""
    openvla: OpenVLAConfig = field(default_factory=OpenVLAConfig)
    lora: AdapterConfig = field(default_factory=AdapterConfig)
    env: str = "toy"
    """World to train in, as `understudy env list` names it, with its options."""
    iterations: int = 80
    """Number of iterations of the whole run."""
    max_empty: int = 3
    """Number of iterations in a row without a group to learn from after which the run ends with an error."""
    max_steps: int | None = None
    """Number of environment steps after which an episode is truncated; None keeps the task's own limit."""
    clip_actions: bool = False
    """Clip actions to their bounds instead of refusing a policy that exceeds them."""
    noise_level: float | None = None
    """Noise of the denoising steps of a flow policy (Flow-SDE), from 0 to 1; None keeps that of the policy file."""
    noise_bounds: tuple[float, float] | None = None
    """Lowest and highest standard deviation of the noise of a flow policy's denoising steps, which a network learns
    within these bounds (Flow-Noise), such as 0.08 0.16; None keeps what the policy file has."""
    max_lag: int = 0
    """Number of versions that the policy of a new episode may be behind the trained one, 0 or 1; a group that is
    carried over gets older with each iteration. With 1, the first episodes of the next iteration are run while the
    policy learns from this one."""
    sampling: Sampling = field(default_factory=Sampling)
    plan: PlanConfig = field(default_factory=PlanConfig)
    filters: FilterConfig = field(default_factory=FilterConfig)
    algorithm: PolicyGradientConfig = field(default_factory=PolicyGradientConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    workers: WorkersConfig = field(default_factory=WorkersConfig)
    seed: int = 0
    """Seed of all random numbers of the run."""
    eval_every: int = 20
    """Number of iterations between two evaluations."""
    evaluation: TaskEvaluationConfig = field(default_factory=lambda: TaskEvaluationConfig(sampling="sampled"))
    checkpoint_every: int = 5
    """Number of iterations between two checkpoints."""
    keep_checkpoints: int = 3
    """Number of the newest checkpoints that are kept."""
    save_policy_every: int | None = None
    """Number of iterations between two policies that are kept for good in policies/, whole and with their adapter; None
    keeps the newest policy alone."""
    sinks: tuple[SinkName, ...] = ()
    """Programs that receive the metrics besides metrics.jsonl: tensorboard, wandb."""
    device: str = AUTO
    """Device that torch trains on: cpu, cuda, cuda:1, or auto, which is a GPU where there is one and else the CPU."""
    threads: int | None = None
    """Number of CPU threads of torch; None: OMP_NUM_THREADS if it is set, else one per core, up to 8."""

    def __post_init__(self) -> None:
        for name in ("iterations", "max_empty", "eval_every", "checkpoint_every", "keep_checkpoints"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: expected a number from 1, got {getattr(self, name)}")
        if self.max_lag not in (0, 1):
            raise ConfigError(f"max_lag: expected 0 or 1, got {self.max_lag}; at most one wave is collected ahead")
        if self.save_policy_every is not None and self.save_policy_every < 1:
            raise ConfigError(f"save_policy_every: expected a number from 1, or None, got {self.save_policy_every}")
        check_threads(self.threads)
        if self.seed < 0:
            raise ConfigError(f"seed: expected 0 or more, got {self.seed}")


def default_config(kind: str, *, policy: str) -> OnPolicyConfig:
    """The defaults of a kind of run. GRPO and RLOO compare the episodes of a group and reject groups of one outcome;
    the others need no groups."""
    grouped = kind in ("grpo", "rloo")
    return OnPolicyConfig(
        policy=policy,
        algorithm=PolicyGradientConfig(adv_estimator=ESTIMATORS[kind]),
        plan=PlanConfig(n_samples=8 if grouped else 1),
        filters=FilterConfig(filter_accuracy=grouped),
    )

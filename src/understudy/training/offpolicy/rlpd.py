"""RLPD: reinforcement learning with prior data. Each batch mixes demonstrations and online experience.

The config of a run, and the parts that every way to run it shares: in one process (local_run.py), or as an actor and a
learner (actor.py, rlpd_learner.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from understudy.algorithms import CloningConfig, SACConfig
from understudy.core import NO_VERSION, Spec, StepSpec, Tree
from understudy.core.examples import random_tree
from understudy.envs.gymnasium_advice import how_to_mark_simulated
from understudy.envs.registry import open_world
from understudy.envs.teleop.takeover import ScriptedHuman, Takeover
from understudy.envs.world import World
from understudy.policies import ActorConfig, BlockPolicy, Inputs, Stats
from understudy.replay import Mixture, Sequences, Transitions
from understudy.replay.sample.batch_source import BatchShape
from understudy.training.data.run_episode import Act
from understudy.training.offpolicy.demo_online_mixture import Shards, open_demo_online_mixture
from understudy.training.offpolicy.steering import FrozenPolicy, SteeredWorld, frozen_policy
from understudy.training.runs.config import ConfigError
from understudy.training.runs.device import AUTO, choose_device
from understudy.training.runs.evaluate import EvaluationConfig, EvaluationResult, Evaluator, evaluate
from understudy.training.runs.fingerprint import digest_of_policy
from understudy.training.runs.metrics import SinkName
from understudy.training.runs.run import policy_path
from understudy.training.runs.threads import Threads, check_threads, use_threads

if TYPE_CHECKING:  # the config of a run is read without torch
    from understudy.algorithms import Cloning
    from understudy.policies import ActorPolicy

STATS_STEPS = 1024  # of demonstrations and of experience, from which inputs are normalized


@dataclass(frozen=True, kw_only=True)
class InterventionConfig:
    """Who takes over from the policy: nobody, or the world's script when the task makes no progress."""

    source: Literal["none", "script"] = "none"
    """Who takes over from the policy: none, or the world's script, which stands in for a human."""
    patience_steps: int = 15
    """Number of environment steps without progress on the task after which the script takes over."""
    burst_steps: int | None = None
    """Number of environment steps of a takeover; None lets it last to the end of the episode."""


def small_sac() -> SACConfig:
    """Small networks that learn fast, for tasks of some thousand steps with low-dimensional observations."""
    return SACConfig(
        actor=ActorConfig(hidden=(128, 128)),
        critic_hidden=(128, 128),
        actor_lr=1e-3,
        critic_lr=1e-3,
        temperature_lr=1e-3,
        tau=0.02,
        discount=0.95,
    )


@dataclass(frozen=True, kw_only=True)
class RLPDConfig:
    """A run of RLPD."""

    env: str = "toy:press_button?cameras=false&state=task"
    """World to train in, as `understudy env list` names it, with its options."""
    demos: str | None = None
    """Directory of a store with demonstrations; None uses the run's own store."""
    steps: int = 10_000
    """Number of environment steps of the whole run."""
    start_steps: int = 0
    """Number of environment steps with random actions before the first update; with a base policy whose noise is
    chosen, with the noise that it draws itself."""
    random_actions: bool = False
    """Allow random actions, and those of an untrained policy, in a world that is not simulated: a real robot moves."""
    updates_per_step: int = 2
    """Number of updates per environment step (the update-to-data ratio)."""
    batch_size: int = 128
    """Number of transitions in a batch."""
    n_step: int = 3
    """Number of rewards in the n-step return of a critic target; for a base policy whose noise is chosen, at least
    those of a block."""
    demo_weight: int = 1
    """Share of demonstrations in each batch, as a ratio to --online-weight."""
    online_weight: int = 1
    """Share of online experience in each batch, as a ratio to --demo-weight."""
    cloning_updates: int = 0
    """Number of behaviour cloning updates that the first policy gets from the demonstrations."""
    base_policy: str | None = None
    """Policy that stays as it is, and whose actions the actor learns to change, or whose noise it learns to choose: a
    file of `understudy sft`, or a run that has one. None trains an actor from nothing."""
    intervention: InterventionConfig = field(default_factory=InterventionConfig)
    seed: int = 0
    """Seed of all random numbers of the run."""
    eval_every: int = 2_000
    """Number of environment steps between two evaluations."""
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    checkpoint_every: int = 1_000
    """Number of environment steps between two checkpoints."""
    checkpoint_every_s: float = 120.0
    """Number of seconds after which a checkpoint is due even if fewer steps have passed."""
    keep_checkpoints: int = 3
    """Number of the newest checkpoints that are kept."""
    publish_every: int = 50
    """Number of updates between two policies that the learner publishes to the actors."""
    max_pending_updates: int | None = 2_000
    """Number of updates that the learner may be behind before actors wait for it; None lets actors never wait."""
    sinks: tuple[SinkName, ...] = ()
    """Programs that receive the metrics besides metrics.jsonl: tensorboard, wandb."""
    device: str = AUTO
    """Device that torch trains on: cpu, cuda, cuda:1, or auto, which is a GPU where there is one and else the CPU."""
    threads: int | None = None
    """Number of CPU threads of torch; None: OMP_NUM_THREADS if it is set, else one, or one per core for cameras."""
    sac: SACConfig = field(default_factory=small_sac)

    def __post_init__(self) -> None:
        minimum = {
            "steps": 1,
            "start_steps": 0,
            "updates_per_step": 1,
            "batch_size": 1,
            "n_step": 1,
            "demo_weight": 0,
            "online_weight": 1,
            "cloning_updates": 0,
            "seed": 0,
            "eval_every": 1,
            "checkpoint_every": 1,
            "keep_checkpoints": 1,
            "publish_every": 1,
        }
        for name, low in minimum.items():
            if getattr(self, name) < low:
                raise ConfigError(f"{name}: expected a number from {low}, got {getattr(self, name)}")
        check_threads(self.threads)
        if not self.checkpoint_every_s > 0:
            raise ConfigError(f"checkpoint_every_s: expected seconds above 0, got {self.checkpoint_every_s}")
        if self.max_pending_updates is not None and self.max_pending_updates < self.publish_every:
            raise ConfigError(
                f"max_pending_updates: expected at least publish_every ({self.publish_every}), got "
                f"{self.max_pending_updates}; actors would wait for a policy that is never published"
            )
        self._check_base_policy()
        if self.batch_size % self.sac.critic_steps:
            raise ConfigError(
                f"batch_size: expected a multiple of sac.critic_steps ({self.sac.critic_steps}), got {self.batch_size}"
            )

    def _check_base_policy(self) -> None:
        scale, bound = self.sac.actor.residual_scale, self.sac.noise_bound
        if (self.base_policy is None) != (scale is None and bound is None):
            raise ConfigError(
                f"base_policy: expected it together with sac.actor.residual_scale or sac.noise_bound, got "
                f"{self.base_policy!r}, {scale} and {bound}; add --sac.actor.residual-scale 0.5 to change its actions, "
                f"or --sac.noise-bound 1.5 to choose its noise, or leave all out"
            )
        if self.base_policy is None:
            return
        for name in ("cloning_updates",) if self.is_steering else ("start_steps", "cloning_updates"):
            if getattr(self, name):
                raise ConfigError(f"{name}: expected 0 with a base policy, which acts from the first step on")
        if self.demos is None and not self.is_steering:
            raise ConfigError(
                "demos: expected a store with demonstrations, got None; a base policy needs them in a store of their "
                "own, because its actions are added to a copy"
            )

    @property
    def is_steering(self) -> bool:
        """Whether the actor chooses the noise of the base policy (DSRL)."""
        return self.sac.noise_bound is not None

    @property
    def num_updates(self) -> int:
        """Updates of the whole run; the steps with random actions bring none."""
        return max(self.steps - self.start_steps, 1) * self.updates_per_step

    def open_mixture(
        self,
        store: Path | Shards,
        spec: StepSpec,
        on_wait: Callable[[str], None] | None = None,
        demos: Path | None = None,
        base: FrozenPolicy | None = None,
    ) -> Mixture[Any]:
        """Demonstrations and experience to learn from; see open_demo_online_mixture. `demos` replaces those of the
        config. The items are transitions, or sequences for a `base` that decides on blocks and sees whole images."""
        shape: BatchShape[Any] = Transitions(num_steps=self.n_step, discount=self.sac.discount)
        if base is not None:
            shape = Sequences(length=max(self.n_step, base.block_steps))
        return open_demo_online_mixture(
            store=store,
            demos=demos or (None if self.demos is None else Path(self.demos)),
            spec=spec,
            batch_size=self.batch_size,
            demo_weight=self.demo_weight,
            online_weight=self.online_weight,
            seed=self.seed,
            shape=shape,
            resize=self.inputs(spec).batch_resize if base is None else None,
            on_wait=on_wait,
        )

    def open_world(self) -> World:
        """The world to train in. With a base policy, its actions are in the observations, or noise decides on them."""
        world = open_world(self.env)
        try:
            self.evaluation.starts(world)  # raises now, and not after hours of training
            if self.base_policy is None:
                return world
            policy = self.load_base_policy(world.step_spec)
            if self.sac.noise_bound is not None:
                return SteeredWorld(world, policy, self.sac.noise_bound)
            from understudy.training.offpolicy.base_policy import BasePolicyWorld  # only now: it needs torch

            return BasePolicyWorld(world, policy)
        except BaseException:
            world.close()
            raise

    def load_frozen_policy(self, spec: StepSpec) -> FrozenPolicy | None:
        """The base policy whose noise is chosen, for a learner in a world with this spec; None if there is none."""
        if not self.is_steering:
            return None
        with open_world(self.env) as world:  # which alone knows the instruction
            instruction = world.task.instruction
        rows = self.batch_size // self.sac.critic_steps
        return frozen_policy(self.load_base_policy(spec), spec, instruction, batch_size=rows)

    def load_base_policy(self, spec: StepSpec) -> BlockPolicy:
        """The base policy, for a world with this spec."""
        from understudy.policies.load import load_block_policy

        policy: BlockPolicy = load_block_policy(self.base_policy_path, spec, device=choose_device(self.device).name)
        return policy

    @property
    def base_policy_path(self) -> Path:
        """The file or directory of the base policy; a run stands for its newest policy."""
        return policy_path(self.base_policy or "", option="base_policy")

    @property
    def base_policy_digest(self) -> str | None:
        """A digest of the base policy as it is on the disk now; None without one."""
        return None if self.base_policy is None else digest_of_policy(self.base_policy_path)

    def inputs(self, spec: StepSpec) -> Inputs:
        """The parts of an observation that the policy sees."""
        encoder = self.sac.actor.encoder
        return Inputs(spec.observation, encoder.inputs, encoder.image_size)

    def use_threads(self, spec: StepSpec) -> Threads:
        """Make torch use the threads that the config asks for, or those that pay for its network."""
        return use_threads(self.threads, large=bool(self.inputs(spec).cameras))

    def cloning(self, spec: StepSpec, stats: Stats) -> Cloning:
        """Behaviour cloning of an actor with the same network."""
        from understudy.algorithms import Cloning

        config = CloningConfig(actor=self.sac.actor, shift_pixels=self.sac.shift_pixels)
        return Cloning(config, spec, stats, seed=self.seed, device=self.device)


# ---- acting


def policy_act(
    policy: ActorPolicy, rng: np.random.Generator, *, deterministic: bool = False, world: World | None = None
) -> Act:
    """A policy as the function that `run_episode` calls; in a SteeredWorld it chooses noise."""

    def act(observation: Tree) -> tuple[Tree, int]:
        acted = policy.act(observation, rng=rng, deterministic=deterministic)
        return acted.action, acted.version

    return world.steered(act) if isinstance(world, SteeredWorld) else act


def actor_spec(world: World) -> StepSpec:
    """What an actor sees and chooses in a world: in a SteeredWorld, noise."""
    return world.noise_spec if isinstance(world, SteeredWorld) else world.step_spec


def evaluator_for(world: World, progress: Callable[[str], None] | None = None) -> Evaluator:
    """An evaluator that runs the episodes in a world of this process; `progress` is called at each step."""

    def evaluate_policy(policy: ActorPolicy, config: EvaluationConfig, videos: Path) -> EvaluationResult:
        greedy = policy_act(policy, np.random.default_rng(0), deterministic=True, world=world)

        def act(observation: Tree) -> tuple[Tree, int]:
            if progress is not None:
                progress("evaluating")
            return greedy(observation)

        return evaluate(world, act, config, seed=0, videos=videos)

    return evaluate_policy


def random_act(action: Spec, rng: np.random.Generator) -> Act:
    """Uniformly random actions within the bounds."""
    return lambda _: (random_tree(action, rng), NO_VERSION)


def allow_random_actions(config: RLPDConfig, world: World) -> bool:
    """Whether random actions may be executed; raises if the run must begin with some and they are not allowed."""
    if config.random_actions:
        return True
    if config.is_steering:  # not its actions, but its noise is random: as the base policy draws it itself
        return bool(config.start_steps) or config.demos is None
    if config.base_policy is not None:  # it acts from the first step on, with the first policy of the learner
        return False
    if world.simulated:
        return True
    if config.start_steps:
        raise ConfigError(
            f"start_steps: expected 0, because {config.env} is not simulated, got {config.start_steps} steps with "
            f"random actions; set it to 0, or ask for random actions with --random-actions; "
            f"if nothing real moves, {how_to_mark_simulated(world)}"
        )
    if not config.cloning_updates:
        raise ConfigError(
            f"cloning_updates: expected at least 1, because {config.env} is not simulated, got 0: the first policy "
            f"would be untrained, and its actions random; begin from demonstrations with --cloning-updates 1000, or "
            f"ask for random actions with --random-actions; if nothing real moves, {how_to_mark_simulated(world)}"
        )
    return False


def make_takeover(config: RLPDConfig, world: World) -> Takeover | None:
    """The script that takes over, or None if the run has no interventions."""
    if config.intervention.source == "none":
        return None
    human = ScriptedHuman(
        lambda: world.expert_action().action,
        lambda: world.expert_action().progress,
        patience_steps=config.intervention.patience_steps,
        burst_steps=config.intervention.burst_steps,
    )
    return Takeover(human, operator="script")

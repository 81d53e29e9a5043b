"""RLPD: reinforcement learning with prior data. Half of each batch is demonstrations, half is experience.

What a run is asked to do, and the parts that every way of running it shares: one process (local.py), or an actor and a
learner (actor.py, learner.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from understudy.algorithms import SAC, Cloning, CloningConfig, SACConfig
from understudy.core import NO_VERSION, Spec, StepSpec, TransitionBatch, Tree
from understudy.core.examples import random_tree
from understudy.envs.teleop.takeover import ScriptedHuman, Takeover
from understudy.envs.world import World
from understudy.policies import ActorConfig, ActorPolicy, Inputs, Stats
from understudy.replay import DEMO, Mixture, Transitions
from understudy.training.data.run_episode import Act
from understudy.training.offpolicy.demo_online_mixture import Shards, open_demo_online_mixture
from understudy.training.runs.config import ConfigError
from understudy.training.runs.evaluate import EvaluationConfig, Judge, Judged, evaluate
from understudy.training.runs.metrics import SinkName

STATS_STEPS = 1024  # of each view, whose numbers give the mean and spread


@dataclass(frozen=True, kw_only=True)
class HumanConfig:
    """Who may take over: nobody, or the world's script, which drives when the task does not come along."""

    by: Literal["nobody", "script"] = "nobody"
    patience_steps: int = 15
    burst_steps: int | None = None  # None: to the end of the episode


def small_sac() -> SACConfig:
    """For tasks of some thousand steps that are seen as numbers: small networks that learn fast."""
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
    """A run of RLPD. Counts are of environment steps unless they say otherwise."""

    env: str = "toy:press_button?cameras=false&state=task"
    demos: str | None = None  # a store with demonstrations; None: the run's own
    steps: int = 10_000  # in all
    start_steps: int = 0  # by chance, before the first update
    updates_per_step: int = 2
    batch_size: int = 128
    return_steps: int = 3  # real rewards in a target, before the critics' own word
    demo_weight: int = 1  # of demonstrations in a batch, beside
    online_weight: int = 1  # that of experience
    cloning_updates: int = 0  # of the first policy, from the demonstrations
    human: HumanConfig = field(default_factory=HumanConfig)
    seed: int = 0
    eval_every: int = 2_000
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    checkpoint_every: int = 1_000
    keep_checkpoints: int = 3
    publish_every: int = 50  # updates, between two policies that go to the actors
    max_behind: int | None = None  # updates that the learner may be behind before actors wait; None: they never do
    sinks: tuple[SinkName, ...] = ()
    device: str = "cpu"
    sac: SACConfig = field(default_factory=small_sac)

    def __post_init__(self) -> None:
        least = {
            "steps": 1,
            "start_steps": 0,
            "updates_per_step": 1,
            "batch_size": 1,
            "return_steps": 1,
            "demo_weight": 0,
            "online_weight": 1,
            "cloning_updates": 0,
            "seed": 0,
            "eval_every": 1,
            "checkpoint_every": 1,
            "keep_checkpoints": 1,
            "publish_every": 1,
        }
        for name, low in least.items():
            if getattr(self, name) < low:
                raise ConfigError(f"{name}: expected a number from {low}, got {getattr(self, name)}")
        if self.max_behind is not None and self.max_behind < self.publish_every:
            raise ConfigError(
                f"max_behind: expected at least publish_every ({self.publish_every}), got {self.max_behind}; "
                f"actors would wait for a policy that does not come"
            )
        if self.batch_size % self.sac.critic_steps:
            raise ConfigError(
                f"batch_size: expected a multiple of sac.critic_steps ({self.sac.critic_steps}), got {self.batch_size}"
            )

    @property
    def num_updates(self) -> int:
        """In all, after the steps by chance."""
        return max(self.steps - self.start_steps, 1) * self.updates_per_step

    def open_mixture(
        self, store: Path | Shards, spec: StepSpec, waiting: Callable[[str], None] | None = None
    ) -> Mixture[TransitionBatch]:
        """Demonstrations and experience to learn from; see open_demo_online_mixture."""
        return open_demo_online_mixture(
            store=store,
            demos=None if self.demos is None else Path(self.demos),
            spec=spec,
            batch_size=self.batch_size,
            demo_weight=self.demo_weight,
            online_weight=self.online_weight,
            seed=self.seed,
            shape=Transitions(num_steps=self.return_steps, discount=self.sac.discount),
            waiting=waiting,
        )

    def inputs(self, spec: StepSpec) -> Inputs:
        """What the policy sees of an observation."""
        return Inputs(spec.observation, self.sac.actor.encoder.inputs)

    def cloning(self, spec: StepSpec, stats: Stats) -> Cloning:
        """Behaviour cloning by an actor of the same shape."""
        config = CloningConfig(actor=self.sac.actor, shift_pixels=self.sac.shift_pixels)
        return Cloning(config, spec, stats, seed=self.seed, device=self.device)


# ---- the algorithm


def check_device(name: str) -> str:
    """The name of a device that torch can use here, or the sentence that says why not."""
    try:
        torch.zeros(1, device=name)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        first = str(error).partition("\n")[0]
        raise ConfigError(f"device: torch cannot use {name!r} here ({first}); use cpu") from None
    return name


def new_sac(config: RLPDConfig, spec: StepSpec, mixture: Mixture[TransitionBatch]) -> SAC:
    """A new one, with statistics of the stored steps; its actor is cloned from demonstrations if the config says so."""
    samplers = [sampler for sampler in mixture.samplers.values() if len(sampler)]
    stats = Stats.of_data(config.inputs(spec), (sampler.peek(STATS_STEPS).observation for sampler in samplers))
    sac = SAC(config.sac, spec, stats, seed=config.seed, device=config.device)
    if config.cloning_updates:
        cloning = config.cloning(spec, stats)
        for _ in range(config.cloning_updates):
            cloning.update(mixture.samplers[DEMO.name].sample(), report=False)
        sac.start_from(cloning.policy())
    return sac


def restored_sac(config: RLPDConfig, spec: StepSpec, state: Mapping[str, Any]) -> SAC:
    """The one that a state was taken of."""
    sac = SAC(config.sac, spec, Stats.none(config.inputs(spec)), seed=config.seed, device=config.device)
    sac.restore(state)
    return sac


# ---- acting


def policy_act(policy: ActorPolicy, rng: np.random.Generator, *, deterministic: bool = False) -> Act:
    """A policy as an episode sees it."""

    def act(observation: Tree) -> tuple[Tree, int]:
        acted = policy.act(observation, rng=rng, deterministic=deterministic)
        return acted.action, acted.version

    return act


def judge_in(world: World, progress: Callable[[str], None] | None = None) -> Judge:
    """Whoever judges policies in a world of this process; `progress` is told at each step."""

    def judge(policy: ActorPolicy, config: EvaluationConfig, films: Path) -> Judged:
        best = policy_act(policy, np.random.default_rng(0), deterministic=True)

        def act(observation: Tree) -> tuple[Tree, int]:
            if progress is not None:
                progress("evaluating")
            return best(observation)

        return Judged(evaluation=evaluate(world, act, config, seed=0, films=films), versions=world.versions())

    return judge


def random_act(action: Spec, rng: np.random.Generator) -> Act:
    """Chance, within the bounds."""
    return lambda _: (random_tree(action, rng), NO_VERSION)


def make_takeover(config: RLPDConfig, world: World) -> Takeover | None:
    """The scripted human of a run, if it has one."""
    if config.human.by == "nobody":
        return None
    human = ScriptedHuman(
        lambda: world.advise().action,
        lambda: world.advise().progress,
        patience_steps=config.human.patience_steps,
        burst_steps=config.human.burst_steps,
    )
    return Takeover(human, operator="script")

"""Runs that are small enough for tests: a tiny VLA in a world of two sides."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.sides import SidesWorld

from understudy.algorithms.onpolicy.policy_gradient import PolicyGradientConfig
from understudy.policies.vla import VLAConfig, VLAPolicy
from understudy.training.collection.group_filter import FilterConfig
from understudy.training.collection.task_start_plan import PlanConfig
from understudy.training.distributed.config import EngineConfig
from understudy.training.onpolicy.config import OnPolicyConfig, TaskEvaluationConfig, WorkersConfig

TINY = VLAConfig(
    block_steps=3,
    num_bins=8,
    patch=8,
    shuffle=2,
    vision_hidden=16,
    vision_layers=1,
    vision_heads=2,
    hidden=16,
    layers=1,
    heads=2,
    max_words=4,
)


def save_policy(path: Path, *, tasks: int = 2, seed: int = 0, config: VLAConfig = TINY) -> Path:
    """A policy that knows nothing."""
    world = SidesWorld(tasks=tasks)
    VLAPolicy.new(config, world.step_spec, [task.instruction for task in world.suite.tasks], seed=seed).save(path)
    return path


def make_config(policy: Path, *, tasks: int = 2, **changes: Any) -> OnPolicyConfig:
    """Two iterations of sixteen episodes; `algorithm` and others are dicts of what is different there."""
    config = OnPolicyConfig(
        policy=str(policy),
        env=f"tests.sides:SidesWorld?tasks={tasks}",
        iterations=2,
        plan=PlanConfig(n_samples=4, data_batch_size=16),
        filters=FilterConfig(accuracy_lower_bound=0.0, accuracy_upper_bound=1.0),
        algorithm=PolicyGradientConfig(ppo_mini_batch_size=16, ppo_micro_batch_size=5),
        engine=EngineConfig(learning_rate=1e-3),
        workers=WorkersConfig(num_parallel_envs=2),
        evaluation=TaskEvaluationConfig(episodes=4, sampling="sampled"),
        eval_every=100,
        checkpoint_every=1,
    )
    parts = {name: replace(getattr(config, name), **new) for name, new in changes.items() if isinstance(new, dict)}
    plain = {name: new for name, new in changes.items() if not isinstance(new, dict)}
    return replace(config, **parts, **plain)

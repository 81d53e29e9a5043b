"""Runs that are small enough for tests: a tiny VLA in a world of two sides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from tests.sides import SidesWorld

from understudy.algorithms.onpolicy.policy_gradient import PolicyGradientConfig
from understudy.core import Episode, EpisodeInfo, StepSpec
from understudy.envs.workers.outcomes import Stepped
from understudy.policies import BlockPolicy, Sampling
from understudy.policies.vla import VLAConfig, VLAPolicy
from understudy.training.collection.block_rows import block_spec, block_step, decisions
from understudy.training.collection.group_filter import FilterConfig
from understudy.training.collection.rollout import Rollout
from understudy.training.collection.task_start_plan import PlanConfig, Ticket
from understudy.training.distributed.config import EngineConfig
from understudy.training.distributed.ranks import Ranks, single_rank
from understudy.training.onpolicy.config import OnPolicyConfig, TaskEvaluationConfig, WorkersConfig
from understudy.training.onpolicy.onpolicy_run import OnPolicyRun
from understudy.training.onpolicy.policy_gradient_learner import PolicyGradientLearner
from understudy.training.onpolicy.rollout_exchange import RolloutExchange
from understudy.training.onpolicy.trainable_policy import TrainablePolicy
from understudy.training.runs.fingerprint import digest_of_arrays
from understudy.training.runs.run import Run

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


def train(path: Path, config: OnPolicyConfig) -> OnPolicyRun:
    """A run of GRPO in one process, to its end."""
    with OnPolicyRun(Run.create(path, "grpo", config)) as run:
        run.run()
    return run


def digest_of_weights(run: OnPolicyRun) -> str:
    return digest_of_arrays(run.policy.parameters())


def make_rollouts(
    policy: BlockPolicy, spec: StepSpec, instructions: Sequence[str], *, blocks: int = 2, seed: int = 0
) -> list[Rollout]:
    """Groups of two episodes in which the policy acts on random observations; one of each group succeeds."""
    rng = np.random.default_rng(seed)
    rows = block_spec(spec, policy)
    found = []
    for number, instruction in enumerate(text for text in instructions for _ in range(2)):
        seen = [
            {
                path: rng.integers(0, 255, leaf.fixed_shape).astype(leaf.dtype)
                for path, leaf in spec.observation.flat.items()
            }
            for _ in range(blocks + 1)
        ]
        steps = []
        for at in range(blocks):
            batch = {path: value[None] for path, value in seen[at].items()}
            acted = policy.act(batch, [instruction], rngs=[np.random.default_rng([number, at])], sampling=Sampling())
            (decision,) = decisions(acted, 1, rows, clip=True)
            last = np.zeros(policy.block_steps, bool)
            last[-1] = at + 1 == blocks
            stepped = Stepped(
                observation=None,
                reward=np.zeros(policy.block_steps),
                terminated=last,
                truncated=np.zeros_like(last),
                success=last,
                info={},
            )
            steps.append(block_step(seen[at], decision, stepped, cut=False))
        info = EpisodeInfo(
            task=instruction, instruction=instruction, init_state=0, group=str(number // 2), success=bool(number % 2)
        )
        ticket = Ticket(
            number=number,
            iteration=0,
            task=instruction,
            start=0,
            seed=number,
            group=number // 2,
            slot=number % 2,
            world_seed=number // 2,
        )
        episode = Episode.from_steps(rows, steps, seen[-1], info)
        found.append(Rollout(ticket=ticket, episode=episode, failure=None, attempts=1))
    return found


def make_learner(
    policy: TrainablePolicy,
    *,
    engine: EngineConfig | None = None,
    ranks: Ranks | None = None,
    failures: Path | None = None,
    **options: Any,
) -> PolicyGradientLearner:
    """A learner of one process; `options` are those of the algorithm."""
    config = PolicyGradientConfig(**{"ppo_mini_batch_size": 4, "ppo_micro_batch_size": 2, **options})
    exchange = RolloutExchange(ranks or single_rank("cpu"))
    return PolicyGradientLearner(
        policy, config, engine or EngineConfig(), exchange, Sampling(), seed=0, failures=failures
    )


def learn(learner: PolicyGradientLearner, rollouts: Sequence[Rollout], number: int = 0) -> dict[str, float]:
    """One batch, as a run would have it."""
    exchange = learner._exchange
    added = exchange.add(rollouts)
    return learner.learn([added[rollout.ticket.number] for rollout in rollouts], number)

"""SAC learns: a point in the plane, a reward at the goal only, episodes that time out, and five demonstrations."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.unit.algorithms.batches import random_batch

from understudy.algorithms import SAC, SACConfig
from understudy.core import ArraySpec, Spec, StepSpec
from understudy.policies import ActorConfig, ActorPolicy, Inputs, Stats

SPEC = StepSpec(
    observation=Spec({"position": ArraySpec(shape=(2,), dtype="float32")}),
    action=Spec(ArraySpec(shape=(2,), dtype="float32", low=-1.0, high=1.0)),
)
GOAL, REACH, MAX_STEPS = np.float32([0.6, 0.6]), 0.2, 25
STATS = Stats.none(Inputs(SPEC.observation))


def moved(position: Any, action: Any) -> tuple[Any, float, bool]:
    position = np.clip(position + 0.2 * action, -1, 1).astype(np.float32)
    there = bool(np.linalg.norm(position - GOAL) < REACH)
    return position, float(there), there


def start(rng: np.random.Generator) -> Any:
    while True:
        position = rng.uniform(-1, 1, 2).astype(np.float32)
        if np.linalg.norm(position - GOAL) > 0.5:
            return position


def demonstrations(rng: np.random.Generator) -> list[tuple[Any, Any, float, Any, bool]]:
    """Five straight ways from the left lower corner: cloning them says nothing of the rest of the plane."""
    rows = []
    for _ in range(5):
        position, there = rng.uniform(-1, -0.5, 2).astype(np.float32), False
        while not there:
            action = np.clip((GOAL - position) / 0.2 + 0.3 * rng.normal(size=2), -1, 1).astype(np.float32)
            after, reward, there = moved(position, action)
            rows.append((position, action, reward, after, there))
            position = after
    return rows


def success(policy: ActorPolicy, rng: np.random.Generator, episodes: int = 100) -> float:
    positions = np.stack([start(rng) for _ in range(episodes)])
    finished = np.zeros(episodes, bool)
    for _ in range(MAX_STEPS):
        actions = policy.act({"position": positions}, rng=rng).action
        for index in np.flatnonzero(~finished):
            positions[index], _, finished[index] = moved(positions[index], actions[index])
    return float(finished.mean())


def learn(num_demonstrations: int, num_steps: int) -> float:
    rng = np.random.default_rng(0)
    config = SACConfig(
        actor=ActorConfig(hidden=(32, 32)),
        critic_hidden=(64, 64),
        discount=0.9,
        tau=0.02,
        actor_lr=1e-3,
        critic_lr=1e-3,
        temperature_lr=1e-3,
    )
    sac = SAC(config, SPEC, STATS, seed=0)
    demos = demonstrations(rng)[:num_demonstrations]
    online: list[tuple[Any, Any, float, Any, bool]] = []
    position, age, policy = start(rng), 0, sac.policy()
    for step in range(num_steps):
        action = policy.act({"position": position}, rng=rng).action
        after, reward, there = moved(position, action)
        online.append((position, action, reward, after, there))
        position, age = after, age + 1
        if there or age == MAX_STEPS:
            position, age = start(rng), 0
        if step >= 64:
            rows = [online[i] for i in rng.integers(len(online), size=64 if not demos else 32)]
            rows += [demos[i] for i in rng.integers(len(demos), size=32)] if demos else []
            before, actions, rewards, afters, ends = (np.array(column) for column in zip(*rows, strict=True))
            sac.update(
                random_batch(
                    SPEC,
                    64,
                    observation={"position": before},
                    action=actions,
                    reward=rewards.astype(np.float32),
                    next_observation={"position": afters},
                    terminated=ends,
                    truncated=np.zeros(64, bool),
                ),
                report=False,
            )
            policy = sac.policy() if step % 10 == 0 else policy
    return success(sac.policy(), np.random.default_rng(1))


@pytest.mark.nightly  # a learning run
def test_from_five_demonstrations_of_one_corner_it_learns_the_whole_plane() -> None:
    untrained = SAC(SACConfig(), SPEC, STATS, seed=0).policy()
    assert success(untrained, np.random.default_rng(1)) < 0.4
    assert learn(num_demonstrations=1000, num_steps=1500) > 0.9

"""Specs, random batches and small algorithms that the tests of policies and algorithms share."""

from __future__ import annotations

from typing import Any

import numpy as np

from understudy.algorithms import SAC, SACConfig
from understudy.core import ArraySpec, Spec, StepSpec, TransitionBatch
from understudy.core import tree as trees
from understudy.policies import ActorConfig, EncoderConfig, Gripper, Inputs, Stats

ACTION = Spec(ArraySpec(shape=(3,), dtype="float32", low=(-1.0, -1.0, -1.0), high=(1.0, 1.0, 1.0)))
STATE = StepSpec(observation=Spec({"state": ArraySpec(shape=(5,), dtype="float32")}), action=ACTION)
CAMERAS = StepSpec(
    observation=Spec(
        {
            "front": ArraySpec(shape=(16, 16, 3), dtype="uint8"),
            "wrist": ArraySpec(shape=(12, 16, 1), dtype="uint8"),
            "state": ArraySpec(shape=(5,), dtype="float32"),
        }
    ),
    action=ACTION,
)
GRIPPER = Gripper(values=(-1.0, 0.0, 1.0), epsilon=0.2)


def small_actor(**options: Any) -> ActorConfig:
    return ActorConfig(**{"hidden": (16, 16), "encoder": EncoderConfig(filters=(4, 8), latent=6), **options})


def small_sac(spec: StepSpec = STATE, *, seed: int = 0, actor: ActorConfig | None = None, **options: Any) -> SAC:
    config = SACConfig(actor=actor or small_actor(), **{"critic_hidden": (16, 16), **options})
    return SAC(config, spec, Stats.none(Inputs(spec.observation)), seed=seed)


def random_tree(spec: Spec, size: int, rng: np.random.Generator) -> Any:
    def draw(leaf: ArraySpec) -> Any:
        if leaf.dtype == "uint8":
            return rng.integers(0, 256, (size, *leaf.fixed_shape), dtype=np.uint8)
        return rng.uniform(-1, 1, (size, *leaf.fixed_shape)).astype(leaf.dtype)

    return trees.map_leaves(draw, spec.tree)


def random_batch(spec: StepSpec = STATE, size: int = 32, seed: int = 0, **fields: Any) -> TransitionBatch:
    rng = np.random.default_rng(seed)
    drawn: dict[str, Any] = {
        "observation": random_tree(spec.observation, size, rng),
        "action": random_tree(spec.action, size, rng),
        "reward": rng.random(size).astype(np.float32),
        "next_observation": random_tree(spec.observation, size, rng),
        "terminated": rng.random(size) < 0.2,
        "truncated": rng.random(size) < 0.2,
        "num_steps": np.ones(size, np.int32),
        "source": np.zeros(size, np.uint8),
        "policy_version": np.zeros(size, np.int64),
        "proposal": random_tree(spec.action, size, rng),
        "has_proposal": np.zeros(size, bool),
        "extras": {},
        "episode": np.zeros(size, np.int64),
        "index": np.zeros(size, np.int32),
        "weight": np.ones(size, np.float32),
    }
    return TransitionBatch(**{**drawn, **fields})


def same_tree(a: Any, b: Any) -> bool:
    """Whether two trees have the same paths and the same bits."""
    a, b = trees.flatten(a), trees.flatten(b)
    return list(a) == list(b) and all(np.array_equal(a[path], b[path]) for path in a)

"""Canonical specs and episodes: small, exact and made from a seed, for tests, benchmarks and the crash test."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from understudy.core.codec import Png
from understudy.core.episode import Episode, EpisodeInfo
from understudy.core.spec import ArraySpec, Spec, text
from understudy.core.step import Source, Step, StepSpec
from understudy.core.tree import Tree, map_leaves


def robot_spec(size: int = 128) -> StepSpec:
    """Two cameras, 20 numbers of state and a 7-dim action: the usual arm."""
    camera = ArraySpec(shape=(size, size, 3), dtype="uint8")
    return StepSpec(
        observation=Spec({"wrist_1": camera, "wrist_2": camera, "state": ArraySpec(shape=(20,), dtype="float32")}),
        action=Spec(ArraySpec(shape=(7,), dtype="float32", low=-1.0, high=1.0)),
    )


def small_spec() -> StepSpec:
    """An observation of four numbers and an action of two: rows of a few bytes."""
    return StepSpec(
        observation=Spec(ArraySpec(shape=(4,), dtype="float32")),
        action=Spec(ArraySpec(shape=(2,), dtype="float32")),
    )


def nested_spec() -> StepSpec:
    """Nested observation, action and extras, several dtypes, a hybrid action, and a policy's log-prob and value."""
    return StepSpec(
        observation=Spec(
            {
                "cameras": {
                    "front": ArraySpec(shape=(8, 8, 3), dtype="uint8"),
                    "depth": ArraySpec(shape=(8, 8), dtype="uint16"),
                },
                "arm": {"pose": ArraySpec(shape=(7,), dtype="float64"), "touch": ArraySpec(shape=(), dtype="bool")},
            }
        ),
        action=Spec(
            {
                "arm": ArraySpec(shape=(6,), dtype="float32", low=-1.0, high=1.0),
                "gripper": ArraySpec(shape=(), dtype="int64", low=0, high=2),
            }
        ),
        extras=Spec({"log_prob": ArraySpec(shape=(), dtype="float32"), "value": ArraySpec(shape=(), dtype="float16")}),
    )


def text_spec() -> StepSpec:
    """Text, an encoded image and a list of tokens: fields whose size differs from row to row."""
    return StepSpec(
        observation=Spec(
            {
                "prompt": text(),
                "jpeg": ArraySpec(shape=(None,), dtype="uint8"),
                "state": ArraySpec(shape=(3,), dtype="float32"),
            }
        ),
        action=Spec(ArraySpec(shape=(None, 4), dtype="int32")),
        extras=Spec({"thought": text()}),
    )


def depth_camera_spec() -> StepSpec:
    """A camera and its depth, stored as PNG: encoded, and the same when they are read."""
    return StepSpec(
        observation=Spec(
            {
                "colour": ArraySpec(shape=(12, 16, 3), dtype="uint8", codec=Png()),
                "depth": ArraySpec(shape=(12, 16), dtype="uint16", codec=Png()),
            }
        ),
        action=Spec(ArraySpec(shape=(2,), dtype="float32")),
    )


def random_value(leaf: ArraySpec, rng: np.random.Generator) -> Any:
    """A value that fits the leaf."""
    if leaf.dtype == "str":
        return "".join(rng.choice(list("abc åß猫🤖 "), rng.integers(0, 12)))
    shape = [int(rng.integers(0, 9)) if size is None else size for size in leaf.shape]
    dtype = np.dtype(leaf.dtype)
    if dtype.kind == "b":
        return rng.random(shape) < 0.5 if shape else np.bool_(rng.random() < 0.5)
    low, high = (bound.astype(np.float64) for bound in leaf.limits)
    low = np.where(np.isfinite(low), low, np.minimum(high, 0.0) - 100.0)
    high = np.where(np.isfinite(high), high, np.maximum(low, 0.0) + 100.0)
    if dtype.kind in "iu":
        exact = 2**53  # up to here float64 holds every integer
        least, most = max(np.iinfo(dtype).min, -exact), min(np.iinfo(dtype).max, exact)
        first, last = (np.clip(x, least, most).astype(np.int64) for x in (np.ceil(low), np.floor(high)))
        whole = rng.integers(first, last + 1, shape or None)
        return whole.astype(dtype) if shape else dtype.type(whole)
    return rng.uniform(low, high, shape).astype(dtype) if shape else dtype.type(rng.uniform(low, high))


def random_tree(spec: Spec, rng: np.random.Generator) -> Tree:
    return map_leaves(lambda leaf: random_value(leaf, rng), spec.tree)


def random_steps(
    spec: StepSpec, num_steps: int, seed: int, *, terminated: bool = True, human: bool = True
) -> tuple[list[Step], Tree]:
    """`num_steps` steps and a last observation; with `human`, bursts of takeover that keep the policy's proposal."""
    rng = np.random.default_rng(seed)
    steps = []
    for index in range(num_steps):
        takeover = human and (index // 3) % 4 == 2
        last = index == num_steps - 1
        steps.append(
            Step(
                observation=random_tree(spec.observation, rng),
                action=random_tree(spec.action, rng),
                reward=float(np.float32(rng.normal())),
                terminated=last and terminated,
                truncated=last and not terminated,
                source=Source.HUMAN if takeover else Source.POLICY,
                policy_version=seed * 10 + index // 10,
                proposal=random_tree(spec.action, rng) if takeover else None,
                extras=random_tree(spec.extras, rng),
            )
        )
    return steps, random_tree(spec.observation, rng)


def random_episode(spec: StepSpec, num_steps: int, seed: int, *, terminated: bool = True) -> Episode:
    steps, last_observation = random_steps(spec, num_steps, seed, terminated=terminated)
    info = EpisodeInfo(
        task=f"task-{seed % 3}",
        instruction="put the red block on the plate, s'il vous plaît",
        init_state=seed % 7,
        seed=seed,
        group=f"group-{seed // 4}",
        actor="actor-0",
        operator="ada" if num_steps > 6 else None,
        success=terminated,
        labels={"colour": "red"},
        kind="correction" if num_steps > 6 else "practice",
    )
    return Episode.from_steps(spec, steps, last_observation, info)


# name: the spec and an episode of it
CANONICAL: dict[str, Callable[[], tuple[StepSpec, Episode]]] = {
    "images": lambda: _with(robot_spec(16), 12, 1),
    "nested": lambda: _with(nested_spec(), 9, 2),
    "text": lambda: _with(text_spec(), 10, 3),
    "encoded": lambda: _with(depth_camera_spec(), 11, 7),
    "one_step": lambda: _with(small_spec(), 1, 4),
    "truncated": lambda: _with(small_spec(), 20, 5, terminated=False),
    "long": lambda: _with(small_spec(), 3000, 6),
}


def _with(spec: StepSpec, num_steps: int, seed: int, terminated: bool = True) -> tuple[StepSpec, Episode]:
    return spec, random_episode(spec, num_steps, seed, terminated=terminated)

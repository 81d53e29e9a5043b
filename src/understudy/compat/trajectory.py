"""Parses a trajectory of RLinf: checked flat arrays [T, B, ...] by path, and the step at each position."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from understudy.compat.arrays import tree_to_numpy
from understudy.core import NO_VERSION, ArraySpec, Source, Spec, SpecError, Step, StepSpec
from understudy.core import tree as trees
from understudy.core.spec import describe
from understudy.core.tree import Tree

Array = np.ndarray[Any, Any]

_BEFORE = ("terminations", "truncations", "dones")  # may have a row for the reset of each epoch, before its steps
_AFTER = ("prev_values",)  # may have a row for the end of each epoch, after its steps
_LABELS = ("max_episode_length", "model_weights_id")
_STEP_FIELDS = ("curr_obs", "next_obs", "actions", "rewards")


@dataclass(frozen=True, kw_only=True)
class Trajectory:
    """T steps of each of B environments; an episode ends where an environment was reset."""

    arrays: dict[str, Array]  # [T, B, ...] by path, for example curr_obs/states
    labels: dict[str, str]
    length: int  # T
    batch: int  # B

    @property
    def num_steps(self) -> int:
        return self.length * self.batch

    def spec(self) -> StepSpec:
        """The spec of its steps."""
        leaves = {path: ArraySpec(shape=array.shape[2:], dtype=array.dtype.name) for path, array in self.arrays.items()}
        extras = {path: leaf for path, leaf in leaves.items() if _top(path) not in _STEP_FIELDS}
        return StepSpec(
            observation=Spec(trees.unflatten(trees.below(leaves, "curr_obs"))),
            action=Spec(leaves["actions"]),
            reward=leaves["rewards"],
            extras=Spec(trees.unflatten(extras) if extras else {}),
        )

    def step(self, time: int, column: int) -> Step:
        row = {path: array[time, column] for path, array in self.arrays.items()}
        terminated, truncated = _ends(row)
        return Step(
            observation=trees.unflatten(trees.below(row, "curr_obs")),
            action=row["actions"],
            reward=row["rewards"],
            terminated=terminated,
            truncated=truncated,
            source=Source.HUMAN if np.any(row.get("intervene_flags", False)) else Source.POLICY,
            policy_version=_version(row.get("versions")),
            extras=trees.unflatten({path: leaf for path, leaf in row.items() if _top(path) not in _STEP_FIELDS}),
        )

    def next_observation(self, time: int, column: int) -> Tree:
        return trees.unflatten(
            {path: array[time, column] for path, array in trees.below(self.arrays, "next_obs").items()}
        )


def parse_trajectory(trajectory: Any, where: str) -> Trajectory:
    """Parse a mapping, or an object with attributes; fields that are None are left out."""
    arrays: dict[str, Any] = {}
    labels: dict[str, str] = {}
    for name, value in (trajectory if isinstance(trajectory, Mapping) else vars(trajectory)).items():
        if name in _LABELS and isinstance(value, int | str):
            labels[name] = str(value)
        elif value is not None:
            arrays |= trees.flatten(tree_to_numpy(value, name), name)
    for path, array in arrays.items():
        if not isinstance(array, np.ndarray) or array.ndim < 2 or array.dtype.kind not in "bfiu":
            raise SpecError(f"{where}/{path}: expected an array [T, B, ...], got {describe(array)}; leave it out")
    for name in ("actions", "rewards", "curr_obs", "next_obs"):
        if not any(_top(path) == name for path in arrays):
            raise SpecError(f"{where}/{name}: expected in every trajectory, got nothing; add it")
    length, batch = arrays["actions"].shape[:2]
    if not length * batch:
        raise SpecError(f"{where}/actions: expected at least one step, got {describe(arrays['actions'])}; leave it out")
    for path, array in arrays.items():
        arrays[path] = array = _without_edges(array, length, path)
        if array.shape[:2] != (length, batch):
            raise SpecError(f"{where}/{path}: expected [{length}, {batch}, ...] as actions have, got {describe(array)}")
    _check_next(arrays, where)
    if not np.isfinite(arrays["rewards"]).all():
        raise SpecError(f"{where}/rewards: expected finite numbers, got others; check the environment")
    return Trajectory(arrays=arrays, labels=labels, length=length, batch=batch)


def check_same_fields(found: StepSpec, wanted: StepSpec, where: str) -> None:
    """Refuse a trajectory whose fields differ from those before it."""
    theirs, ours = _by_rlinf_names(found), _by_rlinf_names(wanted)
    for path in sorted(theirs.keys() | ours.keys()):
        if theirs.get(path) != ours.get(path):
            raise SpecError(
                f"{where}/{path}: expected {ours.get(path, 'no such field')} as in the first trajectory, "
                f"got {theirs.get(path, 'nothing')}; use another buffer for other fields"
            )


def _by_rlinf_names(spec: StepSpec) -> dict[str, ArraySpec]:
    return {
        **dict(spec.observation.leaves("curr_obs")),
        **dict(spec.action.leaves("actions")),
        **dict(spec.extras.leaves()),
        "rewards": spec.reward,
    }


def _top(path: str) -> str:
    return path.partition(trees.SEPARATOR)[0]


def _without_edges(array: Array, length: int, path: str) -> Array:
    """The rows that belong to steps. Fields that are known between steps have one row more per epoch."""
    extra = len(array) - length
    if path not in _BEFORE + _AFTER or extra < 1 or length % extra:
        return array
    epochs = array.reshape(extra, length // extra + 1, *array.shape[1:])
    kept: Array = epochs[:, 1:] if path in _BEFORE else epochs[:, :-1]
    return kept.reshape(length, *array.shape[1:])


def _check_next(arrays: dict[str, Array], where: str) -> None:
    now, then = trees.below(arrays, "curr_obs"), trees.below(arrays, "next_obs")
    for path in sorted(now.keys() | then.keys()):
        a, b = now.get(path), then.get(path)
        if a is None or b is None or a.shape != b.shape or a.dtype != b.dtype:
            raise SpecError(
                f"{where}/next_obs/{path}: expected {'no such field' if a is None else describe(a)} as in curr_obs, "
                f"got {'nothing' if b is None else describe(b)}; give both the same fields"
            )


def _ends(row: Mapping[str, Any]) -> tuple[bool, bool]:
    """`terminated` and `truncated`; a step of several actions ends if one of its actions does."""
    terminated, truncated, ended = (bool(np.any(row.get(name, False))) for name in _BEFORE)
    if ended and not terminated and not truncated:
        terminated = "terminations" not in row
        truncated = not terminated
    return terminated, truncated


def _version(versions: Any) -> int:
    """The policy's version, if the field holds one whole number."""
    values = np.unique(versions) if versions is not None else np.zeros(0)
    return int(values[0]) if len(values) == 1 and values[0] == np.floor(values[0]) else NO_VERSION

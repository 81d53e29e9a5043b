"""Converts values of transitions to a StepSpec, and infers the spec from a transition."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from understudy.core import ArraySpec, Source, Spec, Step, StepSpec, text
from understudy.core import tree as trees
from understudy.core.spec import describe
from understudy.core.tree import Tree
from understudy.formats.format import FormatError

UNDERSTUDY = "understudy"  # infos/understudy/...: fields that HIL-SERL does not have
FIELDS = ("observations", "actions", "next_observations", "rewards", "masks", "dones", "infos")
GRASP_PENALTY = "grasp_penalty"  # in the transition, or in its infos


def part_of(fields: dict[str, Any], name: str) -> dict[str, Any]:
    """The fields below a name, without empty dicts."""
    return {path: leaf for path, leaf in trees.below(fields, name).items() if not (isinstance(leaf, dict) and not leaf)}


def spec_of(fields: dict[str, Any], floats: str, stack: str) -> StepSpec:
    """Infer the spec of steps from a transition."""

    def leaves(name: str, stacked: str) -> Spec:
        flat = {
            path: _leaf(leaf, trees.join(name, path), floats, stacked) for path, leaf in part_of(fields, name).items()
        }
        return Spec(trees.unflatten(flat))

    extras = {name: value for name, value in fields.items() if name not in FIELDS and trees.SEPARATOR not in name}
    if f"infos/{GRASP_PENALTY}" in fields:
        extras[GRASP_PENALTY] = fields[f"infos/{GRASP_PENALTY}"]
    numbers = {name: value for name, value in extras.items() if np.asarray(value).dtype.kind in "biuf"}
    return StepSpec(
        observation=leaves("observations", stack),
        action=leaves("actions", "keep"),
        extras=Spec({name: _leaf(value, name, floats, "keep") for name, value in numbers.items()}),
    )


def _leaf(value: Any, path: str, floats: str, stack: str) -> ArraySpec:
    if isinstance(value, str):
        return text()
    array = _array(value, path)
    dtype = (
        "float32" if array.dtype.kind == "f" and array.dtype.itemsize == 8 and floats == "float32" else array.dtype.name
    )
    if stack == "last":
        if array.ndim < 2:
            raise FormatError(
                f"{path}: expected frames that are stacked, [n, ...], got {describe(array)}; use stack=keep"
            )
        return ArraySpec(shape=array.shape[1:], dtype=dtype)
    return ArraySpec(shape=array.shape, dtype=dtype)


def _array(value: Any, path: str) -> np.ndarray[Any, Any]:
    if isinstance(value, bool | int | float | np.ndarray | np.generic):
        try:
            array = np.asarray(value)
        except OverflowError:
            array = np.asarray(None)
        if array.dtype.kind in "biuf":
            return array
    raise FormatError(f"{path}: expected an array of numbers, a number or text, got {type(value).__name__}; convert it")


class Values:
    """Converts values to the dtypes of a spec, and refuses what does not fit."""

    def __init__(self, spec: StepSpec, floats: str, stack: str):
        self._spec, self._floats, self._stack = spec, floats, stack

    def tree(self, spec: Spec, fields: dict[str, Any], name: str) -> Tree:
        flat = part_of(fields, name) if name else fields
        found = {}
        for path, value in flat.items():
            leaf = spec.flat.get(path)
            if leaf is None:
                raise FormatError(
                    f"{trees.join(name, path)}: the first transition has no such field; are these files of one task?"
                )
            stacked = self._stack == "last" and spec is self._spec.observation
            found[path] = self.value(leaf, value, trees.join(name, path), stacked=stacked)
        for path in spec.flat:
            if path not in found:
                raise FormatError(f"{trees.join(name, path)}: the first transition has it, but this one does not")
        return trees.unflatten(found)

    def value(self, leaf: ArraySpec, value: Any, path: str, *, stacked: bool = False) -> Any:
        if leaf.dtype == "str":
            return leaf.check(value, path)
        array = _array(value, path)
        if stacked and array.ndim:
            array = array[-1]
        if array.dtype != leaf.numpy_dtype:
            rounds = self._floats == "float32" and leaf.dtype == "float32" and array.dtype == np.float64
            if not rounds and not np.can_cast(array.dtype, leaf.numpy_dtype, "safe"):
                advice = (
                    "read with floats=float32" if array.dtype.kind == leaf.numpy_dtype.kind == "f" else "convert it"
                )
                raise FormatError(f"{path}: the first transition has {leaf}, and this one {describe(array)}; {advice}")
            with np.errstate(over="ignore"):
                array = array.astype(leaf.numpy_dtype)
        return leaf.check(array, path)

    def number(self, value: Any, path: str) -> float:
        array = _array(value, path)
        if array.size != 1:
            raise FormatError(f"{path}: expected one number, got {describe(array)}")
        return float(array.item())

    def extras(self, fields: dict[str, Any]) -> Tree:
        found = {}
        for name, leaf in self._spec.extras.flat.items():
            value = fields.get(name, fields.get(f"infos/{name}"))
            if value is None:
                raise FormatError(f"{name}: the first transition has it, but this one does not")
            found[name] = self.value(leaf, value, name)
        return found

    # ---- files written by Understudy

    def understudy_step(self, fields: dict[str, Any]) -> Step:
        """Read a step of a file that Understudy wrote, including the fields that HIL-SERL does not have."""
        own = trees.below(fields, f"infos/{UNDERSTUDY}")
        flags = own.get("step")
        if not isinstance(flags, tuple) or len(flags) != 5 or not all(type(flag) in (int, bool) for flag in flags):
            raise FormatError(f"infos/{UNDERSTUDY}/step: expected five numbers; the file is damaged")
        source, policy_version, terminated, truncated, has_proposal = flags
        if source not in list(Source) or not -(2**63) <= policy_version < 2**63:
            raise FormatError(f"infos/{UNDERSTUDY}/step: {flags} is not a step; the file is damaged")
        return Step(
            observation=self.tree(self._spec.observation, fields, "observations"),
            action=self.tree(self._spec.action, fields, "actions"),
            reward=self._understudy_reward(fields["rewards"]),
            terminated=bool(terminated),
            truncated=bool(truncated),
            source=Source(source),
            policy_version=policy_version,
            proposal=self.tree(self._spec.action, fields, f"infos/{UNDERSTUDY}/proposal") if has_proposal else None,
            extras=self.tree(self._spec.extras, fields, f"infos/{UNDERSTUDY}/extras") if self._spec.extras.flat else {},
        )

    def _understudy_reward(self, reward: Any) -> Any:
        """The reward as it was written, also if the spec has another shape or dtype than float32 []."""
        if not isinstance(reward, bool | int | float | np.ndarray):
            raise FormatError(f"rewards: expected a number, got {type(reward).__name__}; the file is damaged")
        return reward


def understudy_spec(fields: dict[str, Any]) -> StepSpec:
    given = fields.get(f"infos/{UNDERSTUDY}/spec")
    try:
        return StepSpec.from_json(json.loads(given if isinstance(given, str) else ""))
    except (TypeError, ValueError, LookupError, AttributeError, RecursionError) as error:
        raise FormatError(f"infos/{UNDERSTUDY}/spec: {error}; the file is damaged") from None

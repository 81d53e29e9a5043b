"""Step: one environment step. StepSpec: the shapes, dtypes and bounds of its fields."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import cached_property
from typing import Any

import numpy as np

from understudy.core import tree as trees
from understudy.core.codec import Codec
from understudy.core.errors import SpecError
from understudy.core.spec import ArraySpec, Spec, canonical_json, describe
from understudy.core.tree import Tree

NO_VERSION = -1  # policy_version of a step in which no published policy took part


class Source(IntEnum):
    """Who chose the action that was executed. The numbers are in stored files and never change."""

    POLICY = 0
    HUMAN = 1
    SCRIPT = 2
    RANDOM = 3


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Step:
    """An observation, the action executed on it, its outcome, and who chose the action.

    `proposal` is the action that the policy proposed, if it was asked; when the policy itself acted it may be left
    out. `terminated` says that the task ended here; `truncated` that only the episode did (a time limit).
    """

    observation: Tree
    action: Tree
    reward: float
    terminated: bool = False
    truncated: bool = False
    source: Source = Source.POLICY
    policy_version: int = NO_VERSION
    proposal: Tree | None = None
    extras: Tree = field(default_factory=dict)

    @property
    def last(self) -> bool:
        """Whether the episode ends after this step."""
        return self.terminated or self.truncated


@dataclass(frozen=True, kw_only=True)
class StepSpec:
    """The fields of every step of a writer: observation, action, extras (such as log-prob) and the reward."""

    observation: Spec
    action: Spec
    extras: Spec = Spec({})  # noqa: RUF009 (a frozen value)
    reward: ArraySpec = ArraySpec(shape=(), dtype="float32")  # noqa: RUF009

    def __post_init__(self) -> None:
        for name in ("observation", "action"):
            if not getattr(self, name).flat:
                raise SpecError(f"{name}: expected at least one field, got none; add one to the spec")
        if self.reward.ragged:
            raise SpecError(f"reward: expected a fixed shape, got {self.reward}; use float32 []")

    @cached_property
    def columns(self) -> dict[str, ArraySpec]:
        """The flat fields of one row, in the order in which they are written."""
        flag = ArraySpec(shape=(), dtype="bool")
        return {
            **dict(self.observation.leaves("observation")),
            **dict(self.action.leaves("action")),
            **dict(self.action.leaves("proposal")),
            **dict(self.extras.leaves("extras")),
            "reward": self.reward,
            "terminated": flag,
            "truncated": flag,
            "source": ArraySpec(shape=(), dtype="uint8"),
            "policy_version": ArraySpec(shape=(), dtype="int64"),
            "has_proposal": flag,
            "is_step": flag,  # False in the row that holds an episode's last observation
        }

    @cached_property
    def encoded(self) -> dict[str, Codec]:
        """The fields whose frames are stored encoded, by a codec."""
        return {path: leaf.codec for path, leaf in self.columns.items() if leaf.codec is not None}

    @cached_property
    def decoded(self) -> StepSpec:
        """The spec of what is read: the same fields, whatever codec they are stored with."""

        def without(spec: Spec) -> Spec:
            return Spec(trees.map_leaves(lambda leaf: replace(leaf, codec=None), spec.tree))

        if not self.encoded:
            return self
        return replace(
            self, observation=without(self.observation), action=without(self.action), extras=without(self.extras)
        )

    @cached_property
    def stored_columns(self) -> dict[str, ArraySpec]:
        """The flat fields of one row as they are stored and sent: an encoded field is three of them.

        Under its own name the bytes of the encoded frame, under `frame_number_of` its number in its GOP, under
        `decoded_checksum_of` the checksum of what a decoder makes of it.
        """
        columns = dict(self.columns)
        for path in self.encoded:
            columns[path] = ArraySpec(shape=(None,), dtype="uint8")
            columns[frame_number_of(path)] = ArraySpec(shape=(), dtype="uint8")
            columns[decoded_checksum_of(path)] = ArraySpec(shape=(), dtype="uint64")
        return columns

    def row(self, step: Step) -> dict[str, Any]:
        """The checked step as one flat row."""
        if not isinstance(step, Step):
            raise SpecError(
                f"step: expected a us.Step, got {type(step).__name__}; "
                f"pass us.Step(observation=..., action=..., reward=...)"
            )
        given = step.reward.item() if isinstance(step.reward, np.generic) else step.reward  # environments give float64
        reward = self.reward.check(given, "reward")
        if not (math.isfinite(reward) if reward.ndim == 0 else np.isfinite(reward).all()):
            raise SpecError(f"reward: expected a finite number, got {step.reward}; check the environment")
        row: dict[str, Any] = {}
        self.observation.check_into(row, step.observation, "observation")
        self.action.check_into(row, step.action, "action")
        if step.proposal is None:
            row.update(self._no_proposal)
        else:
            self.action.check_into(row, step.proposal, "proposal")
        self.extras.check_into(row, step.extras, "extras")
        row["reward"] = reward
        row["terminated"] = bool(step.terminated)
        row["truncated"] = bool(step.truncated)
        row["source"] = _source(step.source)
        row["policy_version"] = _policy_version(step.policy_version)
        row["has_proposal"] = step.proposal is not None
        row["is_step"] = True
        return row

    @cached_property
    def _no_proposal(self) -> dict[str, Any]:
        return trees.flatten(self.action.zero(), "proposal")

    @cached_property
    def _zero_row(self) -> dict[str, Any]:
        return {path: leaf.zero() for path, leaf in self.columns.items()}

    def last_row(self, observation: Tree) -> dict[str, Any]:
        """The row of an episode's last observation, on which no action was executed."""
        return {
            **self._zero_row,
            **self.observation.check(observation, "observation"),
            "policy_version": NO_VERSION,
        }

    def to_json(self) -> dict[str, Any]:
        return {
            "observation": self.observation.to_json(),
            "action": self.action.to_json(),
            "extras": self.extras.to_json(),
            "reward": self.reward.to_json(),
        }

    @cached_property
    def json_text(self) -> str:
        """The spec as one canonical text: equal for equal specs."""
        return canonical_json(self.to_json())

    @staticmethod
    def from_json(value: dict[str, Any]) -> StepSpec:
        return StepSpec(
            observation=Spec.from_json(value["observation"]),
            action=Spec.from_json(value["action"]),
            extras=Spec.from_json(value["extras"]),
            reward=ArraySpec.from_json(value["reward"]),
        )


def frame_number_of(path: str) -> str:
    """The stored column that holds the number of each frame of an encoded field in its GOP."""
    return f"frame_number/{path}"


def decoded_checksum_of(path: str) -> str:
    """The stored column that holds the checksum of each decoded frame of an encoded field."""
    return f"decoded_checksum/{path}"


def _source(value: Any) -> Source:
    if type(value) is Source:
        return value
    try:
        return Source(value)
    except ValueError:
        names = ", ".join(f"{source.name} ({source.value})" for source in Source)
        raise SpecError(f"source: expected one of {names}, got {describe(value)}; pass a Source") from None


def _policy_version(value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise SpecError(
            f"policy_version: expected an int, got {describe(value)}; pass NO_VERSION if there is none"
        ) from None

"""Episode: all steps from a reset to the end, the last observation, and the attributes of the episode."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias, get_args

import numpy as np

from understudy.core import tree as trees
from understudy.core.errors import EpisodeError
from understudy.core.spec import ArraySpec, describe, refuse_lone_surrogates
from understudy.core.step import Source, Step, StepSpec
from understudy.core.tree import Tree

# `practice` becomes `correction` with the first human step; `demonstration` stays. Stored in catalogs, never changed.
Kind: TypeAlias = Literal["demonstration", "practice", "correction"]
Split: TypeAlias = Literal["train", "eval"]

# Labels that hold facts of the data set an episode was imported from; the export writes them back.
FPS = "fps"  # steps per second, as text; known, not measured
MAX_FPS = 1e6  # a label that says more is no rate
MEASURED_FPS = "measured_fps"  # the mean rate of rows that were made when messages came
ROBOT_TYPE = "robot_type"  # such as "so101_follower"
NAMES = "names"  # JSON: {"action": ["shoulder_pan.pos", ...], "observation/state": {"motors": [...]}}
DATASET_LABELS = (FPS, ROBOT_TYPE, NAMES)

KINDS: tuple[Kind, ...] = get_args(Kind)
SPLITS: tuple[Split, ...] = get_args(Split)


@dataclass(frozen=True, kw_only=True)
class EpisodeInfo:
    """The attributes of an episode. `init_state` is the index of the start state in its task suite."""

    task: str | None = None
    instruction: str | None = None
    init_state: int | None = None
    seed: int | None = None
    group: str | None = None
    actor: str | None = None
    operator: str | None = None
    success: bool | None = None
    split: Split = "train"
    kind: Kind = "practice"
    labels: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, wanted in _ATTRIBUTE_TYPES.items():
            value = getattr(self, name)
            if isinstance(value, np.generic):
                value = value.item()
                object.__setattr__(self, name, value)
            if value is not None and (not isinstance(value, wanted) or (isinstance(value, bool) and wanted is int)):
                raise EpisodeError(f"{name}: expected {wanted.__name__} or None, got {describe(value)}; convert it")
            if isinstance(value, str):
                refuse_lone_surrogates(value, name)
            elif type(value) is int and not -(2**63) <= value < 2**63:
                raise EpisodeError(f"{name}: expected a number of 64 bits, got {describe(value)}; choose a smaller one")
        for name, allowed in (("split", SPLITS), ("kind", KINDS)):
            if getattr(self, name) not in allowed:
                raise EpisodeError(f"{name}: expected one of {', '.join(allowed)}, got {getattr(self, name)!r}")
        if not isinstance(self.labels, Mapping):
            raise EpisodeError(f"labels: expected a dict of text to text, got {describe(self.labels)}; convert it")
        if not all(isinstance(x, str) for pair in self.labels.items() for x in pair):
            raise EpisodeError(f"labels: expected names and values that are text, got {dict(self.labels)!r}; convert")
        for text in (x for pair in self.labels.items() for x in pair):
            refuse_lone_surrogates(text, "labels")
        object.__setattr__(self, "labels", dict(self.labels))

    def with_attributes(self, **attributes: Any) -> EpisodeInfo:
        """The same with other attributes; labels are added to those there are."""
        if isinstance(attributes.get("labels"), Mapping):
            attributes["labels"] = {**self.labels, **attributes["labels"]}
        return replace(self, **attributes)

    @property
    def fps(self) -> float | None:
        """The rate in steps per second that it was recorded at; None if no label says it, or none that is a rate."""
        try:
            rate = float(self.labels.get(FPS, "nan"))
        except ValueError:
            return None
        return rate if 0 < rate <= MAX_FPS else None

    @property
    def names(self) -> dict[str, tuple[str, ...]]:
        """The names of the numbers in each field, by its path, where the data set had them: {"action": ("x", "y")}."""
        return {path: flat_names(given) for path, given in given_names(self.labels).items()}


def given_names(labels: Mapping[str, str]) -> dict[str, Any]:
    """The label NAMES as the data set gave it: lists of names, or dicts of such lists; {} if there is none."""
    try:
        found = json.loads(labels.get(NAMES, "{}"))
    except ValueError:
        return {}
    return {path: given for path, given in found.items() if flat_names(given)} if isinstance(found, dict) else {}


def flat_names(given: Any) -> tuple[str, ...]:
    """The names in a list, or in a dict of lists such as {"motors": [...]}; () if it is neither."""
    if isinstance(given, dict):
        given = [name for part in given.values() for name in (part if isinstance(part, list) else [None])]
    if not isinstance(given, list) or not all(isinstance(name, str) for name in given):
        return ()
    return tuple(given)


_ATTRIBUTE_TYPES: dict[str, type] = {
    "task": str,
    "instruction": str,
    "init_state": int,
    "seed": int,
    "group": str,
    "actor": str,
    "operator": str,
    "success": bool,
}

Column: TypeAlias = Any  # np.ndarray [T, ...], or a list of T values where the field is ragged


@dataclass(frozen=True, kw_only=True, eq=False)
class Episode:
    """T steps as columns, and the T+1 observations; a ragged field is a list with one value per row."""

    observation: Tree  # [T+1, ...]; the last is what the last action led to
    action: Tree  # [T, ...], as executed
    reward: np.ndarray[Any, Any]  # [T, ...]
    terminated: np.ndarray[Any, Any]  # [T] bool
    truncated: np.ndarray[Any, Any]  # [T] bool
    source: np.ndarray[Any, Any]  # [T] uint8, see Source
    policy_version: np.ndarray[Any, Any]  # [T] int64
    proposal: Tree  # [T, ...], zero where has_proposal is False
    has_proposal: np.ndarray[Any, Any]  # [T] bool
    extras: Tree  # [T, ...]
    info: EpisodeInfo = field(default_factory=EpisodeInfo)

    def __len__(self) -> int:
        return len(self.reward)

    @staticmethod
    def from_steps(
        spec: StepSpec, steps: Sequence[Step], last_observation: Tree, info: EpisodeInfo | None = None
    ) -> Episode:
        """The episode of these steps, each checked against the spec."""
        if not steps:
            raise EpisodeError("steps: expected at least one, got none; an episode has a step and a last observation")
        for index, step in enumerate(steps[:-1]):
            if step.last:
                raise EpisodeError(
                    f"steps[{index}]: terminated or truncated, but {len(steps) - 1 - index} more steps follow; "
                    f"end the episode there"
                )
        rows = [spec.row(step) for step in steps]
        rows.append(spec.last_row(last_observation))
        columns = {path: stack([row[path] for row in rows], leaf) for path, leaf in spec.columns.items()}
        return Episode.from_columns(columns, info or EpisodeInfo())

    @staticmethod
    def from_columns(columns: Mapping[str, Column], info: EpisodeInfo) -> Episode:
        """The episode of T+1 stored rows, given as flat columns; only the observation of the last row is used."""
        steps = {path: column[:-1] for path, column in columns.items() if not _is_observation(path)}

        def part(name: str, flat: Mapping[str, Column]) -> Tree:
            return trees.unflatten(trees.below(flat, name))

        return Episode(
            observation=part("observation", columns),
            action=part("action", steps),
            proposal=part("proposal", steps),
            extras=part("extras", steps),
            **{name: steps[name] for name in _STEP_COLUMNS},
            info=info,
        )

    def step(self, index: int) -> Step:
        """Step `index` (from 0, or from the end if negative) as a value."""
        index = range(len(self))[index]  # observations have a row more, so a negative index would miss theirs

        def pick(tree: Tree) -> Tree:
            return trees.map_leaves(lambda column: column[index], tree)

        reward = self.reward[index]
        return Step(
            observation=pick(self.observation),
            action=pick(self.action),
            reward=reward if np.ndim(reward) else reward.item(),
            terminated=bool(self.terminated[index]),
            truncated=bool(self.truncated[index]),
            source=Source(int(self.source[index])),
            policy_version=int(self.policy_version[index]),
            proposal=pick(self.proposal) if self.has_proposal[index] else None,
            extras=pick(self.extras),
        )

    def steps(self) -> Iterator[Step]:
        return (self.step(index) for index in range(len(self)))

    @property
    def last_observation(self) -> Tree:
        return trees.map_leaves(lambda column: column[len(self)], self.observation)

    def equals(self, other: Episode) -> bool:
        """Whether all columns are bit-equal; attributes are compared by ==."""
        mine, theirs = self.columns(), other.columns()
        return (
            self.info == other.info
            and mine.keys() == theirs.keys()
            and all(trees.equal_leaf(column, theirs[path]) for path, column in mine.items())
        )

    def columns(self) -> dict[str, Column]:
        """The flat columns; observations have T+1 rows, the others T."""
        flat: dict[str, Column] = {}
        for name in ("observation", "action", "proposal", "extras"):
            flat |= trees.flatten(getattr(self, name), name)
        return flat | {name: getattr(self, name) for name in _STEP_COLUMNS}


_STEP_COLUMNS = ("reward", "terminated", "truncated", "source", "policy_version", "has_proposal")


def _is_observation(path: str) -> bool:
    return path == "observation" or path.startswith("observation" + trees.SEPARATOR)


def stack(values: Sequence[Any], leaf: ArraySpec) -> Column:
    """Checked values of one field as a column."""
    if leaf.ragged:
        return list(values)
    return np.asarray(values, leaf.dtype).reshape(len(values), *leaf.fixed_shape)

"""Batch shapes: transitions or sequences, made of sampled steps. A shape makes a batch once and fills it many times.

Steps are given by span and offset (see StepIndex). The next observation of an episode's last step is the real last
observation; a row is never paired with one that it did not precede.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from understudy.core import SequenceBatch, StepSpec, StoreError, TransitionBatch
from understudy.core import tree as trees
from understudy.core.spec import ArraySpec, Spec
from understudy.core.tree import Tree
from understudy.replay.format.arrays import Array
from understudy.replay.read.gather import Gatherer, ReadRequest
from understudy.replay.read.recycled_memory import empty_array
from understudy.replay.read.step_index import StepIndex


@dataclass(frozen=True, kw_only=True)
class Transitions:
    """A step and the observation `num_steps` steps later, or at the known end of the episode if that is nearer.

    With `stack` above 1 an observation is the last `stack` ones, [B, stack, ...]; at the beginning of an episode the
    first is repeated. Observation and next observation are then views of the same frames when `num_steps` is 1.
    """

    num_steps: int = 1
    discount: float = 0.99
    stack: int = 1

    lookahead = 1

    def __post_init__(self) -> None:
        if self.num_steps < 1 or self.stack < 1 or not 0 <= self.discount <= 1:
            raise StoreError(
                f"transitions: expected num_steps and stack from 1 and a discount from 0 to 1, got {self.num_steps}, "
                f"{self.stack} and {self.discount}"
            )

    def make(self, spec: StepSpec, size: int) -> TransitionBatch:
        """A batch to be filled."""
        if self.stack > 1:
            frames = _empty(spec.observation, (size, self.stack + self.num_steps))
            now = trees.map_leaves(lambda f: f[:, : self.stack], frames)
            then = trees.map_leaves(lambda f: f[:, self.num_steps :], frames)
        else:
            now, then = _empty(spec.observation, (size,)), _empty(spec.observation, (size,))
        return TransitionBatch(
            observation=now,
            next_observation=then,
            num_steps=np.empty(size, np.int32),
            **_step_arrays(spec, (size,)),
        )

    def fill(
        self, batch: TransitionBatch, at: slice, steps: StepIndex, gather: Gatherer, span: Array, offset: Array
    ) -> None:
        """Write these steps to `batch[at]`."""
        episode, index = steps.identity(span, offset)
        left = steps.episode_num_rows.values[episode] - 1 - index  # steps from here to the known end
        count = np.minimum(left, self.num_steps).astype(np.int32)
        batch.num_steps[at] = count
        wanted = self._observations(batch, at, steps, span, offset, index, count)
        gather.read([*wanted, *_step_fields(batch, at, steps.locate(span, offset))])
        batch.episode[at], batch.index[at], batch.weight[at] = episode, index, 1.0
        if self.num_steps > 1:
            self._sum_rewards(batch, at, steps, gather, span, offset, count)

    def _observations(
        self,
        batch: TransitionBatch,
        at: slice,
        steps: StepIndex,
        span: Array,
        offset: Array,
        index: Array,
        count: Array,
    ) -> list[ReadRequest]:
        if self.stack == 1:
            here, there = steps.locate(span, offset), steps.locate(*steps.step_by(span, offset, count))
            return [
                *_fields("observation", batch.observation, at, here),
                *_fields("observation", batch.next_observation, at, there),
            ]
        wanted = []
        for frame in range(self.stack + self.num_steps):  # frames i-stack+1 .. i+num_steps
            by = np.maximum(frame - self.stack + 1, -index)
            if frame >= self.stack:  # after the end, the last observation is repeated
                by = np.minimum(by, count)
            rows = steps.locate(*steps.step_by(span, offset, by))
            frames = trees.map_leaves(partial(_frame, number=frame), batch.observation)
            wanted += _fields("observation", frames, at, rows)
        return wanted

    def _sum_rewards(
        self,
        batch: TransitionBatch,
        at: slice,
        steps: StepIndex,
        gather: Gatherer,
        span: Array,
        offset: Array,
        count: Array,
    ) -> None:
        """The discounted sum, and the flags of the last step in it."""
        reward, terminated, truncated = batch.reward[at], batch.terminated[at], batch.truncated[at]
        for step in range(1, int(count.max(initial=0))):
            mine = np.flatnonzero(count > step)
            rows = steps.locate(*steps.step_by(span[mine], offset[mine], step))
            reward[mine] += (self.discount**step * gather.field("reward", *rows)).astype(reward.dtype)
            terminated[mine] = gather.field("terminated", *rows)
            truncated[mine] = gather.field("truncated", *rows)


@dataclass(frozen=True, kw_only=True)
class Sequences:
    """`length` steps from the sampled one on. If `padded`, steps past the known end of the episode have weight 0.

    With `first_observation_only` a batch holds action chunks: one observation and the `length` actions that followed.
    """

    length: int
    padded: bool = True
    first_observation_only: bool = False

    def __post_init__(self) -> None:
        if self.length < 1:
            raise StoreError(f"sequences: expected a length from 1, got {self.length}")

    @property
    def lookahead(self) -> int:
        return 1 if self.padded else self.length

    def make(self, spec: StepSpec, size: int) -> SequenceBatch:
        return SequenceBatch(
            observation=_empty(spec.observation, (size, 1 if self.first_observation_only else self.length + 1)),
            **_step_arrays(spec, (size, self.length)),
        )

    def fill(
        self, batch: SequenceBatch, at: slice, steps: StepIndex, gather: Gatherer, span: Array, offset: Array
    ) -> None:
        episode, index = steps.identity(span, offset)
        left = steps.episode_num_rows.values[episode] - 1 - index
        batch.episode[at], batch.index[at] = episode, index
        wanted = []
        for number in range(self.length + 1):
            rows = steps.locate(*steps.step_by(span, offset, np.minimum(number, left)))
            if number == 0 or not self.first_observation_only:
                frames = trees.map_leaves(partial(_frame, number=number), batch.observation)
                wanted += _fields("observation", frames, at, rows)
            if number < self.length:
                wanted += _step_fields(batch, at, rows, number)
                batch.weight[at, number] = number < left
        gather.read(wanted)
        if self.padded:
            _blank(batch, at, left)


def _frame(frames: Array, number: int) -> Array:
    """One of the frames that an array of stacked observations is a view of."""
    whole: Array = frames.base if isinstance(frames.base, np.ndarray) else frames
    return whole[:, number]


def _blank(batch: SequenceBatch, at: slice, left: Array) -> None:
    """Zero what lies past the known end."""
    for name in _STEP_TREES + _STEP_ARRAYS + ("observation",):
        for _, leaf in trees.leaves(getattr(batch, name)):
            rows = leaf[at]
            first = left + 1 if name == "observation" else left
            late = np.arange(rows.shape[1]) >= first[:, None]
            rows[late] = 0


# ---- the parts of a batch

_STEP_TREES = ("action", "proposal", "extras")
_STEP_ARRAYS = ("reward", "terminated", "truncated", "source", "policy_version", "has_proposal")


def _empty(spec: Spec, leading: tuple[int, ...]) -> Tree:
    def make(leaf: ArraySpec) -> Array:
        if leaf.ragged:
            return np.empty(leading, object)
        return empty_array((*leading, *leaf.fixed_shape), leaf.dtype)

    return trees.map_leaves(make, spec.tree)


def _step_arrays(spec: StepSpec, leading: tuple[int, ...]) -> dict[str, Any]:
    """All fields of a batch but the observations."""
    columns = spec.columns
    return {
        "action": _empty(spec.action, leading),
        "proposal": _empty(spec.action, leading),
        "extras": _empty(spec.extras, leading),
        **{name: np.empty((*leading, *columns[name].fixed_shape), columns[name].dtype) for name in _STEP_ARRAYS},
        "episode": np.empty(leading[:1], np.int64),
        "index": np.empty(leading[:1], np.int32),
        "weight": np.empty(leading, np.float32),
    }


def _fields(name: str, tree: Tree, at: slice, rows: tuple[Array, Array]) -> list[ReadRequest]:
    return [ReadRequest(path, *rows, out[at]) for path, out in trees.leaves(tree, name)]


def _step_fields(
    batch: TransitionBatch | SequenceBatch, at: slice, rows: tuple[Array, Array], number: int | None = None
) -> list[ReadRequest]:
    """The fields that are in the row of the step itself."""
    wanted = []
    for name in (*_STEP_TREES, *_STEP_ARRAYS):
        tree = getattr(batch, name)
        if number is not None:
            tree = trees.map_leaves(lambda out: out[:, number], tree)
        wanted += _fields(name, tree, at, rows)
    return wanted

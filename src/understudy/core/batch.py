"""The shapes of training data: transitions (pairs of neighbouring rows), sequences (runs of rows), and decisions."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from understudy.core import tree as trees
from understudy.core.errors import SpecError
from understudy.core.spec import describe
from understudy.core.tree import Tree

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, kw_only=True, eq=False)
class TransitionBatch:
    """B transitions. With n-step returns `next_observation` lies `num_steps` rows later and `reward` is their
    discounted sum; `terminated` and `truncated` are those of the last step that was summed."""

    observation: Tree  # [B, ...]
    action: Tree  # [B, ...]
    reward: Array  # [B]
    next_observation: Tree  # [B, ...]; after an end, the episode's real last observation
    terminated: Array  # [B] bool: do not bootstrap
    truncated: Array  # [B] bool: the episode was cut short; bootstrap as usual
    num_steps: Array  # [B] int32, 1 unless n-step
    source: Array  # [B] uint8, see Source
    policy_version: Array  # [B] int64
    proposal: Tree  # [B, ...]
    has_proposal: Array  # [B] bool
    extras: Tree  # [B, ...]
    episode: Array  # [B] int64: where each came from
    index: Array  # [B] int32: the step in its episode
    weight: Array  # [B] float32

    def __post_init__(self) -> None:
        _check_leading(self, _leading(self.reward, 1), {})

    def __len__(self) -> int:
        return len(self.reward)


@dataclass(frozen=True, kw_only=True, eq=False)
class SequenceBatch:
    """B runs of L steps with their L+1 observations, or only the first; what lies past an episode's end weighs 0."""

    observation: Tree  # [B, L+1, ...], or [B, 1, ...] where a block of actions follows one observation
    action: Tree  # [B, L, ...]
    reward: Array  # [B, L]
    terminated: Array  # [B, L] bool
    truncated: Array  # [B, L] bool
    source: Array  # [B, L] uint8
    policy_version: Array  # [B, L] int64
    proposal: Tree  # [B, L, ...]
    has_proposal: Array  # [B, L] bool
    extras: Tree  # [B, L, ...]
    episode: Array  # [B] int64
    index: Array  # [B] int32: the first step of the run in its episode
    weight: Array  # [B, L] float32: 0 where padded

    def __post_init__(self) -> None:
        batch, length = _leading(self.reward, 2)
        shapes = {np.shape(leaf)[1:2] for _, leaf in trees.leaves(self.observation) if not isinstance(leaf, list)}
        frames = 1 if shapes == {(1,)} else length + 1
        special = {"observation": (batch, frames), "episode": (batch,), "index": (batch,)}
        _check_leading(self, (batch, length), special)

    def __len__(self) -> int:
        return len(self.reward)


@dataclass(frozen=True, kw_only=True, eq=False)
class BlockBatch:
    """N decisions of a policy that gives blocks of H actions: E whole episodes, one after another.

    D is the number of log-probs of an action: one for each of its numbers where they are tokens, one
    for each denoising step of a flow policy, else 1.
    """

    observation: Tree  # [N, ...]: what each decision was made on
    instruction: tuple[str, ...]  # N
    replay: dict[str, Array]  # [N, ...]: what is needed to find the choice again, such as tokens [N, H, D]
    log_prob: Array  # [N, H, D] float32, as recorded
    executed: Array  # [N, H] bool: False for actions behind the end of the episode
    reward: Array  # [N, H] float32; 0 where not executed
    value: Array | None  # [N] float32, as recorded by policies that judge states
    next_value: Array | None  # [N] float32: of what the block led to, where that was cut off by a time limit; else 0
    policy_version: Array  # [N] int64
    episode: Array  # [N] int64: 0 to E-1, in order
    group: Array  # [E] int64
    success: Array  # [E] bool
    terminated: Array  # [E] bool: False where a time limit ended it

    def __post_init__(self) -> None:
        decisions, episodes = _leading(self.log_prob, 1), (len(self.group),)
        special = dict.fromkeys(("group", "success", "terminated"), episodes)
        absent = {name for name in ("value", "next_value") if getattr(self, name) is None}
        _check_leading(self, decisions, special, without={"instruction", *absent})
        if len(self.instruction) != len(self):
            raise SpecError(f"instruction: expected {len(self)} texts, got {len(self.instruction)}")

    def __len__(self) -> int:
        return len(self.log_prob)


def _leading(reward: Array, num_dimensions: int) -> tuple[int, ...]:
    """The leading dimensions of a batch, which are those of its rewards."""
    if np.ndim(reward) < num_dimensions:
        wanted = "[B, L]" if num_dimensions == 2 else "[B]"
        raise SpecError(f"reward: expected leading dimensions {wanted}, got {describe(reward)}; stack the rows first")
    return np.shape(reward)[:num_dimensions]


def _check_leading(
    batch: Any, usual: tuple[int, ...], special: Mapping[str, tuple[int, ...]], without: Collection[str] = ()
) -> None:
    """Refuse a field whose leading dimensions are not those of the batch."""
    for item in fields(batch):
        if item.name in without:
            continue
        wanted = special.get(item.name, usual)
        for path, leaf in trees.leaves(getattr(batch, item.name), item.name):
            if isinstance(leaf, list):  # a ragged column
                good = len(leaf) == wanted[0]
            else:
                good = np.shape(leaf)[: len(wanted)] == wanted
            if not good:
                raise SpecError(
                    f"{path}: expected leading dimensions {list(wanted)}, got {describe(leaf)}; "
                    f"take it from the same steps as reward"
                )

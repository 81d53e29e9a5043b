"""BlockTransitions: rows of a SequenceBatch as transitions whose action is the block that was executed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch

from understudy.algorithms.algorithm import AlgorithmError
from understudy.core import SequenceBatch, Tree
from understudy.core import tree as trees
from understudy.core.spec import describe
from understudy.policies.actions import Actions

Array: TypeAlias = np.ndarray[Any, Any]


@dataclass(frozen=True, kw_only=True, eq=False)
class BlockTransitions:
    """B transitions of up to L steps, whose first H actions are the block."""

    observation: Tree  # [B, ...]
    action: Array  # [B, H, D] float32, from -1 to 1
    executed: Array  # [B, H] bool: False behind the end of the episode
    reward: Array  # [B] float32, the discounted sum over the steps
    next_observation: Tree  # [B, ...], behind the last step
    terminated: Array  # [B] float32, 0 or 1
    num_steps: Array  # [B] float32

    def part(self, number: int, of: int) -> BlockTransitions:
        """Every `of`-th row from row `number` on, so that each part has the mixture's shares."""
        if of == 1:
            return self
        rows = slice(number, None, of)
        return BlockTransitions(
            observation=trees.map_leaves(lambda leaf: leaf[rows], self.observation),
            action=self.action[rows],
            executed=self.executed[rows],
            reward=self.reward[rows],
            next_observation=trees.map_leaves(lambda leaf: leaf[rows], self.next_observation),
            terminated=self.terminated[rows],
            num_steps=self.num_steps[rows],
        )


def block_transitions(batch: SequenceBatch, actions: Actions, *, block_steps: int, discount: float) -> BlockTransitions:
    """The transitions of padded sequences, whose steps behind the end of the episode are zeros and weigh nothing."""
    if batch.reward.ndim != 2:
        raise AlgorithmError(f"reward: expected one number a step, got {describe(batch.reward)}; sum it before append")
    rows, length = batch.reward.shape
    if length < block_steps:
        raise AlgorithmError(f"batch: expected sequences of at least a block ({block_steps} steps), got {length} steps")
    num_steps = (batch.weight > 0).sum(axis=1)
    block = trees.map_leaves(
        lambda leaf: leaf[:, :block_steps].reshape(rows * block_steps, *leaf.shape[2:]), batch.action
    )
    unit = actions.to_unit(block, torch.device("cpu")).numpy().reshape(rows, block_steps, actions.size)
    return BlockTransitions(
        observation=trees.map_leaves(lambda leaf: leaf[:, 0], batch.observation),
        action=unit,
        executed=np.arange(block_steps) < num_steps[:, None],
        reward=(batch.reward @ discount ** np.arange(length)).astype(np.float32),
        next_observation=trees.map_leaves(lambda leaf: leaf[np.arange(rows), num_steps], batch.observation),
        terminated=np.any(batch.terminated, axis=1).astype(np.float32),
        num_steps=num_steps.astype(np.float32),
    )

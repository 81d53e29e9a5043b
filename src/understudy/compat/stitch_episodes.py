"""Stitcher: joins transitions into episodes where the next observation of one is the observation of the next."""

from __future__ import annotations

from typing import Any

import numpy as np

from understudy.core import EpisodeInfo, SpecError, Step
from understudy.core import tree as trees
from understudy.core.tree import Tree
from understudy.replay import Writer


class Stitcher:
    """Writes transitions one by one. If one does not continue the last, the episode is cut before it.

    An observation that is the next observation of one step and the observation of the following is stored once.
    """

    def __init__(self, writer: Writer, *, max_steps: int | None = None):
        self._writer = writer
        self._max_steps = max_steps  # an episode longer than this is stored in pieces
        self._num_steps = 0  # of the open episode
        self._next_observation: dict[str, Any] | None = None  # of the last step; None between episodes

    @property
    def open(self) -> bool:
        """Whether the next observation of the last step is still only in memory."""
        return self._next_observation is not None

    def add(self, step: Step, next_observation: Tree, info: EpisodeInfo, **attributes: Any) -> None:
        """Write a step with its next observation; `attributes` are set if the episode ends with it."""
        spec = self._writer.spec.observation
        next_flat = {
            path: np.array(leaf) if isinstance(leaf, np.ndarray) else leaf
            for path, leaf in spec.check(next_observation, "next_observation").items()
        }
        if self._next_observation is not None and not self._follows(step.observation):
            self.cut()
        begins = self._next_observation is None
        if begins:
            self._writer.begin(info)
            self._num_steps = 0
        try:
            self._writer.append(step)
        except SpecError:
            if begins:
                self._writer.cut()  # nothing was written
            raise
        self._num_steps += 1
        self._next_observation = next_flat
        if step.last:
            self._next_observation = None
            self._writer.end(_tree(next_flat), **attributes)
        elif self._num_steps == self._max_steps:
            self.cut()

    def cut(self, **attributes: Any) -> None:
        """End the open episode, if there is one, with the next observation of its last step."""
        if self._next_observation is not None:
            last, self._next_observation = _tree(self._next_observation), None
            self._writer.cut(last, **attributes)

    def flush(self) -> None:
        """Make all steps durable, except the next observation of the last step of an open episode."""
        if self._writer.num_uncommitted:
            self._writer.flush()

    def _follows(self, observation: Tree) -> bool:
        found = self._writer.spec.observation.check(observation, "next_observation")
        return self._next_observation is not None and all(
            trees.equal_leaf(leaf, found[path]) for path, leaf in self._next_observation.items()
        )


def _tree(flat: dict[str, Any]) -> Tree:
    return trees.unflatten(trees.below(flat, "next_observation"))

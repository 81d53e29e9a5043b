"""Stitcher: transitions in, episodes out. Two are neighbours only if the one led to where the other began."""

from __future__ import annotations

from typing import Any

import numpy as np

from understudy.core import EpisodeInfo, SpecError, Step
from understudy.core import tree as trees
from understudy.core.tree import Tree
from understudy.replay import Writer


class Stitcher:
    """Writes transitions that come one by one. Where one does not follow the last, the episode is cut before it.

    An observation that is both what one step led to and what the next was made on is stored once.
    """

    def __init__(self, writer: Writer, *, max_steps: int | None = None):
        self._writer = writer
        self._max_steps = max_steps  # an episode longer than this is stored in pieces
        self._num_steps = 0  # of the open episode
        self._led_to: dict[str, Any] | None = None  # by the last step of the open episode; None between episodes

    @property
    def open(self) -> bool:
        """Whether the outcome of the last step is still only in memory."""
        return self._led_to is not None

    def add(self, step: Step, next_observation: Tree, info: EpisodeInfo, **attributes: Any) -> None:
        """Take a step and what it led to; `attributes` are set if the episode ends with it."""
        spec = self._writer.spec.observation
        led_to = {
            path: np.array(leaf) if isinstance(leaf, np.ndarray) else leaf
            for path, leaf in spec.check(next_observation, "next_observation").items()
        }
        if self._led_to is not None and not self._follows(step.observation):
            self.cut()
        begins = self._led_to is None
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
        self._led_to = led_to
        if step.last:
            self._led_to = None
            self._writer.end(_tree(led_to), **attributes)
        elif self._num_steps == self._max_steps:
            self.cut()

    def cut(self, **attributes: Any) -> None:
        """End the open episode, if there is one, with what its last step led to."""
        if self._led_to is not None:
            last, self._led_to = _tree(self._led_to), None
            self._writer.cut(last, **attributes)

    def flush(self) -> None:
        """Make durable what was taken, all but the outcome of the last step of an open episode."""
        if self._writer.num_uncommitted:
            self._writer.flush()

    def _follows(self, observation: Tree) -> bool:
        found = self._writer.spec.observation.check(observation, "next_observation")
        return self._led_to is not None and all(
            trees.equal_leaf(leaf, found[path]) for path, leaf in self._led_to.items()
        )


def _tree(flat: dict[str, Any]) -> Tree:
    return trees.unflatten(trees.below(flat, "next_observation"))

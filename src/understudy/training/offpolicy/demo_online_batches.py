"""Batches: demonstrations and experience in exact shares, as a learner of RLPD wants them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from understudy.core import StepSpec, TransitionBatch, Tree
from understudy.core import tree as trees
from understudy.replay import DEMO, ONLINE, Transitions
from understudy.replay.sample.mixture import shares
from understudy.training.offpolicy.sharded_source import Emptied, Shards, open_supply
from understudy.training.offpolicy.sources import Asked

GROUP_BYTES = 64 * 2**20
MOST_AT_ONCE = 16  # batches


class Batches:
    """While one of the two has nothing, the other gives all. The state is a few numbers."""

    def __init__(
        self,
        *,
        store: Path | Shards,
        demos: Path | None,
        spec: StepSpec,
        size: int,
        weights: tuple[int, int],
        seed: int,
        shape: Transitions,
        waiting: Callable[[str], None] | None = None,
    ):
        """Experience is in `store`, demonstrations in `demos`, or there too; `weights` are theirs and its. `waiting` is
        told for which shards it waits, if all that have steps are away."""
        self.spec = spec
        self.num_batches = 0
        self.num_drawn = np.zeros(2, np.int64)  # items, of demonstrations and of experience; not in the state
        self.size = size
        self.weights = weights
        self._undo = ExitStack()
        seeds = np.random.SeedSequence([seed, 2]).generate_state(2, np.uint64).tolist()
        try:
            self.demo, self.online = (
                open_supply(
                    self._undo,
                    place,
                    Asked(view=view, spec=spec, seed=view_seed, shape=shape),
                    own_first=view is DEMO,
                    waiting=waiting or (lambda text: None),
                )
                for place, view, view_seed in zip((demos or store, store), (DEMO, ONLINE), seeds, strict=True)
            )
        except BaseException:
            self._undo.close()
            raise
        self._most = max(1, min(MOST_AT_ONCE, GROUP_BYTES // (size * _row_bytes(spec))))
        self._batch = shape.make(spec, self._most * size)

    def follow(self) -> tuple[int, int]:
        """Take in what is new; returns how many steps there are of demonstrations and of experience."""
        return self.demo.follow(), self.online.follow()

    @property
    def away(self) -> dict[str, str]:
        """Shards that do not answer now, and why; the others give their share."""
        return {**self.demo.away, **self.online.away}

    def sample(self) -> TransitionBatch:
        """The next batch, in memory that is used again."""
        return next(self.draw(1))

    def draw(self, number: int) -> Iterator[TransitionBatch]:
        """The next batches, one by one, in memory that is used again. They are drawn several at a time, as many as fit
        into GROUP_BYTES: a draw has a price of its own, whatever its size."""
        while number > 0:
            group = min(number, self._most)
            while True:
                try:
                    self._fill(group)
                    break
                except Emptied:  # the last shard with such steps is lost: the others give all
                    continue
            rows = group * self.size
            for index in range(group):
                yield _rows(self._batch, slice(index, rows, group))
            number -= group

    def _fill(self, group: int) -> None:
        """Draw a group of batches: first all demonstrations, then all experience; each batch is every group-th row."""
        there = (len(self.demo), len(self.online))
        weights = self.weights if all(there) else tuple(int(num_steps > 0) for num_steps in there)
        demo, online = (group * count for count in shares(weights, self.size, self.num_batches))
        if demo:
            self.demo.fill(self._batch, slice(0, demo))
        if online:
            self.online.fill(self._batch, slice(demo, demo + online))
        self.num_batches += group
        self.num_drawn += (demo, online)

    def look(self, num_steps: int) -> Iterator[Tree]:
        """Observations of some steps of each, the same ones for the same contents; moves no cursor."""
        for supply in (self.demo, self.online):
            if len(supply):
                yield supply.look(num_steps)

    def state(self) -> dict[str, Any]:
        return {"num_batches": self.num_batches, "demo": self.demo.state(), "online": self.online.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken; only before the first `follow`."""
        self.demo.restore(state["demo"])
        self.online.restore(state["online"])
        self.num_batches = int(state["num_batches"])

    def close(self) -> None:
        self._undo.close()


def _rows(batch: TransitionBatch, rows: slice) -> TransitionBatch:
    """Some rows of a batch, in its memory."""
    parts: dict[str, Any] = {
        field.name: trees.map_leaves(lambda leaf: leaf[rows], getattr(batch, field.name)) for field in fields(batch)
    }
    return TransitionBatch(**parts)


def _row_bytes(spec: StepSpec) -> int:
    """Of a transition: it has two observations."""
    return sum(2 * leaf.row_bytes for _, leaf in spec.observation.leaves() if not leaf.ragged) + 64

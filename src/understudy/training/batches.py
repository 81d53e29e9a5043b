"""Batches: demonstrations and experience in exact shares, as a learner of RLPD wants them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from understudy.core import StepSpec, StoreError, TransitionBatch, Tree
from understudy.core import tree as trees
from understudy.replay import DEMO, ONLINE, Reader, Sampler, Transitions, View
from understudy.replay.mixture import shares

GROUP_BYTES = 64 * 2**20
MOST_AT_ONCE = 16  # batches


class Batches:
    """While one of the two has nothing, the other gives all. The state is a few numbers."""

    def __init__(
        self, *, store: Path, demos: Path | None, spec: StepSpec, size: int, weights: tuple[int, int], seed: int,
        shape: Transitions,
    ):  # fmt: skip
        """Experience is in `store`, demonstrations in `demos`, or there too; `weights` are theirs and its."""
        self.spec = spec
        self.num_batches = 0
        self.num_drawn = np.zeros(2, np.int64)  # items, of demonstrations and of experience; not in the state
        self.size = size
        self.weights = weights
        self._undo = ExitStack()
        seeds = np.random.SeedSequence([seed, 2]).generate_state(2, np.uint64).tolist()
        try:
            self.demo = Supply(self._undo, demos or store, DEMO, spec, seeds[0], shape)
            self.online = Supply(self._undo, store, ONLINE, spec, seeds[1], shape)
        except BaseException:
            self._undo.close()
            raise
        self._most = max(1, min(MOST_AT_ONCE, GROUP_BYTES // (size * _row_bytes(spec))))
        self._batch = shape.make(spec, self._most * size)

    def follow(self) -> tuple[int, int]:
        """Take in what is new; returns how many steps there are of demonstrations and of experience."""
        return self.demo.follow(), self.online.follow()

    def sample(self) -> TransitionBatch:
        """The next batch, in memory that is used again."""
        return next(self.draw(1))

    def draw(self, number: int) -> Iterator[TransitionBatch]:
        """The next batches, one by one, in memory that is used again. They are drawn several at a time, as many as fit
        into GROUP_BYTES: a draw has a price of its own, whatever its size."""
        while number > 0:
            group = min(number, self._most)
            self._fill(group)
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


class Supply:
    """The steps of a view of a store, from the moment it has any of the right spec."""

    def __init__(self, undo: ExitStack, store: Path, view: View, spec: StepSpec, seed: int, shape: Transitions):
        self._undo = undo
        self._reader = undo.enter_context(Reader(store))
        self._view = view
        self._spec = spec
        self._seed = seed
        self._shape = shape
        self._sampler: Sampler | None = None
        self._number = 0  # of the spec in the store
        self._find()

    def _find(self) -> None:
        """Make the sampler, if the store knows the spec by now."""
        known = {number: self._reader.spec(number) for number in self._reader.catalog.spec_ids()}
        for number, spec in known.items():
            if spec == self._spec:
                self._number = number
                self._sampler = Sampler(
                    self._reader, self._view, batch_size=1, seed=self._seed, spec=number, shape=self._shape
                )
                self._undo.callback(self._sampler.close)
                return
        if known:
            raise StoreError(
                f"{self._reader.path}: holds steps of another kind "
                f"({_difference(next(iter(known.values())), self._spec)}); "
                f"record and train in the same world with the same options"
            )

    @property
    def commit(self) -> int:
        """The last commit that was taken in."""
        return 0 if self._sampler is None else self._sampler.runs.commit

    def __len__(self) -> int:
        return 0 if self._sampler is None else len(self._sampler)

    def follow(self) -> int:
        if self._sampler is None:
            self._find()
        return 0 if self._sampler is None else self._sampler.follow()

    def fill(self, batch: TransitionBatch, at: slice) -> None:
        """Draw the next steps into a part of a batch."""
        assert self._sampler is not None
        self._sampler.sample(batch, at=at, size=at.stop - at.start)

    def sample(self, size: int) -> TransitionBatch:
        """The next steps as a batch of their own."""
        if self._sampler is None:
            raise StoreError(f"{self._reader.path}: has no steps; record demonstrations, or practise first")
        batch: TransitionBatch = self._sampler.sample(size=size)
        return batch

    def look(self, num_steps: int) -> Tree:
        assert self._sampler is not None
        looking = Sampler(self._reader, self._view, batch_size=num_steps, seed=0, spec=self._number)
        try:
            looking.follow(self.commit)
            return looking.sample().observation
        finally:
            looking.close()

    def state(self) -> dict[str, Any] | None:
        return None if self._sampler is None else self._sampler.state()

    def restore(self, state: Mapping[str, Any] | None) -> None:
        if state is not None:
            if self._sampler is None:
                raise StoreError(f"{self._reader.path}: has lost the steps that the checkpoint counts on; restore it")
            self._sampler.restore(state)


def _rows(batch: TransitionBatch, rows: slice) -> TransitionBatch:
    """Some rows of a batch, in its memory."""
    parts = {
        field.name: trees.map_leaves(lambda leaf: leaf[rows], getattr(batch, field.name)) for field in fields(batch)
    }
    return TransitionBatch(**parts)


def _row_bytes(spec: StepSpec) -> int:
    """Of a transition: it has two observations."""
    return sum(2 * leaf.row_bytes for _, leaf in spec.observation.leaves() if not leaf.ragged) + 64


def _difference(one: StepSpec, other: StepSpec) -> str:
    """Where two specs part, for an error."""
    flat, other_flat = (
        dict([*spec.observation.leaves("observation"), *spec.action.leaves("action")]) for spec in (one, other)
    )
    for path in sorted({*flat, *other_flat}):
        if flat.get(path) != other_flat.get(path):
            return f"{path} is {flat.get(path, 'not there')}, expected {other_flat.get(path, 'nothing')}"
    return "its reward or extras differ"

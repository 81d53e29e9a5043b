"""Mixture: several samplers in fixed whole-number shares, exact in every batch and in the long run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Protocol

from understudy.core import StepSpec, StoreError
from understudy.replay.sample.sampler import part_of


class Samples(Protocol):
    """A Sampler, here or on a server."""

    @property
    def shape(self) -> Any: ...

    @property
    def spec(self) -> StepSpec: ...

    @property
    def world_size(self) -> int: ...

    def follow(self) -> int: ...

    def sample(
        self, out: Any = None, *, at: slice | None = None, size: int | None = None, part: slice | None = None
    ) -> Any: ...

    def state(self) -> dict[str, Any]: ...

    def restore(self, state: Mapping[str, Any]) -> None: ...


class Mixture:
    """Batches whose items come from several samplers of the same shape and spec, one after the other in the batch.

    All ranks draw the same batch and keep their own part of it, as a Sampler's do.
    """

    def __init__(
        self,
        samplers: Mapping[str, Samples],
        weights: Mapping[str, int],
        *,
        batch_size: int,
        rank: int = 0,
        world_size: int = 1,
    ):
        if not samplers or samplers.keys() != weights.keys():
            raise StoreError(
                f"mixture: samplers {sorted(samplers)} and weights {sorted(weights)} must have the same names"
            )
        first = next(iter(samplers.values()))
        for name, sampler in samplers.items():
            if sampler.shape != first.shape or sampler.spec != first.spec or sampler.world_size != 1:
                raise StoreError(f"mixture: {name!r} has another shape or spec, or a rank of its own; make them alike")
        shares(list(weights.values()), batch_size, 0)  # refuses what cannot be shared
        self.samplers = dict(samplers)
        self.weights = {name: weights[name] for name in samplers}
        self.batch_size = batch_size
        self.num_batches = 0
        self._part = part_of(batch_size, rank, world_size)

    def follow(self) -> dict[str, int]:
        """Take in new commits; returns how many steps each sampler can draw."""
        return {name: sampler.follow() for name, sampler in self.samplers.items()}

    def make(self) -> Any:
        """A batch to be used again and again."""
        first = next(iter(self.samplers.values()))
        return first.shape.make(first.spec, self._part.stop - self._part.start)

    def sample(self, out: Any = None) -> Any:
        """The next batch, or this rank's part of it."""
        batch = self.make() if out is None else out
        counts = shares(list(self.weights.values()), self.batch_size, self.num_batches)
        start = 0
        for sampler, count in zip(self.samplers.values(), counts, strict=True):
            low, high = max(start, self._part.start), min(start + count, self._part.stop)
            at = slice(low - self._part.start, max(low, high) - self._part.start)
            sampler.sample(batch, at=at, size=count, part=slice(low - start, max(low, high) - start))
            start += count
        self.num_batches += 1
        return batch

    def state(self) -> dict[str, Any]:
        return {
            "num_batches": self.num_batches,
            "samplers": {name: sampler.state() for name, sampler in self.samplers.items()},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken; only on a new mixture with the same names."""
        if state["samplers"].keys() != self.samplers.keys():
            raise StoreError(
                f"mixture: the state has {sorted(state['samplers'])}, and this mixture {sorted(self.samplers)}; "
                f"make it with the same names"
            )
        for name, sampler in self.samplers.items():
            sampler.restore(state["samplers"][name])
        self.num_batches = int(state["num_batches"])


def shares(weights: Sequence[int], batch_size: int, batch: int) -> list[int]:
    """The counts for batch number `batch` (from 0); they add up to `batch_size`.

    After every batch, what each has given in all is its exact part, rounded: a batch of one takes turns.
    """
    if not weights or min(weights) < 0 or sum(weights) == 0:
        raise StoreError(f"shares: expected whole numbers from 0, not all of them 0, got {list(weights)}")
    if batch_size < 0:
        raise StoreError(f"batch_size: expected a number from 0, got {batch_size}")
    before, after = (_in_all(weights, count * batch_size) for count in (batch, batch + 1))
    return [new - old for old, new in zip(before, after, strict=True)]


def _in_all(weights: Sequence[int], total: int) -> list[int]:
    """`total` items cut where the running sum of weights says, rounded down."""
    whole = sum(weights)
    edges = [0]
    running = 0
    for weight in weights:
        running += weight
        edges.append(total * running // whole)
    return [high - low for low, high in pairwise(edges)]

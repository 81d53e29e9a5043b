"""Mixture: batches from several samplers in fixed whole-number shares, in every batch and over the run.

mixture = Mixture({"demo": demos, "online": experience}, {"demo": 1, "online": 1}, batch_size=256)
mixture.follow()
batch = mixture.sample()
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, Generic

from understudy.core import StoreError
from understudy.core import tree as trees
from understudy.core.closeable import Closeable
from understudy.replay.sample.batch_source import Batch, EmptyError, ViewSampler, part_of

GROUP_BYTES = 64 * 2**20  # of observations that `sample_many` draws at once
MAX_GROUP = 16  # batches


class Mixture(Closeable, Generic[Batch]):
    """Batches whose items come from several samplers of the same shape and spec, one after the other in the batch.

    While a sampler has no steps, the others give its share. All ranks draw the same batch and keep their own part of
    it, as a Sampler's do. `close` closes the samplers.
    """

    def __init__(
        self,
        samplers: Mapping[str, ViewSampler[Batch]],
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
            if not hasattr(sampler, "shape"):
                raise StoreError(
                    f"mixture: expected a sampler as {name!r}, got {type(sampler).__name__}; "
                    f"pass us.Sampler(reader, us.DEMO, batch_size=...) or another"
                )
            if sampler.shape != first.shape or sampler.spec.decoded != first.spec.decoded or sampler.world_size != 1:
                raise StoreError(f"mixture: {name!r} has another shape or spec, or a rank of its own; make them alike")
        shares(list(weights.values()), batch_size, 0)  # refuses what cannot be shared
        self.samplers = dict(samplers)
        self.weights = {name: weights[name] for name in samplers}
        self.batch_size = batch_size
        self.num_batches = 0
        self.num_drawn = dict.fromkeys(samplers, 0)  # items, since this mixture was made
        self._shape, self._spec = first.shape, first.spec
        self._part = part_of(batch_size, rank, world_size)
        self.world_size = world_size
        item_bytes = _observation_bytes(self._shape.make(self._spec, 1)) + 64
        self._max_group = max(1, min(MAX_GROUP, GROUP_BYTES // (max(batch_size, 1) * item_bytes)))
        self._memory: Batch | None = None  # of `sample_many`

    def close(self) -> None:
        for sampler in self.samplers.values():
            sampler.close()

    # ---- what there is

    def follow(self) -> int:
        """Take in new commits; returns how many steps can be drawn. `num_steps` has them by sampler."""
        for sampler in self.samplers.values():
            sampler.follow()
        return len(self)

    def __len__(self) -> int:
        return sum(self.num_steps.values())

    @property
    def num_steps(self) -> dict[str, int]:
        """How many steps each sampler can draw, as of the last `follow`."""
        return {name: len(sampler) for name, sampler in self.samplers.items()}

    @property
    def unreachable(self) -> dict[str, str]:
        """Shards that do not answer at the moment, and why; others give their share."""
        return {name: problem for sampler in self.samplers.values() for name, problem in sampler.unreachable.items()}

    # ---- drawing

    def make(self) -> Batch:
        """A batch to be filled again and again; of this rank's part."""
        return self._shape.make(self._spec, self._part.stop - self._part.start)

    def sample(self, out: Batch | None = None) -> Batch:
        """The next batch, or this rank's part of it."""
        batch = self.make() if out is None else out
        self._draw(batch, 1)
        return batch

    def skip(self, num_batches: int = 1) -> None:
        """Pass over the next batches without reading them."""
        for _ in range(num_batches):
            for name, count in self._counts(1).items():
                if count:
                    self.samplers[name].skip(size=count)
            self.num_batches += 1

    def sample_many(self, num_batches: int) -> Iterator[Batch]:
        """The next batches one by one, in memory that is used again.

        They are drawn up to MAX_GROUP at a time, because each draw has a fixed cost. They differ from those of as many
        calls of `sample`, and come from the same distribution.
        """
        if self._memory is None:
            self._memory = self._shape.make(self._spec, self._max_group * (self._part.stop - self._part.start))
        while num_batches > 0:
            group = min(num_batches, self._max_group)
            self._draw(self._memory, group)
            stop = group * (self._part.stop - self._part.start)
            for index in range(group):
                yield _rows(self._memory, slice(index, stop, group))
            num_batches -= group

    def _draw(self, batch: Batch, group: int) -> None:
        """Draw `group` batches into one: each is every `group`-th item of it, and so gets its exact shares."""
        mine = slice(self._part.start * group, self._part.stop * group)
        while not self._fill(batch, mine, counts := self._counts(group)):
            continue  # a sampler lost its last steps: the others give its share
        self.num_batches += group
        for name, count in counts.items():
            self.num_drawn[name] += count

    def _counts(self, group: int) -> dict[str, int]:
        """How many items each sampler gives."""
        there = self.num_steps
        weights = {name: weight if there[name] else 0 for name, weight in self.weights.items()}
        if not any(weights.values()):  # only samplers of weight 0 have steps, if any
            weights = {name: int(count > 0) for name, count in there.items()}
        if not any(weights.values()):
            raise EmptyError(
                f"mixture: there is nothing to draw from {', '.join(there)}; record something, then call follow()"
            )
        return dict(zip(weights, shares(list(weights.values()), self.batch_size, self.num_batches, group), strict=True))

    def _fill(self, batch: Batch, mine: slice, counts: Mapping[str, int]) -> bool:
        """Write the items `mine` to `batch`; False if a sampler has no steps any more."""
        start = 0
        for name, count in counts.items():
            low, high = max(start, mine.start), min(start + count, mine.stop)
            at = slice(low - mine.start, max(low, high) - mine.start)
            part = None if self.world_size == 1 else slice(low - start, max(low, high) - start)
            try:
                if count:
                    self.samplers[name].sample(batch, at=at, size=count, part=part)
            except EmptyError:
                if len(self.samplers[name]):
                    raise
                return False
            start += count
        return True

    # ---- state

    def state(self) -> dict[str, Any]:
        return {
            "num_batches": self.num_batches,
            "samplers": {name: sampler.state() for name, sampler in self.samplers.items()},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was taken; only on a new mixture with the same names."""
        if state["samplers"].keys() != self.samplers.keys():
            raise StoreError(
                f"mixture: the state has {sorted(state['samplers'])}, and this mixture {sorted(self.samplers)}; "
                f"make it with the same names"
            )
        for name, sampler in self.samplers.items():
            sampler.restore(state["samplers"][name])
        self.num_batches = int(state["num_batches"])


def shares(weights: Sequence[int], batch_size: int, batch: int, num_batches: int = 1) -> list[int]:
    """The counts for `num_batches` batches from number `batch` (from 0) on; they add up to their items.

    Of two, what each has given in all after a call is its exact part, rounded: a batch of one takes turns. Of more, it
    may be a few items off.
    """
    if not weights or min(weights) < 0 or sum(weights) == 0:
        raise StoreError(f"shares: expected whole numbers from 0, not all of them 0, got {list(weights)}")
    if batch_size < 0:
        raise StoreError(f"batch_size: expected a number from 0, got {batch_size}")
    before, after = (_total_shares(weights, count * batch_size) for count in (batch, batch + num_batches))
    return [new - old for old, new in zip(before, after, strict=True)]


def _total_shares(weights: Sequence[int], total: int) -> list[int]:
    """`total` items in proportion to the weights: divided between the first and the second half of them, rounded down
    and up, and each half's items in the same way.

    With a larger total none has fewer. Rounding the exact part of each does not keep that: with the weights 5, 1 and 5,
    the second would have one of two items, and then none of three.
    """
    if len(weights) == 1:
        return [total]
    middle = len(weights) // 2
    first, second = weights[:middle], weights[middle:]
    whole = sum(weights)
    given = total * sum(first) // whole if whole else 0
    return _total_shares(first, given) + _total_shares(second, total - given)


def _rows(batch: Batch, rows: slice) -> Batch:
    """Some items of a batch, in its memory."""
    parts: dict[str, Any] = {
        item.name: trees.map_leaves(lambda leaf: leaf[rows], getattr(batch, item.name)) for item in fields(batch)
    }
    return replace(batch, **parts)


def _observation_bytes(batch: Batch) -> int:
    """Of all observations in a batch, without text and ragged fields."""
    observations = [getattr(batch, item.name) for item in fields(batch) if item.name.endswith("observation")]
    return sum(leaf.nbytes for tree in observations for _, leaf in trees.leaves(tree) if leaf.dtype != object)

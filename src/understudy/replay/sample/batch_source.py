"""The interface of everything that training batches come from: Sampler, RemoteSampler, ShardedSampler and Mixture.

source.follow()            # take in new commits
batch = source.sample()    # the next batch
saved = source.state()     # small JSON: `restore` on a new source continues with the batch after this one
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from understudy.core import SequenceBatch, StepSpec, StoreError, TransitionBatch
from understudy.replay.read.gather import Gatherer
from understudy.replay.read.step_index import StepIndex

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    Batch = TypeVar("Batch", bound=TransitionBatch | SequenceBatch, default=TransitionBatch)
    Item = TypeVar("Item")
else:  # typing.TypeVar knows no default before Python 3.13
    from typing import TypeVar

    Batch = TypeVar("Batch")
    Item = TypeVar("Item")

Array = np.ndarray[Any, Any]


class EmptyError(StoreError):
    """There are no steps to draw."""


class BatchShape(Protocol[Batch]):
    """What a drawn step becomes: Transitions, Sequences."""

    @property
    def lookahead(self) -> int: ...

    def make(self, spec: StepSpec, size: int) -> Batch: ...

    def fill(self, batch: Batch, at: slice, steps: StepIndex, gather: Gatherer, span: Array, offset: Array) -> None: ...


class BatchStream(Protocol[Item]):
    """What Prefetch needs of a source."""

    def follow(self) -> int:
        """Take in new commits; returns how many steps can be drawn."""
        ...

    def make(self) -> Item:
        """A batch to be filled again and again."""
        ...

    def sample(self, out: Item) -> Item:
        """The next batch, written to `out`."""
        ...

    def state(self) -> dict[str, Any]:
        """The position in the sequence of batches, as small JSON."""
        ...


class BatchSource(BatchStream[Batch], Protocol[Batch]):
    """What a training loop draws batches from. Not for several threads at once."""

    batch_size: int

    def __len__(self) -> int:
        """How many steps can be drawn, as of the last `follow`."""
        ...

    def sample(self, out: Batch | None = None) -> Batch:
        """The next batch; EmptyError or another StoreError if there are no steps."""
        ...

    def skip(self, num_batches: int = 1) -> None:
        """Pass over the next batches without reading them; the one after them is the same as if they had been read."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was taken; only on a new source."""
        ...

    def close(self) -> None: ...


class ViewSampler(BatchSource[Batch], Protocol[Batch]):
    """A source of one view, wherever its steps are stored; what a Mixture mixes."""

    @property
    def shape(self) -> BatchShape[Batch]: ...

    @property
    def spec(self) -> StepSpec: ...

    @property
    def world_size(self) -> int: ...

    @property
    def num_lost(self) -> int:
        """Steps that were drawn from and are gone, because their shard was lost."""
        ...

    @property
    def unreachable(self) -> Mapping[str, str]:
        """Shards that do not answer at the moment, and why."""
        ...

    @property
    def as_of(self) -> str:
        """The last commit that was taken in, for people."""
        ...

    def sample(
        self, out: Batch | None = None, *, at: slice | None = None, size: int | None = None, part: slice | None = None
    ) -> Batch:
        """The next batch of `size` steps; of these the items `part`, written to `out[at]`."""
        ...

    def skip(self, num_batches: int = 1, *, size: int | None = None) -> None:
        """Pass over the next batches, of `size` steps each."""
        ...

    def peek(self, size: int, out: Batch | None = None, *, at: slice | None = None) -> Batch:
        """Some steps, drawn uniformly: the same ones for the same contents. The batches that follow do not change."""
        ...


def part_of(size: int, rank: int, world_size: int) -> slice:
    """Which items of a batch belong to a rank; the parts of all ranks are the batch."""
    return slice(size * rank // world_size, size * (rank + 1) // world_size)

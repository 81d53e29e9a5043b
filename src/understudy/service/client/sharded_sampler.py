"""ShardedSampler: one batch from several servers, each giving its share of the steps there are.

A step is drawn in two stages: a server by how many steps it has, then a step on it by the selector. So every step of
all servers is drawn alike, and no server knows of another. The counts come from the seed and the batch's number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from understudy.core import StepSpec, StoreError
from understudy.service.client.remote_sampler import RemoteSampler


class ShardedSampler:
    """Batches from all of several samplers, in proportion to what each has. Not for several threads at once."""

    def __init__(self, samplers: Mapping[str, RemoteSampler], *, batch_size: int, seed: int = 0):
        self._samplers = dict(samplers)
        self.batch_size = batch_size
        self.seed = seed
        self.num_batches = 0
        self.world_size = 1

    @property
    def shape(self) -> Any:
        return self._first.shape

    @property
    def spec(self) -> StepSpec:
        """That of the first server that has steps."""
        return self._first.spec

    @property
    def _first(self) -> RemoteSampler:
        return next((s for s in self._samplers.values() if len(s)), next(iter(self._samplers.values())))

    def __len__(self) -> int:
        return sum(len(sampler) for sampler in self._samplers.values())

    def follow(self) -> int:
        return sum(sampler.follow() for sampler in self._samplers.values())

    def make(self, size: int | None = None) -> Any:
        return self.shape.make(self.spec, self.batch_size if size is None else size)

    def sample(
        self, out: Any = None, *, at: slice | None = None, size: int | None = None, part: slice | None = None
    ) -> Any:
        """The next batch: the items of one server after those of another. All servers draw at the same time."""
        if part is not None:
            raise StoreError("part: a sharded sampler gives whole batches; let each rank have a seed of its own")
        size = self.batch_size if size is None else size
        for sampler in self._samplers.values():
            if not len(sampler):  # it may have steps by now, and would never be asked
                sampler.follow()
        counts = split(size, [len(sampler) for sampler in self._samplers.values()], self.seed, self.num_batches)
        batch = self.make(size) if out is None else out
        start = 0 if at is None else at.start
        shares = [(s, count) for s, count in zip(self._samplers.values(), counts, strict=True) if count]
        for sampler, count in shares:
            sampler.ask(count)
        for sampler, count in shares:
            sampler.collect(batch, slice(start, start + count))
            start += count
        self.num_batches += 1
        return batch

    def state(self) -> dict[str, Any]:
        return {
            "num_batches": self.num_batches,
            "seed": self.seed,
            "shards": {name: sampler.state() for name, sampler in self._samplers.items()},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        if state["shards"].keys() != self._samplers.keys():
            raise StoreError(
                f"shards: the state is of {sorted(state['shards'])}, and these are {sorted(self._samplers)}; "
                f"connect to the same servers"
            )
        for name, sampler in self._samplers.items():
            sampler.restore(state["shards"][name])
        self.num_batches, self.seed = int(state["num_batches"]), int(state["seed"])

    def close(self) -> None:
        for sampler in self._samplers.values():
            sampler.close()


def split(size: int, masses: Sequence[int], seed: int, batch: int) -> list[int]:
    """How many of `size` draws fall to each of several heaps, each draw by their masses."""
    total = sum(masses)
    if total == 0:
        raise StoreError("there is nothing to draw on any server; record something, then call follow()")
    rng = np.random.Generator(np.random.Philox(key=seed, counter=[0, 0, 1, batch]))
    return [int(count) for count in rng.multinomial(size, np.array(masses) / total)]

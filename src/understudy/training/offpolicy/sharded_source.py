"""Sharded: the steps of a view on several shards, some of them in directories here, some only on servers elsewhere.

A step is drawn in two stages, as service/client/sharded_sampler.py does it: a shard by how many steps it has, then a
step on it. Shards whose directory is on this machine are read there; the others are asked over the network, all at
once. One that does not answer is *away*: its share is drawn from the others until it is back, and if no other has
steps, it is waited for. One that its Remote has forgotten is lost, and dropped with a sentence.
"""

from __future__ import annotations

import logging
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from understudy.core import StoreError, TransitionBatch, Tree
from understudy.core import tree as trees
from understudy.training.offpolicy.sources import Asked, ServerSupply, StoreSupply, Supply, batch_of

if TYPE_CHECKING:
    from understudy.service.client.remote import Remote

logger = logging.getLogger(__name__)

IDLE_S = 0.2  # between two looks at shards that are waited for
OWN = "own"  # the name of the run's own store among shards


@dataclass(frozen=True, kw_only=True)
class Shards:
    """Experience that does not lie in one store here."""

    remote: Remote
    here: Mapping[str, Path] = field(default_factory=dict)  # shards whose directory is on this machine, too
    own: Path | None = None  # a store here in which nobody writes: demonstrations, and what was lived before
    lost: frozenset[str] = frozenset()  # shards of earlier that are gone for good


def open_supply(
    undo: ExitStack, place: Path | Shards, asked: Asked, *, own_first: bool, waiting: Callable[[str], None]
) -> Supply:
    """What there is of a view in a store, or on shards; `waiting` is told whom it waits for, each time it looks."""
    if isinstance(place, Path):
        return StoreSupply(undo, place, asked)
    return ShardedSupply(undo, place, asked, own_first=own_first, waiting=waiting)


class ShardedSupply:
    """The steps of all shards, drawn in proportion to what each has."""

    def __init__(
        self, undo: ExitStack, shards: Shards, asked: Asked, *, own_first: bool, waiting: Callable[[str], None]
    ):
        self._remote = shards.remote
        self._seed = asked.seed
        self._waiting = waiting
        self._num_fills = 0
        self._lost: dict[str, int] = {}  # steps that were on shards that are gone for good
        self._declared = shards.lost
        self._asked = asked
        names = [*shards.remote.names]
        if shards.own is not None:
            names = [OWN, *names] if own_first else [*names, OWN]
        self._parts: dict[str, StoreSupply | ServerSupply] = {}
        for index, name in enumerate(names):
            seed = asked.seed if index == 0 else _seed_of(asked.seed, name)
            mine = Asked(view=asked.view, spec=asked.spec, seed=seed, shape=asked.shape)
            path = shards.own if name == OWN else shards.here.get(name)
            if path is not None:
                self._parts[name] = StoreSupply(undo, path, mine)
            else:
                self._parts[name] = ServerSupply(undo, shards.remote.connection(name), mine)

    @property
    def _servers(self) -> dict[str, ServerSupply]:
        return {name: part for name, part in self._parts.items() if isinstance(part, ServerSupply)}

    @property
    def as_of(self) -> str:
        return ", ".join(f"{part.as_of} of {name}" for name, part in self._parts.items())

    @property
    def away(self) -> Mapping[str, str]:
        return {name: part.problem for name, part in self._servers.items() if part.problem is not None}

    def __len__(self) -> int:
        return sum(len(part) for part in self._parts.values())

    @property
    def num_lived(self) -> int:
        return len(self) + sum(self._all_lost().values())

    def _all_lost(self) -> dict[str, int]:
        """Steps that were lost, by shard: with the shard, or only its store."""
        found = dict(self._lost)
        for name, server in self._servers.items():
            if server.lost:
                found[name] = found.get(name, 0) + server.lost
        return found

    def follow(self) -> int:
        self._drop_lost()
        for server in self._servers.values():
            server.ask(0)
        for part in self._parts.values():
            part.hear() if isinstance(part, ServerSupply) else part.follow()
        return len(self)

    def _drop_lost(self) -> None:
        for name in [name for name in self._parts if name != OWN and name not in self._remote.names]:
            gone = self._parts.pop(name)
            before = self._lost.get(name, 0) + (gone.lost if isinstance(gone, ServerSupply) else 0)
            self._lost[name] = before + len(gone)
            logger.warning(
                "%s: is lost, and with it %d steps of view %s that were learned from; going on with %s",
                name,
                self._lost[name],
                self._asked.view.name,
                ", ".join(self._parts) or "nothing",
            )

    def fill(self, batch: TransitionBatch, at: slice) -> None:
        start = at.start
        while start < at.stop:
            counts = self._split(at.stop - start, self._num_fills)
            self._num_fills += 1
            for name, count in counts.items():
                part = self._parts[name]
                if isinstance(part, ServerSupply):
                    part.ask(count)
            for name, count in counts.items():
                part = self._parts[name]
                # What one that goes away owes is drawn again, from the others.
                if part.fill(batch, slice(start, start + count)) is not False:
                    start += count

    def _split(self, size: int, number: int) -> dict[str, int]:
        """How many of `size` draws fall to each shard that is there; waits while all that have steps are away."""
        from understudy.service.client.sharded_sampler import split  # only now: it needs gRPC

        while True:
            there = {name: len(part) for name, part in self._parts.items() if name not in self.away and len(part)}
            if there:
                counts = split(size, list(there.values()), self._seed, number)
                return {name: count for name, count in zip(there, counts, strict=True) if count}
            if not self.away:
                raise Emptied(f"view {self._asked.view.name!r}: all shards that had steps of it are lost")
            self._waiting(f"waiting for {', '.join(self.away)}")
            time.sleep(IDLE_S)
            self.follow()

    def sample(self, size: int) -> TransitionBatch:
        return batch_of(self, self._asked, size, ", ".join(self._parts))

    def look(self, num_steps: int) -> Tree:
        found: list[Tree] = []
        while not found:
            for name, count in self._split(num_steps, 0).items():
                seen = self._parts[name].look(count)
                found += [] if seen is None else [seen]
        return found[0] if len(found) == 1 else _concatenated(found)

    def state(self) -> dict[str, Any]:
        return {
            "num_fills": self._num_fills,
            "lost": self._all_lost(),
            "shards": {
                name: {"steps": len(part), "store": part.store, "state": part.state()}
                for name, part in self._parts.items()
            },
        }

    def restore(self, state: Mapping[str, Any] | None) -> None:
        if state is None:
            return
        if "shards" not in state:  # of a run in one process
            state = {"num_fills": 0, "lost": {}, "shards": {OWN: {"steps": 0, "store": None, "state": state}}}
        self._num_fills, self._lost = int(state["num_fills"]), dict(state["lost"])
        for name, said in state["shards"].items():
            part = self._parts.get(name)
            if isinstance(part, ServerSupply):
                part.restore(said["state"], int(said["steps"]), said["store"])
            elif part is not None and said["store"] in (None, part.store):
                part.restore(said["state"])
            elif part is not None or name in self._declared:
                logger.warning("%s: its %d steps that were learned from are lost", name, said["steps"])
                self._lost[name] = self._lost.get(name, 0) + int(said["steps"])
            else:
                raise StoreError(
                    f"{name}: the checkpoint counts on this shard, and there are {', '.join(self._parts)}; "
                    f"connect to it too, or say that it is lost"
                )


class Emptied(StoreError):
    """There is nothing left to draw."""


def _concatenated(found: Sequence[Tree]) -> Tree:
    flat = [trees.flatten(tree) for tree in found]
    return trees.unflatten({path: np.concatenate([one[path] for one in flat]) for path in flat[0]})


def _seed_of(seed: int, name: str) -> int:
    return int(np.random.SeedSequence([seed, zlib.crc32(name.encode())]).generate_state(1, np.uint64)[0])

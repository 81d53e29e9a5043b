"""ShardedSampler: batches from the stores of several shards, some in directories on this machine, some on servers.

A step is drawn in two stages: a shard by how many steps it has, then a step on it by the selector. So every step of all
shards is drawn alike, and no server knows of another. The counts come from the seed and the number of the draw.

A shard that does not answer is *unreachable*: its share is drawn from the others until it is back, and if no other has
steps, the sampler waits for it. A shard that was removed from the Remote is *lost*: the sampler logs it and continues
without it.
"""

from __future__ import annotations

import logging
import math
import time
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, Protocol, cast

import numpy as np

from understudy.core import StepSpec, StoreError, UnavailableError
from understudy.core.closeable import Closeable
from understudy.core.resize import ResizeOption, resized_spec, sizes_by_field
from understudy.replay.read.batch_shapes import Transitions
from understudy.replay.read.view import View, check_view
from understudy.replay.sample.batch_source import Batch, BatchShape, EmptyError
from understudy.replay.sample.sampler import EMPTY_STORE, Sampler
from understudy.replay.sample.selectors import Selector, Uniform
from understudy.service.client.connection import Connection
from understudy.service.client.remote_sampler import RemoteSampler
from understudy.service.wire.protocol import ReplacedError

logger = logging.getLogger(__name__)

ANSWER_TIMEOUT_S = 10.0  # after which a shard counts as unreachable
RETRY_S = 5.0  # between two attempts to reach an unreachable shard
IDLE_S = 0.2  # between two looks at shards that the sampler waits for
OWN = "own"  # the name, among shards, of a store on this machine that no server serves


class Servers(Protocol):
    """What is needed of a Remote."""

    @property
    def names(self) -> tuple[str, ...]: ...

    def connection(self, name: str) -> Connection: ...


class ShardedSampler(Closeable, Generic[Batch]):
    """Batches from all of several shards, in proportion to the steps of each. Not for several threads at once."""

    def __init__(
        self,
        remote: Servers,
        view: View,
        *,
        stores: Mapping[str, Path | None] | None = None,
        batch_size: int,
        seed: int = 0,
        shape: BatchShape[Batch] | None = None,
        selector: Callable[[], Selector] = Uniform,
        spec: int | StepSpec | None = None,
        resize: ResizeOption | None = None,
        lost: Collection[str] = (),
        on_wait: Callable[[str], None] = lambda text: None,
        max_wait_s: float = math.inf,
    ):
        """`stores` names the shards (by default those of `remote`), each with its directory, or None to ask its server.
        The first draws what a Sampler of the same seed draws. A state may count on shards that are `lost`. While all
        shards with steps are unreachable, `on_wait` is called again and again, up to `max_wait_s`."""
        check_view(view)
        self.view = view
        self.shape: BatchShape[Batch] = shape or cast("BatchShape[Batch]", Transitions())
        self.batch_size = batch_size
        self.seed = seed
        self.world_size = 1
        self.num_draws = 0
        self._spec = resized_spec(spec, sizes_by_field(spec, resize)) if isinstance(spec, StepSpec) else None
        self._remote = remote
        self._served = frozenset(remote.names)
        self._declared_lost = frozenset(lost)
        self._on_wait = on_wait
        self._max_wait_s = max_wait_s
        self._lost: dict[str, int] = {}  # steps of lost shards, by name
        self._shards: dict[str, _LocalShard[Batch] | _RemoteShard[Batch]] = {}
        try:
            for name, path in (dict.fromkeys(remote.names) if stores is None else stores).items():
                shard_seed = _seed_of(seed, name) if self._shards else seed
                options: dict[str, Any] = {"batch_size": batch_size, "seed": shard_seed, "shape": shape}
                options |= {"spec": spec, "resize": resize}
                if path is not None:
                    self._shards[name] = _LocalShard(Sampler(path, view, selector=selector(), **options))
                else:
                    options |= {"depth": 0, "timeout_s": ANSWER_TIMEOUT_S}
                    self._shards[name] = _RemoteShard(remote.connection(name), view, selector, options)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        for shard in self._shards.values():
            shard.sampler.close()

    # ---- what there is

    @property
    def spec(self) -> StepSpec:
        if self._known_spec() is None:
            self.follow()
        spec = self._known_spec()
        if spec is None:
            raise EmptyError(EMPTY_STORE)
        return spec

    def _known_spec(self) -> StepSpec | None:
        found = [self._spec, *(shard.sampler.known_spec for shard in self._shards.values())]
        return next((spec for spec in found if spec is not None), None)

    @property
    def as_of(self) -> str:
        return ", ".join(f"{shard.sampler.as_of} of {name}" for name, shard in self._shards.items())

    @property
    def unreachable(self) -> dict[str, str]:
        """Shards that do not answer at the moment, and why."""
        return {name: shard.problem for name, shard in self._shards.items() if shard.problem is not None}

    @property
    def num_lost(self) -> int:
        """Steps that were drawn from and are gone, with their shard or because its store was replaced."""
        return sum(self._all_lost().values())

    def _all_lost(self) -> dict[str, int]:
        found = dict(self._lost)
        for name, shard in self._shards.items():
            if shard.num_lost:
                found[name] = found.get(name, 0) + shard.num_lost
        return found

    def __len__(self) -> int:
        """How many steps can be drawn, with those of unreachable shards."""
        return sum(len(shard) for shard in self._shards.values())

    def follow(self) -> int:
        """Take in new commits of all shards; returns how many steps can be drawn."""
        self._drop_lost()
        for shard in self._shards.values():
            shard.request(0)
        for shard in self._shards.values():
            shard.poll()
        return len(self)

    def _drop_lost(self) -> None:
        for name in [name for name in self._shards if name in self._served and name not in self._remote.names]:
            shard = self._shards.pop(name)
            shard.sampler.close()
            self._lost[name] = self._lost.get(name, 0) + shard.num_lost + len(shard)
            logger.warning(
                "%s: is lost, and with it %d steps of view %s that were learned from; continuing with %s",
                name,
                self._lost[name],
                self.view.name,
                ", ".join(self._shards) or "nothing",
            )

    # ---- drawing

    def make(self, size: int | None = None) -> Batch:
        """A batch to be filled again and again."""
        return self.shape.make(self.spec, self.batch_size if size is None else size)

    def sample(
        self, out: Batch | None = None, *, at: slice | None = None, size: int | None = None, part: slice | None = None
    ) -> Batch:
        """The next batch: the items of one shard after those of another. All servers draw at the same time."""
        if part is not None:
            raise StoreError("part: a sharded sampler gives whole batches; let each rank have a seed of its own")
        if not len(self):
            self.follow()
        return self._fill(self.batch_size if size is None else size, out, at, peek=False)

    def skip(self, num_batches: int = 1, *, size: int | None = None) -> None:
        """Pass over the next batches, of `size` steps each, without reading them."""
        for _ in range(num_batches):
            if not len(self):
                self.follow()
            counts = self._split(self.batch_size if size is None else size, self.seed, self.num_draws)
            self.num_draws += 1
            for name, count in counts.items():
                self._shards[name].skip(count)

    def peek(self, size: int, out: Batch | None = None, *, at: slice | None = None) -> Batch:
        """Some steps, drawn uniformly: the same ones for the same contents. The batches that follow do not change."""
        return self._fill(size, out, at, peek=True)

    def _fill(self, size: int, out: Batch | None, at: slice | None, *, peek: bool) -> Batch:
        """Draw until the batch is full: what a shard owes that becomes unreachable is drawn from the others."""
        start, stop = (0, size) if at is None else (at.start, at.stop)
        batch = out
        while batch is None or start < stop:
            counts = self._split(stop - start, 0, 0) if peek else self._split(stop - start, self.seed, self.num_draws)
            batch = self.make(size) if batch is None else batch
            self.num_draws += not peek
            start = self._collect(batch, start, counts, peek=peek)
        return batch

    def _collect(self, batch: Batch, start: int, counts: Mapping[str, int], *, peek: bool) -> int:
        """Draw so many steps from each shard into `batch[start:]`; returns where they end."""
        shards = {name: self._shards[name] for name in counts}
        try:
            for name, shard in shards.items():
                if not peek:
                    shard.request(counts[name])
            for name, shard in shards.items():
                at = slice(start, start + counts[name])
                if shard.peek(batch, at) if peek else shard.collect(batch, at):
                    start = at.stop
        except BaseException:
            for shard in shards.values():
                shard.cancel()
            raise
        return start

    def _split(self, size: int, seed: int, number: int) -> dict[str, int]:
        """How many of `size` steps each reachable shard gives; waits while all that have steps are unreachable."""
        deadline = time.monotonic() + self._max_wait_s
        while True:
            missing = self.unreachable
            there = {name: len(shard) for name, shard in self._shards.items() if name not in missing and len(shard)}
            if there:
                counts = split(size, list(there.values()), seed, number)
                return {name: count for name, count in zip(there, counts, strict=True) if count}
            if not missing:
                raise EmptyError(
                    f"view {self.view.name!r}: there is nothing to draw on {', '.join(self._shards) or 'any shard'}; "
                    f"record something, then call follow()"
                )
            if time.monotonic() > deadline:
                name, problem = next(iter(missing.items()))
                raise UnavailableError(f"{name}: cannot be reached, and no other shard has steps ({problem})")
            self._on_wait(f"waiting for {', '.join(missing)}")
            time.sleep(IDLE_S)
            self.follow()

    # ---- state

    def state(self) -> dict[str, Any]:
        return {
            "num_draws": self.num_draws,
            "seed": self.seed,
            "lost": self._all_lost(),
            "shards": {name: shard.state() for name, shard in self._shards.items()},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was taken, also if that was a Sampler of the store `own`; only on a new sampler.
        Unreachable shards are restored when they are back."""
        if "shards" not in state:
            shards = {OWN: {"steps": 0, "store": None, "state": state}}
            state = {"num_draws": 0, "seed": self.seed, "lost": {}, "shards": shards}
        self.num_draws, self.seed, self._lost = int(state["num_draws"]), int(state["seed"]), dict(state["lost"])
        for name, saved in state["shards"].items():
            if name not in self._shards and name not in self._declared_lost:
                raise StoreError(
                    f"{name}: the checkpoint counts on this shard, and there are {', '.join(self._shards)}; "
                    f"connect to it too, or say that it is lost"
                )
            if name not in self._shards or not self._shards[name].restore(saved):
                logger.warning("%s: its %d steps that were learned from are lost", name, saved["steps"])
                self._lost[name] = self._lost.get(name, 0) + int(saved["steps"])


class _LocalShard(Generic[Batch]):
    """The steps of a shard whose directory is on this machine."""

    problem: str | None = None
    num_lost = 0

    def __init__(self, sampler: Sampler[Batch]):
        self.sampler = sampler

    def __len__(self) -> int:
        return len(self.sampler)

    def request(self, size: int) -> None:
        """Nothing: `poll` and `collect` do it all."""

    def cancel(self) -> None:
        """Nothing is on its way."""

    def poll(self) -> None:
        self.sampler.follow()

    def collect(self, batch: Batch, at: slice) -> bool:
        self.sampler.sample(batch, at=at, size=at.stop - at.start)
        return True

    def skip(self, size: int) -> None:
        self.sampler.skip(size=size)

    def peek(self, batch: Batch, at: slice) -> bool:
        self.sampler.peek(at.stop - at.start, batch, at=at)
        return True

    def state(self) -> dict[str, Any]:
        return {"steps": len(self), "store": self.sampler.store_id, "state": self.sampler.state()}

    def restore(self, saved: Mapping[str, Any]) -> bool:
        """False if there is another store in the directory now."""
        if saved["store"] not in (None, self.sampler.store_id):
            return False
        if saved["state"] is not None:
            self.sampler.restore(saved["state"])
        return True


class _RemoteShard(Generic[Batch]):
    """The steps of a shard that is on a server. While that does not answer, it is `problem` that says why, and nothing
    raises. If the server has another store some day, the steps of the one before are lost."""

    def __init__(
        self, connection: Connection, view: View, selector: Callable[[], Selector], options: Mapping[str, Any]
    ):
        self.problem: str | None = None
        self.num_lost = 0
        self._connection = connection
        self._new_sampler: Callable[[], RemoteSampler[Batch]] = lambda: RemoteSampler(
            connection, view, selector=selector(), **options
        )
        self.sampler = self._new_sampler()
        self._num_steps = 0  # when the server answered last
        self._retry_address, self._retry_at = "", 0.0

    def __len__(self) -> int:
        return self._num_steps

    def request(self, size: int) -> None:
        """Request steps, or with 0 the server's status; nothing while it is unreachable."""
        if self.problem is None or self._is_back():
            self.sampler.request(size)

    def cancel(self) -> None:
        """Forget what was requested."""
        self.sampler.cancel()

    def poll(self) -> None:
        """Take in the answer to `request(0)`."""
        if self.problem is None:
            self._try(self.sampler.poll)

    def collect(self, batch: Batch, at: slice) -> bool:
        """Write the steps that were requested to `batch[at]`; False if it is unreachable."""
        return self.problem is None and self._try(lambda: self.sampler.collect(batch, at))

    def skip(self, size: int) -> None:
        """See Sampler; nothing while it is unreachable."""
        if self.problem is None:
            self._try(lambda: self.sampler.skip(size=size))

    def peek(self, batch: Batch, at: slice) -> bool:
        """See Sampler; False if it is unreachable."""
        return self.problem is None and self._try(lambda: self.sampler.peek(at.stop - at.start, batch, at=at))

    def _try(self, call: Callable[[], object]) -> bool:
        try:
            call()
        except UnavailableError as error:
            logger.warning(
                "%s: cannot be reached (%s); continuing without it until it is back", self._connection.name, error
            )
            self.problem = str(error)
            self._retry_address, self._retry_at = self._connection.address, time.monotonic() + RETRY_S
            return False
        except ReplacedError:
            logger.warning(
                "%s: has another store, and %d steps of view %s that were learned from are lost",
                self._connection.name,
                self._num_steps,
                self.sampler.view.name,
            )
            self.num_lost, self._num_steps = self.num_lost + self._num_steps, 0
            self.sampler.close()
            self.sampler = self._new_sampler()
            return False
        self._num_steps = len(self.sampler)
        return True

    def _is_back(self) -> bool:
        """Ask the server, if it is time to or it has moved."""
        if self._retry_address == self._connection.address and time.monotonic() < self._retry_at:
            return False
        if self._connection.problem() is not None:
            self._retry_address, self._retry_at = self._connection.address, time.monotonic() + RETRY_S
            return False
        logger.info("%s: is back", self._connection.name)
        self.problem = None
        return True

    def state(self) -> dict[str, Any]:
        return {"steps": len(self), "store": self.sampler.store_id, "state": self.sampler.last_state}

    def restore(self, saved: Mapping[str, Any]) -> bool:
        """True: whether the server has the same store is known when it answers."""
        self._num_steps = int(saved["steps"])
        if saved["state"] is not None:
            self.sampler.resume_from(saved["state"], saved["store"])
        return True


def split(size: int, masses: Sequence[int], seed: int, batch: int) -> list[int]:
    """How many of `size` draws fall to each of several heaps, each draw by their masses."""
    total = sum(masses)
    if total == 0:
        raise EmptyError("there is nothing to draw on any server; record something, then call follow()")
    rng = np.random.Generator(np.random.Philox(key=seed, counter=[0, 0, 1, batch]))
    return [int(count) for count in rng.multinomial(size, np.array(masses) / total)]


def _seed_of(seed: int, name: str) -> int:
    return int(np.random.SeedSequence([seed, zlib.crc32(name.encode())]).generate_state(1, np.uint64)[0])

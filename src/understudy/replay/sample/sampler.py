"""Sampler: batches from a view of a store on this machine, the same ones for the same seed, commit and number.

    sampler = Sampler(reader, DEMO, shape=Transitions(), batch_size=256, seed=1)
    sampler.follow()
    batch = sampler.sample()

A batch is drawn as of a commit, with random numbers that depend only on the seed and the batch's number. Its record,
one line of JSON, is enough to draw it again, in any process and after the store has grown. A forked process has a
sampler of its own, which goes on with the same batches as the original.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Generic, cast

import numpy as np

from understudy.core import DamageError, StepSpec, StoreError
from understudy.core.closeable import Closeable
from understudy.core.resize import ResizeOption, resized_spec, sizes_by_field
from understudy.processes import forks
from understudy.replay.read.batch_shapes import Transitions
from understudy.replay.read.derived_frames import FrameCache
from understudy.replay.read.gather import Gatherer
from understudy.replay.read.reader import Reader
from understudy.replay.read.step_index import StepIndex
from understudy.replay.read.view import View, ViewIndex, check_view
from understudy.replay.sample.batch_source import Batch, BatchShape, EmptyError, part_of
from understudy.replay.sample.cache_filler import CacheFiller
from understudy.replay.sample.selectors import Drawn, Selector, Uniform

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, kw_only=True)
class BatchRecord:
    """What it takes to draw a batch again, together with the view, the shape and the selector of its sampler."""

    view: str
    commit: int
    seed: int
    batch: int
    size: int

    def __str__(self) -> str:
        return json.dumps(asdict(self))


class Sampler(Closeable, Generic[Batch]):
    """Batches of one view, one shape and one spec. Not for several threads at once.

    The store may be empty: it has no steps to draw until `follow` finds some. `spec` is needed if the store holds
    several: the number of one, or the spec itself, and then steps of any other spec are refused.
    """

    def __init__(
        self,
        store: Reader | Path,
        view: View,
        *,
        batch_size: int,
        seed: int = 0,
        shape: BatchShape[Batch] | None = None,
        selector: Selector | None = None,
        spec: int | StepSpec | None = None,
        resize: ResizeOption | None = None,
        frame_cache: FrameCache | None = None,
        rank: int = 0,
        world_size: int = 1,
        num_threads: int = 4,
        on_ragged: Callable[[int], None] | None = None,
    ):
        """`store` is a reader that the caller closes, or a directory for a reader that `close` closes.

        `resize` asks for another size of all cameras of the observation, (height, width), or of some by name; a Resize
        may also crop. The spec of the sampler is then that of its batches. `frame_cache` says where and how many
        resized frames are kept.
        `on_ragged` is called with the bytes of text and ragged values of a batch before they are read, and may raise.
        """
        check_view(view)
        if batch_size < 1:
            raise StoreError(f"batch_size: expected a number from 1, got {batch_size}")
        if not 0 <= rank < world_size:
            raise StoreError(f"rank: expected a number from 0 to {world_size - 1}, got {rank}")
        self.view = view
        self.shape: BatchShape[Batch] = shape or cast("BatchShape[Batch]", Transitions())
        self.selector = selector or Uniform()
        self.batch_size = batch_size  # of all ranks together
        self.rank = rank
        self.world_size = world_size
        self.seed = seed
        self.num_batches = 0  # drawn so far
        self.last_record: BatchRecord | None = None
        self.num_lost = 0  # a store on this machine is whole, or it is an error
        self.unreachable: Mapping[str, str] = {}
        self.known_spec: StepSpec | None = None  # of the batches
        self.stored_spec: StepSpec | None = None  # of the steps in the store
        if isinstance(spec, StepSpec):
            self.known_spec = resized_spec(spec, sizes_by_field(spec, resize))
        self._wanted_spec = spec
        self._resize = resize
        self._frame_cache = frame_cache or FrameCache()
        self._num_threads = num_threads
        self._on_ragged = on_ragged
        self._index: ViewIndex | None = None  # None until the store knows the spec
        self._gather: Gatherer | None = None
        self._filler: CacheFiller | None = None
        self._reader = store if isinstance(store, Reader) else Reader(store)
        self._owns_reader = store is not self._reader
        self.step_index = StepIndex(self._reader)
        try:
            self._open_index()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if self._filler is not None:
            self._filler.close()
        if self._gather is not None:
            self._gather.close()
        if self._owns_reader:
            self._reader.close()

    def _open_index(self) -> None:
        """Make the index, unless the store is empty: then it does not know the spec yet."""
        number = _spec_number(self._reader, self._wanted_spec)
        if number is not None:
            self.stored_spec = stored = self._reader.spec(number)
            sizes = sizes_by_field(stored, self._resize)
            self.known_spec = resized_spec(stored, sizes)
            self._index = ViewIndex(self.step_index, self.view, spec=number, lookahead=self.shape.lookahead)
            self._gather = Gatherer(
                self._reader,
                stored,
                sizes=sizes,
                frame_cache=self._frame_cache,
                num_threads=self._num_threads,
                on_ragged=self._on_ragged,
            )
            if self._gather.resized and self._frame_cache.fill_threads:
                fields = tuple(self._gather.resized.values())
                self._filler = CacheFiller(self._index, fields, self._frame_cache.fill_threads)

    # ---- what there is

    @property
    def spec(self) -> StepSpec:
        if self.known_spec is None:
            raise EmptyError(EMPTY_STORE)
        return self.known_spec

    @property
    def index(self) -> ViewIndex:
        """The steps of the view."""
        if self._index is None:
            raise EmptyError(EMPTY_STORE)
        return self._index

    @property
    def store_id(self) -> str:
        return self._reader.catalog.store_id

    @property
    def as_of(self) -> str:
        return f"commit {self.step_index.commit}"

    def follow(self, until: int | None = None) -> int:
        """Take in new commits (up to `until`); returns how many steps can be drawn."""
        with forks.unforked:
            if self._index is None:
                self._open_index()
            if self._index is not None and self._gather is not None:
                self.step_index.follow(until)
                self._index.follow()
                self._gather.forget_removed()
                if self._filler is not None:
                    self._filler.add_new_rows()
            return len(self)

    def wait_for_frames(self, timeout_s: float) -> bool:
        """Wait until the resized frames of what is known since the last `follow` are in the cache, or were given up.

        False if that takes longer, or another process is filling the cache, or it is full.
        """
        return self._filler is None or self._filler.wait(timeout_s)

    def __len__(self) -> int:
        return 0 if self._index is None else self.selector.available(self._index)

    # ---- drawing

    def sample(
        self, out: Batch | None = None, *, at: slice | None = None, size: int | None = None, part: slice | None = None
    ) -> Batch:
        """The next batch, or this rank's part of it, of what is known since the last `follow`.

        All ranks draw the same batch and keep their own part, so that a change of their number changes no batch.
        With `out`, a batch that `make` made, it is written there (to the part `at`, if given) and nothing is allocated.
        """
        size = self.batch_size if size is None else size
        mine = self.part(size) if part is None else part
        with forks.unforked:
            drawn = self._draw(size)
            batch = self.shape.make(self.spec, mine.stop - mine.start) if out is None else out
            at = slice(0, mine.stop - mine.start) if at is None else at
            if mine.start < mine.stop:
                self._fill(batch, at, drawn.span[mine], drawn.offset[mine])
                weight = drawn.weight[mine]
                batch.weight[at] *= weight if batch.weight.ndim == 1 else weight[:, None]
            return batch

    def skip(self, num_batches: int = 1, *, size: int | None = None) -> None:
        """Pass over the next batches, of `size` steps each, without reading them."""
        if not self.selector.state():  # what it chooses depends only on the number of the batch
            self.num_batches += num_batches
            return
        with forks.unforked:
            for _ in range(num_batches):
                self._draw(self.batch_size if size is None else size)

    def peek(self, size: int, out: Batch | None = None, *, at: slice | None = None) -> Batch:
        """Some steps, drawn uniformly: the same ones for the same contents. The batches that follow do not change."""
        with forks.unforked:
            drawn = Uniform().draw(self.index, _rng(0, 0), size)
            batch = self.shape.make(self.spec, size) if out is None else out
            self._fill(batch, slice(0, size) if at is None else at, drawn.span, drawn.offset)
            return batch

    def _fill(self, batch: Batch, at: slice, span: Array, offset: Array) -> None:
        """Write the steps before these rows to `batch[at]`."""
        assert self._gather is not None
        span, offset = self.step_index.step_by(span, offset, -1)
        try:
            self.shape.fill(batch, at, self.step_index, self._gather, span, offset)
        except DamageError as error:
            # Compaction may have moved the rows since the last `follow`; then they are elsewhere, or gone for good.
            moved = self.step_index.follow_moves()
            gone = [e for e in np.unique(self.step_index.span_episode.values[span]).tolist() if self._purged(e)]
            if not gone and moved:
                self.shape.fill(batch, at, self.step_index, self._gather, span, offset)
                return
            if not gone:
                raise
            raise StoreError(
                f"episode {gone[0]} was deleted and its rows removed since commit {self.step_index.commit}; "
                f"call follow()"
            ) from error

    def _purged(self, episode: int) -> bool:
        record = self._reader.catalog.episode(episode)
        return record is None or record.purged

    def make(self, size: int | None = None) -> Batch:
        """A batch to be filled again and again; of this rank's part."""
        part = self.part(self.batch_size if size is None else size)
        return self.shape.make(self.spec, part.stop - part.start)

    def part(self, size: int) -> slice:
        """Which items of a batch of `size` belong to this rank."""
        return part_of(size, self.rank, self.world_size)

    def _draw(self, size: int) -> Drawn:
        if size and len(self) == 0:
            if self._index is None:
                raise EmptyError(EMPTY_STORE)
            newest, seen = self._reader.last_commit(), self.step_index.commit
            behind = f"the store is at commit {newest}, so call follow() first"
            raise EmptyError(
                f"view {self.view.name!r}: there is nothing to draw as of commit {seen}; "
                f"{behind if newest > seen else 'record something, then call follow()'}"
            )
        self.last_record = BatchRecord(
            view=self.view.name, commit=self.step_index.commit, seed=self.seed, batch=self.num_batches, size=size
        )
        self.num_batches += 1
        return self.selector.draw(self.index, _rng(self.seed, self.last_record.batch), size)

    # ---- state

    def state(self) -> dict[str, Any]:
        """A few numbers, from which `restore` continues with the same batches."""
        return {
            "seed": self.seed,
            "num_batches": self.num_batches,
            "commit": self.step_index.commit,
            "view": self.view.name,
            "selector": self.selector.state(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was taken: as of the same commit, with the next batch. Only on a new sampler."""
        if self.step_index.commit:
            raise StoreError("a sampler is restored before it follows the store; make a new one")
        if state["view"] != self.view.name:
            raise StoreError(f"view: the state is of {state['view']!r}, and this sampler of {self.view.name!r}")
        self.follow(int(state["commit"]))
        if self.step_index.commit != state["commit"]:
            raise StoreError(
                f"the state is of commit {state['commit']}, and this store has only {self.step_index.commit}; "
                f"is it the right store?"
            )
        self.seed, self.num_batches = int(state["seed"]), int(state["num_batches"])
        self.selector.restore(dict(state["selector"]))

    def rebuild(self, record: BatchRecord | str) -> Batch:
        """Draw a past batch of a sampler of this kind again, from its record. Only on a new sampler."""
        if isinstance(record, str):
            record = BatchRecord(**json.loads(record))
        self.restore(
            {
                "seed": record.seed,
                "num_batches": record.batch,
                "commit": record.commit,
                "view": record.view,
                "selector": self.selector.state(),
            }
        )
        return self.sample(size=record.size)


EMPTY_STORE = "there is nothing to draw: the store is empty; record something, then call follow()"


def _rng(seed: int, batch: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=seed, counter=[0, 0, 0, batch]))


def _spec_number(reader: Reader, wanted: int | StepSpec | None) -> int | None:
    """The number of the spec to draw in this store; None if the store is empty."""
    known = reader.catalog.spec_ids()
    if not known:
        return None
    if isinstance(wanted, StepSpec):
        alike = [number for number in known if reader.spec(number).decoded == wanted.decoded]
        found = [number for number in alike if reader.spec(number) == wanted] or alike
        if not found:
            raise other_spec(str(reader.path), reader.spec(known[0]), wanted)
        return found[0]
    if wanted is None and len(known) == 1:
        return known[0]
    if wanted in known:
        return wanted
    raise StoreError(
        f"{reader.path}: holds {len(known)} specs, and a batch is of one; pass spec=, one of {known} "
        f"(`understudy info` lists them)"
    )


def other_spec(where: str, got: StepSpec, wanted: StepSpec) -> StoreError:
    """The error that a store holds steps of another spec, with the first field that differs."""
    flat, wanted_flat = (
        dict([*spec.observation.leaves("observation"), *spec.action.leaves("action")]) for spec in (got, wanted)
    )
    difference = "its reward or extras differ"
    for path in sorted({*flat, *wanted_flat}):
        if flat.get(path) != wanted_flat.get(path):
            difference = f"{path} is {flat.get(path, 'not there')}, expected {wanted_flat.get(path, 'nothing')}"
            break
    return StoreError(
        f"{where}: holds steps of another spec ({difference}); record and train in the same world with the same options"
    )

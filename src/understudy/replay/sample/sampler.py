"""Sampler: batches from a view, the same ones for the same seed, commit and number.

    sampler = Sampler(reader, DEMO, shape=Transitions(), batch_size=256, seed=1)
    sampler.follow()
    batch = sampler.sample()

A batch is drawn as of a commit, with random numbers that depend on nothing but the seed and the batch's number. Its
record, one line of JSON, is enough to draw it again, in any process and after the store has grown.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np

from understudy.core import DamageError, StepSpec, StoreError
from understudy.replay.read.batch_shapes import Transitions
from understudy.replay.read.gather import Gatherer
from understudy.replay.read.reader import Reader
from understudy.replay.read.step_index import StepIndex
from understudy.replay.read.view import View, ViewIndex
from understudy.replay.sample.selectors import Drawn, Selector, Uniform

Array = np.ndarray[Any, Any]


class BatchShape(Protocol):
    """What a drawn step becomes; see shapes.py."""

    @property
    def lookahead(self) -> int: ...

    def make(self, spec: StepSpec, size: int) -> Any: ...

    def fill(self, batch: Any, at: slice, steps: StepIndex, gather: Gatherer, span: Array, offset: Array) -> None: ...


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


class Sampler:
    """Batches of one view, one shape and one spec. Not for several threads at once."""

    def __init__(
        self,
        reader: Reader,
        view: View,
        *,
        batch_size: int,
        seed: int = 0,
        shape: BatchShape | None = None,
        selector: Selector | None = None,
        spec: int | None = None,
        rank: int = 0,
        world_size: int = 1,
        num_threads: int = 4,
    ):
        if batch_size < 1:
            raise StoreError(f"batch_size: expected a number from 1, got {batch_size}")
        if not 0 <= rank < world_size:
            raise StoreError(f"rank: expected a number from 0 to {world_size - 1}, got {rank}")
        self.view = view
        self.shape = shape or Transitions()
        self.selector = selector or Uniform()
        self.batch_size = batch_size  # of all ranks together
        self.rank = rank
        self.world_size = world_size
        self.seed = seed
        self.num_batches = 0  # drawn so far
        self.last_record: BatchRecord | None = None
        spec_id = _one_spec(reader, spec)
        self.spec = reader.spec(spec_id)
        self.step_index = StepIndex(reader)
        self.index = ViewIndex(self.step_index, view, spec=spec_id, lookahead=self.shape.lookahead)
        self._gather = Gatherer(reader, self.spec, num_threads=num_threads)

    def close(self) -> None:
        self._gather.close()

    # ---- what there is

    def follow(self, until: int | None = None) -> int:
        """Take in new commits (up to `until`); returns how many steps can be drawn."""
        self.step_index.follow(until)
        self.index.follow()
        return len(self)

    def __len__(self) -> int:
        return self.selector.available(self.index)

    # ---- drawing

    def sample(
        self, out: Any = None, *, at: slice | None = None, size: int | None = None, part: slice | None = None
    ) -> Any:
        """The next batch, or this rank's part of it, of what is known since the last `follow`.

        All ranks draw the same batch and keep their own part, so that a change of their number changes no batch.
        With `out`, a batch that `make` made, it is written there (to the part `at`, if given) and nothing is allocated.
        """
        size = self.batch_size if size is None else size
        mine = self.part(size) if part is None else part
        batch = self.make(size) if out is None else out
        at = slice(0, mine.stop - mine.start) if at is None else at
        drawn = self._draw(size)
        if mine.start < mine.stop:
            self._fill(batch, at, *self.step_index.step_by(drawn.span[mine], drawn.offset[mine], -1))
            weight = drawn.weight[mine]
            batch.weight[at] *= weight if batch.weight.ndim == 1 else weight[:, None]
        return batch

    def _fill(self, batch: Any, at: slice, span: Array, offset: Array) -> None:
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
        record = self.step_index.reader.catalog.episode(episode)
        return record is None or record.purged

    def make(self, size: int | None = None) -> Any:
        """A batch to be used again and again; of this rank's part."""
        part = self.part(self.batch_size if size is None else size)
        return self.shape.make(self.spec, part.stop - part.start)

    def part(self, size: int) -> slice:
        """Which items of a batch of `size` are this rank's."""
        return part_of(size, self.rank, self.world_size)

    def _draw(self, size: int) -> Drawn:
        if size and len(self) == 0:
            raise StoreError(
                f"view {self.view.name!r}: there is nothing to draw as of commit {self.step_index.commit}; "
                f"record something, then call follow()"
            )
        self.last_record = BatchRecord(
            view=self.view.name, commit=self.step_index.commit, seed=self.seed, batch=self.num_batches, size=size
        )
        self.num_batches += 1
        return self.selector.draw(self.index, self._rng(self.last_record), size)

    @staticmethod
    def _rng(record: BatchRecord) -> np.random.Generator:
        return np.random.Generator(np.random.Philox(key=record.seed, counter=[0, 0, 0, record.batch]))

    # ---- state

    def state(self) -> dict[str, Any]:
        """A few numbers, from which `restore` goes on with the same batches."""
        return {
            "seed": self.seed,
            "num_batches": self.num_batches,
            "commit": self.step_index.commit,
            "view": self.view.name,
            "selector": self.selector.state(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken: as of the same commit, with the next batch. Only on a new sampler."""
        if self.step_index.commit:
            raise StoreError("a sampler is restored before it follows the store; make a new one")
        if state["view"] != self.view.name:
            raise StoreError(f"view: the state is of {state['view']!r}, and this sampler of {self.view.name!r}")
        self.step_index.follow(int(state["commit"]))
        if self.step_index.commit != state["commit"]:
            raise StoreError(
                f"the state is of commit {state['commit']}, and this store has only {self.step_index.commit}; "
                f"is it the right store?"
            )
        self.index.follow()
        self.seed, self.num_batches = int(state["seed"]), int(state["num_batches"])
        self.selector.restore(dict(state["selector"]))

    def rebuild(self, record: BatchRecord | str) -> Any:
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


def part_of(size: int, rank: int, world_size: int) -> slice:
    """Which items of a batch are a rank's; the parts of all ranks are the batch."""
    return slice(size * rank // world_size, size * (rank + 1) // world_size)


def _one_spec(reader: Reader, spec: int | None) -> int:
    known = reader.catalog.spec_ids()
    if spec is None and len(known) == 1:
        return known[0]
    if spec is not None and spec in known:
        return spec
    raise StoreError(
        f"{reader.path}: holds {len(known)} specs, and a batch is of one; pass spec=, one of {known} "
        f"(`understudy info` lists them)"
    )

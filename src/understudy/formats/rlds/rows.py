"""Rows: an RLDS episode as stored in its file, with the flags of every step, before it becomes an Episode.

for episode in read_rlds("kitchen/1.0.0"):
    episode["steps"]["observation"]["image"]  # [N, 128, 128, 3]
    episode["steps"]["is_last"]  # [N] bool
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from understudy.core import tree as trees
from understudy.core.episode import Column
from understudy.core.spec import ArraySpec
from understudy.core.tree import Nested
from understudy.formats.format import FormatError
from understudy.formats.rlds.columns import decode_column, num_rows
from understudy.formats.rlds.dataset import Dataset, Record, open_dataset
from understudy.formats.rlds.example import Malformed
from understudy.formats.rlds.features import Leaf, Unread
from understudy.formats.rlds.images import MAX_PIXELS, image_size

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Rows:
    """An episode's N rows and its metadata, both flat."""

    record: Record
    steps: dict[str, Column]
    metadata: dict[str, Any]  # a scalar or a str each
    num_rows: int


class RowReader:
    """Decodes records into rows, and knows which fields can be read."""

    def __init__(self, dataset: Dataset):
        self.dataset = dataset
        self.steps: dict[str, Leaf] = {}
        self.metadata: dict[str, Leaf] = {}
        self.unread: dict[str, str] = {}  # path: the reason
        first = self._first_fields() if any(_sized_by_data(leaf) for leaf in dataset.of_step.values()) else None
        for path, leaf in dataset.of_step.items():
            self._sort(f"steps/{path}", self.steps, path, _sized(f"steps/{path}", leaf, first))
        for path, leaf in dataset.of_episode.items():
            if isinstance(leaf, Leaf) and (leaf.kind == "image" or leaf.shape or leaf.sequences):
                leaf = Unread("of an episode, only text and single numbers are kept")
            self._sort(path, self.metadata, path, leaf)
        if not self.steps:
            raise FormatError(f"{dataset.path}: no field of its steps can be read ({'; '.join(self.unread.values())})")

    def _sort(self, full: str, into: dict[str, Leaf], path: str, leaf: Leaf | Unread) -> None:
        try:
            if isinstance(leaf, Unread):
                raise Malformed(leaf.why)
            leaf.array_spec  # noqa: B018 (raises if there is none)
            into[path] = leaf
        except Malformed as error:
            self.unread[full] = str(error)

    def _first_fields(self) -> dict[str, Any] | None:
        with closing(self.dataset.records()) as records:
            for record in records:
                try:
                    return record.fields()
                except Malformed as error:
                    raise record.malformed(error) from None
        return None

    def read(self, record: Record) -> Rows:
        """Decode a record; FormatError if it is not what features.json says."""
        try:
            fields = record.fields()
            counts = {path: num_rows(f"steps/{path}", leaf, fields) for path, leaf in self.steps.items()}
            known = {count for count in counts.values() if count is not None}
            if len(known) != 1:
                raise Malformed(f"its fields have different numbers of rows: {_shown(counts)}")
            (rows,) = known
            steps = {path: decode_column(f"steps/{path}", leaf, fields, rows) for path, leaf in self.steps.items()}
            metadata = {path: decode_column(path, leaf, fields, 1)[0] for path, leaf in self.metadata.items()}
        except Malformed as error:
            raise record.malformed(error) from None
        return Rows(record=record, steps=steps, metadata=metadata, num_rows=rows)

    def read_one(self, record: Record, path: str) -> Column:
        """Decode one field of a record."""
        try:
            fields, leaf = record.fields(), self.steps[path]
            rows = num_rows(f"steps/{path}", leaf, fields)
            return decode_column(f"steps/{path}", leaf, fields, rows or 0)
        except Malformed as error:
            raise record.malformed(error) from None


def _shown(counts: Mapping[str, int | None]) -> str:
    return ", ".join(f"{path} {count}" for path, count in list(counts.items())[:6]) or "none"


def _sized_by_data(leaf: Leaf | Unread) -> bool:
    return isinstance(leaf, Leaf) and leaf.kind == "image" and None in leaf.shape


def _sized(name: str, leaf: Leaf | Unread, fields: Mapping[str, Any] | None) -> Leaf | Unread:
    """An image without a declared size gets that of the first image."""
    if not isinstance(leaf, Leaf) or not _sized_by_data(leaf):
        return leaf
    encoded = (fields or {}).get(f"{name}/ragged_flat_values" if leaf.sequences else name)
    if not isinstance(encoded, list) or not encoded:
        return Unread("its size is not declared, and there is no image")
    try:
        height, width = image_size(encoded[0])
    except Malformed as error:
        return Unread(str(error))
    if height * width > MAX_PIXELS:
        return Unread(f"its first image has {height}x{width} pixels")
    return replace(leaf, shape=(leaf.shape[0] or height, leaf.shape[1] or width, leaf.shape[2] or 3))


def read_ahead(records: Iterator[Record], work: Callable[[Record], T], workers: int) -> Iterator[T]:
    """Apply `work` to each record, in order; several workers are threads that run at most two records ahead each.

    | thread | takes from | blocks on | woken by |
    |---|---|---|---|
    | the caller | `records`, then the oldest result | that result | its worker |
    | workers | the pool's queue, which is never long | the queue | the caller |

    Threads suffice: nearly all time is spent in decoders that release the GIL.
    """
    if workers == 1:
        for record in records:
            yield work(record)
        return
    pool = ThreadPoolExecutor(workers, "rlds")
    waiting: deque[Future[T]] = deque()
    try:
        for record in records:
            waiting.append(pool.submit(work, record))
            if len(waiting) >= 2 * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


class RldsEpisodes:
    """Iterates over episodes in RLDS form: a dict of metadata, and "steps" with columns of N rows. Can be repeated."""

    def __init__(self, path: str | Path, split: str | None = None, workers: int = 1):
        self.reader = RowReader(open_dataset(Path(path), split))
        self.workers = workers

    @property
    def step_spec(self) -> Nested[ArraySpec]:
        """The spec of one step, as a tree of ArraySpecs."""
        return trees.unflatten({path: leaf.array_spec for path, leaf in self.reader.steps.items()})

    def __len__(self) -> int:
        return self.reader.dataset.num_records

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for rows in self.rows():
            metadata: Any = trees.unflatten(rows.metadata)
            yield {**metadata, "steps": trees.unflatten(rows.steps)}

    def rows(self, skip: Container[str] = ()) -> Iterator[Rows]:
        with closing(self.reader.dataset.records(skip)) as records:
            yield from read_ahead(records, self.reader.read, self.workers)


def read_rlds(path: str | Path, split: str | None = None, workers: int = 1) -> RldsEpisodes:
    """The episodes of a directory of TensorFlow Datasets, for `understudy.compat` and for inspection."""
    return RldsEpisodes(path, split, workers)

"""Reader: the read side of a store, in any number of processes, while another writes.

A Reader sees the store as of a commit, until it calls `follow`. It reads only rows that the catalog lists, and returns
only rows whose checksums hold. A process that is forked has a Reader of its own, at the same commit.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from understudy.core import (
    DamageError,
    Episode,
    EpisodeError,
    StepSpec,
    StoreError,
    StoreFailedError,
)
from understudy.core.closeable import Closeable
from understudy.core.episode import Column
from understudy.durable.file_identity import FileIdentity
from understudy.durable.file_system import refuse_network_file_system
from understudy.durable.lock import lock_is_held
from understudy.replay.format.arrays import Records
from understudy.replay.format.catalog import SPAN_DTYPE, Catalog
from understudy.replay.format.conditions import SqlValue
from understudy.replay.format.encoded_columns import cut_columns, decode_columns
from understudy.replay.format.lost_commits import check_commits
from understudy.replay.format.open_to_read import open_to_read
from understudy.replay.format.paths import CATALOG_FILE, LOCK_FILE, no_store, segment_path
from understudy.replay.format.records import EpisodeRecord
from understudy.replay.format.seal import check_seal
from understudy.replay.format.segment import Segment, digest_of_checksums

POLL_S = 0.005


@dataclass(frozen=True, kw_only=True)
class Changes:
    """What was committed since the last `follow`. A span of rows that are already known says where they were moved."""

    commit: int
    spans: Records  # SPAN_DTYPE, in the order they were committed
    episodes: tuple[int, ...]  # ids of new and changed episodes

    def __bool__(self) -> bool:
        return len(self.spans) > 0 or len(self.episodes) > 0


class Reader(Closeable):
    """A store opened for reading. Use as a context manager, or call `close`."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.catalog = _open_catalog(self.path)
        self._catalog_file = FileIdentity(self.catalog.path)
        self._segments: dict[int, Segment] = {}
        self._num_committed: dict[int, int] = {}
        self.removed_segments: list[int] = []  # that were read here and then removed by compaction
        self.commit = 0  # up to which `follow` has reported
        self._last_span = 0

    def close(self) -> None:
        for segment in self._segments.values():
            segment.close()
        self._segments.clear()
        self.catalog.close()

    # ---- following

    @property
    def num_open_segments(self) -> int:
        """Segments that this reader reads; the limit of open files may allow fewer files (durable/open_files.py)."""
        return len(self._segments)

    def last_commit(self) -> int:
        """The newest commit in the store, whether `follow` has reported it or not."""
        return self.catalog.last_commit()

    def follow(self, timeout_s: float = 0.0) -> Changes:
        """What was committed since the last call; waits up to `timeout_s` for something new."""
        if not self._catalog_file.is_in_place():
            raise StoreFailedError(
                f"{self.catalog.path}: replaced while this process read it, by `understudy repair` or a restored "
                f"backup; open the store again"
            )
        deadline = time.monotonic() + timeout_s
        while self.catalog.last_commit() <= self.commit and time.monotonic() < deadline:
            time.sleep(POLL_S)
        with self.catalog.transaction(write=False):
            commit = self.catalog.last_commit()
            if commit == self.commit:
                return Changes(commit=commit, spans=np.zeros(0, SPAN_DTYPE), episodes=())
            spans = self.catalog.spans("id > ?", (self._last_span,))
            episodes = self.catalog.episode_ids("changed > ?", (self.commit,))
            self.close_removed()
        self.commit = commit
        if len(spans):
            self._last_span = int(spans["id"][-1])
        return Changes(commit=commit, spans=spans, episodes=tuple(episodes))

    # ---- episodes

    def spec(self, spec_id: int) -> StepSpec:
        return self.catalog.spec(spec_id)

    def episodes(self, where: str = "deleted is null", values: Sequence[SqlValue] = ()) -> Iterator[EpisodeRecord]:
        """The episodes that fit an SQL condition on the table `episodes`, by id; without one, all not deleted."""
        return self.catalog.episodes(where, values)

    def record(self, episode_id: int) -> EpisodeRecord:
        """The catalog's record of an episode, deleted or not."""
        found = self.catalog.episode(episode_id)
        if found is None:
            raise StoreError(f"{self.path}: there is no episode {episode_id}; see `understudy info --episodes`")
        return found

    def read(self, episode_id: int) -> Episode:
        """An episode with all its steps; one that is open or cut, up to the last step whose outcome is known."""
        record, columns = self.rows(episode_id)
        if record.num_rows < 2:
            raise EpisodeError(
                f"episode {episode_id}: has {record.num_rows} rows so far, and a step needs the row after it"
            )
        return Episode.from_columns(columns, record.info)

    def rows(self, episode_id: int) -> tuple[EpisodeRecord, dict[str, Column]]:
        """An episode's committed rows as flat columns, checked."""
        record, stored = self.stored_rows(episode_id)
        return record, decode_columns(self.spec(record.spec), stored)

    def stored_rows(self, episode_id: int) -> tuple[EpisodeRecord, dict[str, Column]]:
        """As `rows`, with the columns as they are stored: encoded frames are not decoded."""
        for attempt in (1, 2, 3):
            with self.catalog.transaction(write=False):
                record = self.record(episode_id)
                spans = self.catalog.spans("episode = ?", (episode_id,), order="first_index")
            if record.purged:
                raise StoreError(f"episode {episode_id}: deleted, and its rows were removed by compaction")
            try:
                return record, self._gather(record, spans)
            except DamageError:
                # Compaction may have moved the rows and removed the file meanwhile; then the catalog has changed.
                again = self.catalog.spans("episode = ?", (episode_id,), order="first_index")
                if attempt == 3 or np.array_equal(again, spans):
                    raise
        raise AssertionError("unreachable")

    def decode(self, record: EpisodeRecord, stored: dict[str, Column], first: int, stop: int) -> dict[str, Column]:
        """Rows of `stored_rows` from `first` up to `stop`, decoded; all rows of a long episode would fill memory."""
        spec = self.spec(record.spec)
        return decode_columns(spec, cut_columns(spec, stored, first, stop))

    def _gather(self, record: EpisodeRecord, spans: Records) -> dict[str, Column]:
        """The stored columns of an episode."""
        pieces = []
        expected = 0
        for span in spans:
            if span["first_index"] != expected:
                break
            pieces.append(self.read_span(span))
            expected += int(span["num_rows"])
        if expected != record.num_rows:
            raise DamageError(
                f"{self.path}: episode {record.id} has {record.num_rows} rows and its spans cover {expected}; "
                f"run `understudy verify`, then `understudy repair`"
            )
        spec = self.spec(record.spec)
        stored: dict[str, Column] = {}
        for path, leaf in spec.stored_columns.items():
            if leaf.ragged:
                stored[path] = [value for piece in pieces for value in piece[path]]
            else:
                stored[path] = np.concatenate([piece[path] for piece in pieces])
        return stored

    def read_span(self, span: np.void) -> dict[str, Column]:
        """The rows of one span, with `row/episode` and `row/index`; a DamageError if they are not what was written."""
        segment = self.segment(int(span["segment"]))
        first_row, num_rows = int(span["first_row"]), int(span["num_rows"])
        fields, good = segment.read_checked(first_row, num_rows)
        good &= fields["row/episode"] == span["episode"]
        good &= fields["row/index"] == np.arange(num_rows) + span["first_index"]
        if not good.all():
            row = first_row + int(np.argmin(good))
            raise DamageError(
                f"{segment.path}: row {row} (episode {span['episode']}, index {span['first_index'] + row - first_row}) "
                f"is not what was written; run `understudy verify`, then `understudy repair`"
            )
        if digest_of_checksums(segment.read_column("row/checksum", first_row, num_rows)) != span["row_check"]:
            raise DamageError(
                f"{segment.path}: rows {first_row} to {first_row + num_rows - 1} are whole but not those the catalog "
                f"lists; run `understudy verify`, then `understudy repair`"
            )
        return fields

    # ---- segments

    def segment(self, segment_id: int) -> Segment:
        """An open segment; a DamageError if it is not what was written, or was removed by compaction."""
        found = self._segments.get(segment_id)
        if found is None:
            record = self.catalog.segment(segment_id)
            if record is None:
                raise DamageError(f"{self.path}: segment {segment_id} is not in the catalog; run `understudy verify`")
            found = Segment.open(self.catalog.layout(record), segment_path(self.path, segment_id))
            self._segments[segment_id], self._num_committed[segment_id] = found, record.num_rows
        return found

    def num_committed(self, segment_id: int) -> int:
        """How many rows of a segment were committed when it was opened here."""
        return self._num_committed[segment_id]

    def close_removed(self) -> None:
        """Close the segments that compaction has removed: while one is open, its disk space is not free."""
        if self._segments:
            for segment_id in self._segments.keys() - self.catalog.segment_ids():
                self._segments.pop(segment_id).close()
                self.removed_segments.append(segment_id)


def _open_catalog(path: Path) -> Catalog:
    if not path.is_dir():
        raise no_store(path)
    refuse_network_file_system(path)
    sealed = (path / CATALOG_FILE).is_file() and check_seal(path)
    catalog = open_to_read(path)
    try:
        _check_commits(path, catalog, sealed=sealed)
    except BaseException:
        catalog.close()
        raise
    return catalog


def _check_commits(path: Path, catalog: Catalog, *, sealed: bool) -> None:
    """A DamageError if the catalog has lost commits."""
    being_written, last = lock_is_held(path / LOCK_FILE), catalog.last_commit()
    try:
        check_commits(path, catalog, sealed=sealed, being_written=being_written)
    except DamageError:
        # A process that began to write meanwhile has checked the store itself, and its rows are no proof.
        if being_written or (not lock_is_held(path / LOCK_FILE) and catalog.last_commit() == last):
            raise

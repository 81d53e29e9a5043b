"""Compaction: gives back the disk space of deleted episodes, while writers write and readers read.

A row is dead if its episode is deleted. The live rows of each segment with enough dead rows are copied to a new
segment, one transaction points the catalog to the copies and marks the deleted episodes as purged, and then the old
file is removed. A crash before the transaction leaves a new file that the catalog does not list, a crash after it an
old one; the next compaction removes either.

| phase | commit lock | what a crash leaves |
|---|---|---|
| choose segments | free, except to seal one that is still written to | nothing |
| copy, sync | free: writers continue | new files that the catalog does not list |
| switch the catalog | held | old files that the catalog does not list |
| remove files | free | old files that the catalog does not list |
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from understudy.core import DamageError, StoreError, UnreadableError
from understudy.durable import files, open_files
from understudy.durable.errors import store_errors
from understudy.replay.format.lost_commits import newest_commit
from understudy.replay.format.records import SegmentRecord, SpanRecord
from understudy.replay.format.segment import HEAP_CHECKSUM, Segment, digest_of_checksums, read_layout, to_bytes
from understudy.replay.maintain.progress import ProgressCallback
from understudy.replay.write.store import Store


@dataclass(frozen=True, kw_only=True)
class CompactionReport:
    """What a compaction removed and wrote."""

    segments_removed: int
    segments_written: int
    rows_moved: int
    episodes_purged: int
    bytes_freed: int  # on disk, net
    orphans_removed: int  # files left by a crash
    orphans_kept: tuple[Path, ...]  # files that have rows newer than the catalog, or cannot be read: see `repair`


@dataclass(frozen=True, kw_only=True)
class _Move:
    """A span and its copy."""

    span: np.void  # of SPAN_DTYPE
    copy: SpanRecord


def compact(store: Store, *, min_dead: float = 0.3, progress: ProgressCallback | None = None) -> CompactionReport:
    """Give back the disk space of deleted episodes, which cannot be restored afterwards; also remove leftover files.

    Rewrites the segments of which at least the fraction `min_dead` of the rows is dead. Writers and readers continue.
    """
    if not 0 <= min_dead <= 1:
        raise StoreError(f"min_dead: expected a fraction from 0 to 1, got {min_dead}")
    with store.maintenance_lock:
        return _compact(store, min_dead, progress)


def _compact(store: Store, min_dead: float, progress: ProgressCallback | None) -> CompactionReport:
    sparse = _sparse_segments(store, min_dead)
    freed = sum(_disk_bytes(store.segment_path(segment.id)) for segment in sparse)
    outputs = _Outputs(store)
    moves: list[_Move] = []
    try:
        for num_finished, segment in enumerate(sparse):
            if progress:
                progress(num_finished, len(sparse))
            moves.extend(_copy_live(store, segment, outputs))
        outputs.finish()
        purged = _switch_catalog(store, sparse, moves, outputs.records)
    finally:
        outputs.close()
    for segment in sparse:
        path = store.segment_path(segment.id)
        with store_errors(path, "remove"):
            files.remove_durably(path)
    removed, kept, orphan_bytes = _remove_orphans(store)
    open_files.close_removed()  # by samplers of this process
    if progress:
        progress(len(sparse), len(sparse))
    written = sum(_disk_bytes(store.segment_path(record.id)) for record in outputs.records)
    return CompactionReport(
        segments_removed=len(sparse),
        segments_written=len(outputs.records),
        rows_moved=sum(move.copy.num_rows for move in moves),
        episodes_purged=purged,
        bytes_freed=freed + orphan_bytes - written,
        orphans_removed=removed,
        orphans_kept=kept,
    )


def _sparse_segments(store: Store, min_dead: float) -> list[SegmentRecord]:
    """Segments with too many dead rows; one that is still written to is sealed first."""
    with store.snapshot() as catalog:
        live = catalog.live_rows()
        segments = catalog.segments()
    found = []
    for segment in segments:
        dead = segment.num_rows - live.get(segment.id, 0)
        if dead and dead >= min_dead * segment.num_rows:
            found.append(segment if segment.sealed else store.seal(segment.id))
    return found


def _copy_live(store: Store, record: SegmentRecord, outputs: _Outputs) -> Iterator[_Move]:
    """Copy the live rows of a segment."""
    with store.snapshot() as catalog:
        dead = catalog.dead_episodes(record.id)
        spans = catalog.spans("segment = ?", (record.id,), order="first_row")
        layout = catalog.layout(record)
    source = Segment.open(layout, store.segment_path(record.id))
    try:
        for span in spans:
            if int(span["episode"]) not in dead:
                yield outputs.add(span, record.spec, source)
    finally:
        source.close()


class _Outputs:
    """The new segments, filled one after the other for each spec."""

    def __init__(self, store: Store):
        self._store = store
        self._open: dict[int, tuple[SegmentRecord, Segment]] = {}  # by spec
        self.records: list[SegmentRecord] = []

    def add(self, span: np.void, spec_id: int, source: Segment) -> _Move:
        """Copy a span's rows, checked."""
        num_rows = int(span["num_rows"])
        fields, good = source.read_checked(int(span["first_row"]), num_rows)
        checksums = source.read_column("row/checksum", int(span["first_row"]), num_rows)
        if not good.all() or digest_of_checksums(checksums) != span["row_check"]:
            raise DamageError(f"{source.path}: damaged rows are not copied; run `understudy repair` before compaction")
        records = {}
        for row in np.flatnonzero(fields["row/record"][:, 1]):
            record = source.read_heap(fields["row/record"][row])
            if record is None:
                raise DamageError(f"{source.path}: a damaged record is not copied; run `understudy repair` first")
            records[int(row)] = record
        heap_bytes = sum(len(record) + HEAP_CHECKSUM.size for record in records.values()) + sum(
            len(to_bytes(value)) + HEAP_CHECKSUM.size for path in source.layout.ragged for value in fields[path]
        )
        target, segment = self._target_segment(spec_id, num_rows, heap_bytes)
        rows = segment.write(
            fields,
            first_row=target.num_rows,
            heap_offset=target.heap_used,
            episode=fields["row/episode"],
            index=fields["row/index"],
            records=records,
        )
        grown = replace(target, num_rows=target.num_rows + num_rows, heap_used=target.heap_used + rows.heap_bytes)
        self._open[spec_id] = (grown, segment)
        copy = SpanRecord(
            episode=int(span["episode"]),
            first_index=int(span["first_index"]),
            segment=target.id,
            first_row=target.num_rows,
            num_rows=num_rows,
            row_check=digest_of_checksums(rows.checksums),
        )
        return _Move(span=span, copy=copy)

    def _target_segment(self, spec_id: int, num_rows: int, heap_bytes: int) -> tuple[SegmentRecord, Segment]:
        """A new segment of a spec with room for these rows."""
        if spec_id in self._open:
            target, segment = self._open[spec_id]
            if target.num_rows + num_rows <= target.capacity and target.heap_used + heap_bytes <= target.heap_bytes:
                return target, segment
            self._settle(spec_id)
        target, segment = self._store.create_segment(spec_id, num_rows, heap_bytes)
        self._open[spec_id] = (target, segment)
        return target, segment

    def _settle(self, spec_id: int) -> None:
        record, segment = self._open.pop(spec_id)
        segment.sync()
        segment.close()
        self.records.append(record)

    def finish(self) -> None:
        """Make all that was copied durable."""
        for spec_id in list(self._open):
            self._settle(spec_id)

    def close(self) -> None:
        for _, segment in self._open.values():
            segment.close()
        self._open.clear()


def _switch_catalog(store: Store, sparse: list[SegmentRecord], moves: list[_Move], outputs: list[SegmentRecord]) -> int:
    """The transaction: list the copies, purge the deleted episodes, and remove the old segments from the catalog."""
    if not sparse:
        return 0
    catalog = store.catalog
    moved = {int(move.span["id"]) for move in moves}
    with store.commit_lock() as commit:
        purge: set[int] = set()
        for segment in sparse:
            left = [s for s in catalog.spans("segment = ?", (segment.id,)) if int(s["id"]) not in moved]
            purge |= {int(span["episode"]) for span in left}
        episodes = [record for e in sorted(purge) if (record := catalog.episode(e)) is not None]
        if any(episode.deleted is None for episode in episodes):
            raise StoreError("an episode was restored while compaction ran; nothing was changed, run it again")
        with store.transaction(commit):
            for output in outputs:
                catalog.put_segment(output)
            for move in moves:
                catalog.add_span(int(move.span["commit_id"]), move.copy)
            catalog.remove_spans(moved)
            for episode in episodes:
                catalog.remove_spans(catalog.spans("episode = ?", (episode.id,))["id"])
                catalog.put_episode(replace(episode, purged=True, changed=commit))
            for segment in sparse:
                catalog.remove_segment(segment.id)
    return len(episodes)


def _remove_orphans(store: Store) -> tuple[int, tuple[Path, ...], int]:
    """Remove segment files that the catalog does not list, except those with rows newer than the catalog."""
    with store.commit_lock():
        known = {segment.id for segment in store.catalog.segments()}
        orphans = [path for path in store.segment_files() if int(path.stem) not in known]
        kept = [path for path in orphans if _may_hold_rows(path, store.state.commit)]
        removed = [path for path in orphans if path not in kept]
        freed = sum(_disk_bytes(path) for path in removed)
        for path in removed:
            with store_errors(path, "remove"):
                files.remove_durably(path)
    return len(removed), tuple(kept), freed


def _may_hold_rows(path: Path, commit: int) -> bool:
    """Whether a file that the catalog does not list has newer rows, or may have: the disk does not give them back."""
    try:
        with closing(Segment.open(read_layout(path), path)) as segment:
            segment.read_column("row/record", 0, segment.layout.capacity)
    except UnreadableError:
        return True
    except DamageError:
        return False
    return newest_commit(path) > commit


def _disk_bytes(path: Path) -> int:
    return path.stat().st_blocks * 512

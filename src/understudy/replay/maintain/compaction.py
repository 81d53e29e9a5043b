"""Compaction: gives back the disk space of deleted episodes, while writers write and readers read.

A segment with enough dead rows is a victim: its live rows are copied to a new segment, one transaction moves the
catalog over and marks the deleted episodes as purged, and then the file is removed. A crash before the transaction
leaves a new file that nothing refers to, a crash after it an old one; the next compaction removes either.

| phase | commit lock | what a crash leaves |
|---|---|---|
| choose victims | free, but to seal one that is filling | nothing |
| copy, sync | free: writers go on | new files, unreferred |
| move the catalog over | held | old files, unreferred |
| remove files | free | old files, unreferred |
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from understudy.core import DamageError, StoreError
from understudy.durable import files
from understudy.durable.errors import store_errors
from understudy.replay.format.layout import plan
from understudy.replay.format.records import SegmentRecord
from understudy.replay.format.segment import HEAP_CHECKSUM, Segment, digest_of_checksums, to_bytes
from understudy.replay.maintain.segment_scan import newest_commit

if TYPE_CHECKING:
    from understudy.replay.write.store import Store

Progress = Callable[[int, int], None]  # done, of


@dataclass(frozen=True, kw_only=True)
class CompactionReport:
    """What a compaction did."""

    segments_removed: int
    segments_written: int
    rows_moved: int
    episodes_purged: int
    bytes_freed: int  # on disk, net
    orphans_removed: int  # files that a crash had left
    orphans_kept: tuple[Path, ...]  # files with rows newer than the catalog: `repair` can take them in


@dataclass(frozen=True, kw_only=True)
class _Move:
    """A span and its new place."""

    span: Any  # np.void of SPAN_DTYPE
    segment: int
    first_row: int
    check: int


def compact(store: Store, *, min_dead: float = 0.3, progress: Progress | None = None) -> CompactionReport:
    """Rewrite the segments of which at least the share `min_dead` of rows is dead, and remove leftover files."""
    if not 0 <= min_dead <= 1:
        raise StoreError(f"min_dead: expected a share from 0 to 1, got {min_dead}")
    victims = _victims(store, min_dead)
    freed = sum(_disk_bytes(store.segment_path(victim.id)) for victim in victims)
    outputs = _Outputs(store)
    moves: list[_Move] = []
    try:
        for done, victim in enumerate(victims):
            if progress:
                progress(done, len(victims))
            moves.extend(_copy_live(store, victim, outputs))
        outputs.finish()
        purged = _move_over(store, victims, moves, outputs.records)
    finally:
        outputs.close()
    for victim in victims:
        path = store.segment_path(victim.id)
        with store_errors(path, "remove"):
            files.remove_durably(path)
    removed, kept, orphan_bytes = _remove_orphans(store)
    if progress:
        progress(len(victims), len(victims))
    written = sum(_disk_bytes(store.segment_path(record.id)) for record in outputs.records)
    return CompactionReport(
        segments_removed=len(victims),
        segments_written=len(outputs.records),
        rows_moved=sum(int(move.span["num_rows"]) for move in moves),
        episodes_purged=purged,
        bytes_freed=freed + orphan_bytes - written,
        orphans_removed=removed,
        orphans_kept=kept,
    )


def _victims(store: Store, min_dead: float) -> list[SegmentRecord]:
    """Segments with too many dead rows; one that is still filling is sealed first."""
    with store.snapshot() as catalog:
        live = catalog.live_rows()
        segments = catalog.segments()
    found = []
    for segment in segments:
        dead = segment.num_rows - live.get(segment.id, 0)
        if dead and dead >= min_dead * segment.num_rows:
            found.append(segment if segment.sealed else store.seal(segment.id))
    return found


def _copy_live(store: Store, victim: SegmentRecord, outputs: _Outputs) -> Iterator[_Move]:
    with store.snapshot() as catalog:
        dead = catalog.dead_episodes(victim.id)
        spans = catalog.spans("segment = ?", (victim.id,), order="first_row")
        layout = catalog.layout(victim)
    source = Segment.open(layout, store.segment_path(victim.id))
    try:
        for span in spans:
            if int(span["episode"]) not in dead:
                yield outputs.add(span, victim.spec, source)
    finally:
        source.close()


class _Outputs:
    """The new segments, filled one after the other for each spec."""

    def __init__(self, store: Store):
        self._store = store
        self._open: dict[int, tuple[SegmentRecord, Segment]] = {}  # by spec
        self.records: list[SegmentRecord] = []

    def add(self, span: Any, spec_id: int, source: Segment) -> _Move:
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
        place, segment = self._room(spec_id, num_rows, heap_bytes)
        rows = segment.write(
            fields,
            first_row=place.num_rows,
            heap_offset=place.heap_used,
            episode=fields["row/episode"],
            index=fields["row/index"],
            records=records,
        )
        grown = replace(place, num_rows=place.num_rows + num_rows, heap_used=place.heap_used + rows.heap_bytes)
        self._open[spec_id] = (grown, segment)
        return _Move(span=span, segment=place.id, first_row=place.num_rows, check=digest_of_checksums(rows.checksums))

    def _room(self, spec_id: int, num_rows: int, heap_bytes: int) -> tuple[SegmentRecord, Segment]:
        if spec_id in self._open:
            place, segment = self._open[spec_id]
            if place.num_rows + num_rows <= place.capacity and place.heap_used + heap_bytes <= place.heap_bytes:
                return place, segment
            self._settle(spec_id)
        store = self._store
        with store.commit_lock():
            segment_id = store.state.next_segment
            store.state.next_segment += 1
            capacity, heap = plan(store.catalog.spec(spec_id), store.segment_bytes, num_rows, heap_bytes)
            place = SegmentRecord(
                id=segment_id, spec=spec_id, capacity=capacity, heap_bytes=heap, num_rows=0, heap_used=0, sealed=True
            )
            layout = store.catalog.layout(place)
        segment = Segment.create(layout, store.segment_path(segment_id))
        self._open[spec_id] = (place, segment)
        return place, segment

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


def _move_over(store: Store, victims: list[SegmentRecord], moves: list[_Move], outputs: list[SegmentRecord]) -> int:
    """The transaction: moved spans at their new places, deleted episodes purged, victims gone from the catalog."""
    if not victims:
        return 0
    catalog = store.catalog
    moved = {int(move.span["id"]) for move in moves}
    with store.commit_lock() as commit:
        purge: set[int] = set()
        for victim in victims:
            left = [s for s in catalog.spans("segment = ?", (victim.id,)) if int(s["id"]) not in moved]
            purge |= {int(span["episode"]) for span in left}
        episodes = [record for e in sorted(purge) if (record := catalog.episode(e)) is not None]
        if any(episode.deleted is None for episode in episodes):
            raise StoreError("an episode was restored while compaction ran; nothing was changed, run it again")
        with catalog.transaction(write=True):
            for output in outputs:
                catalog.put_segment(output)
            for move in moves:
                span = move.span
                catalog.add_span(
                    int(span["commit_id"]),
                    int(span["episode"]),
                    int(span["first_index"]),
                    move.segment,
                    move.first_row,
                    int(span["num_rows"]),
                    move.check,
                )
            catalog.remove_spans(moved)
            for episode in episodes:
                catalog.remove_spans(catalog.spans("episode = ?", (episode.id,))["id"])
                catalog.put_episode(replace(episode, purged=True, changed=commit))
            for victim in victims:
                catalog.remove_segment(victim.id)
            catalog.add_commit(commit, store.clock(), 0)
        store.state.commit = commit
    return len(episodes)


def _remove_orphans(store: Store) -> tuple[int, tuple[Path, ...], int]:
    """Remove segment files that nothing refers to, except such as hold rows newer than the catalog."""
    with store.commit_lock():
        known = {segment.id for segment in store.catalog.segments()}
        orphans = [path for path in store.segment_files() if int(path.stem) not in known]
        kept = [path for path in orphans if newest_commit(path) > store.state.commit]
        removed = [path for path in orphans if path not in kept]
        freed = sum(_disk_bytes(path) for path in removed)
        for path in removed:
            with store_errors(path, "remove"):
                files.remove_durably(path)
    return len(removed), tuple(kept), freed


def _disk_bytes(path: Path) -> int:
    return path.stat().st_blocks * 512

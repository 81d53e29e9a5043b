"""Rebuild: makes a new catalog from the rows and records in the segment files."""

from __future__ import annotations

import time
import uuid
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from understudy.core import EpisodeInfo, Source
from understudy.durable import files
from understudy.durable.errors import store_errors
from understudy.replay.format.arrays import Records
from understudy.replay.format.catalog import Catalog
from understudy.replay.format.layout import Layout
from understudy.replay.format.paths import CATALOG_FILE, segment_path
from understudy.replay.format.records import (
    EpisodeRecord,
    RowRecord,
    SegmentRecord,
    SpanRecord,
    WriterRecord,
    info_from_json,
)
from understudy.replay.format.segment import Segment, digest_of_checksums
from understudy.replay.maintain.segment_scan import ROW_DTYPE, SegmentScan, scan_segment


@dataclass(kw_only=True)
class RecoveredCatalog:
    """The contents of an old catalog whose checksums hold."""

    trusted: bool = True  # nothing in it is known to be wrong
    store_id: str | None = None
    last_commit: int = 0
    marked_commit: int = 0  # the last one that was acknowledged, as far as the mark tells
    layouts: dict[int, Layout] = field(default_factory=dict)  # by segment
    episodes: dict[int, EpisodeRecord] = field(default_factory=dict)
    writers: list[WriterRecord] = field(default_factory=list)


def rebuild_catalog(path: Path, known: RecoveredCatalog) -> Path:
    """Move the old catalog to a directory `damaged-*` and write a new one; returns that directory."""
    found: dict[int, SegmentScan] = {}
    for segment_id, layout in sorted(known.layouts.items()):
        file = segment_path(path, segment_id)
        if file.exists():
            segment = Segment.open(layout, file)
            found[segment_id] = scan_segment(segment)
            segment.close()
    new = path / f"{CATALOG_FILE}.new"
    for leftover in path.glob(f"{CATALOG_FILE}.new*"):
        leftover.unlink()
    catalog = Catalog.create(new, _store_id(known))
    try:
        with catalog.transaction(write=True):
            _fill(catalog, known, found)
    except BaseException:
        catalog.close()
        raise
    catalog.close_as_one_file()
    damaged = path / f"damaged-{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:6]}"
    with store_errors(damaged, "create"):
        damaged.mkdir()
        for old in path.glob(f"{CATALOG_FILE}*"):
            if not old.name.startswith(f"{CATALOG_FILE}.new") and old.is_file():
                old.rename(damaged / old.name)
        files.rename_durably(new, path / CATALOG_FILE)
    return damaged


def _store_id(known: RecoveredCatalog) -> str:
    ids = Counter(layout.store_id for layout in known.layouts.values())
    return ids.most_common(1)[0][0] if ids else known.store_id or uuid.uuid4().hex


def _fill(catalog: Catalog, known: RecoveredCatalog, found: dict[int, SegmentScan]) -> None:
    commits: dict[int, float] = {}
    for segment_id, content in found.items():
        rows, layout = content.rows, known.layouts[segment_id]
        catalog.put_segment(
            SegmentRecord(
                id=segment_id,
                spec=catalog.put_spec(layout.spec),
                capacity=layout.capacity,
                heap_bytes=layout.heap_bytes,
                num_rows=int(rows["row"].max()) + 1 if len(rows) else 0,
                heap_used=int(rows["heap_end"].max()) if len(rows) else 0,
                sealed=True,
            )
        )
        for record in content.records.values():
            commits[record["commit"]] = record["time"]
    writers = _writers(catalog, known, found)
    last = max([known.last_commit, known.marked_commit, *commits])
    rows = _unique(np.concatenate([content.rows for content in found.values()] or [np.zeros(0, ROW_DTYPE)]))
    starts = np.flatnonzero(np.diff(rows["episode"], prepend=-1)) if len(rows) else np.zeros(0, np.int64)
    records = _records_by_episode(found)
    for episode_rows in np.split(rows, starts[1:]) if len(rows) else []:
        _add_episode(catalog, known, episode_rows, records, writers, last + 1)
    for number, when in sorted(commits.items()):
        catalog.add_commit(number, when, 0)
    catalog.add_commit(last + 1, time.time(), len(rows))


def _unique(rows: Records) -> Records:
    """Rows by episode and index; of rows that are there twice, after a crash in compaction, the newest copy."""
    ordered = rows[np.lexsort((-rows["segment"], rows["index"], rows["episode"]))]
    keys = ordered[["episode", "index"]]
    first = np.ones(len(ordered), bool)
    first[1:] = keys[1:] != keys[:-1]
    return ordered[first]


def _writers(
    catalog: Catalog, known: RecoveredCatalog, found: dict[int, SegmentScan]
) -> dict[tuple[str, str], WriterRecord]:
    """Every writer in the records or in the old catalog, with its last known chunk."""
    last: dict[tuple[str, str], int] = {(w.name, w.incarnation): w.last_seq for w in known.writers}
    checks = {(w.name, w.incarnation, w.last_seq): w.checks for w in known.writers}
    for content in found.values():
        for record in content.records.values():
            key = (record["writer"], record["incarnation"])
            last[key] = max(last.get(key, -1), record["seq"])
    writers = {}
    for key, seq in last.items():
        writers[key] = replace(catalog.add_writer(*key), last_seq=seq, checks=checks.get((*key, seq), ()))
        catalog.put_last_seq(writers[key].id, seq, writers[key].checks)
    return writers


def _records_by_episode(found: dict[int, SegmentScan]) -> dict[int, list[RowRecord]]:
    """The records of each episode, oldest first."""
    records: dict[int, list[RowRecord]] = {}
    for content in found.values():
        for record in content.records.values():
            records.setdefault(record["episode"], []).append(record)
    for mine in records.values():
        mine.sort(key=lambda record: record["first_index"])
    return records


def _add_episode(
    catalog: Catalog,
    known: RecoveredCatalog,
    rows: Records,
    records: dict[int, list[RowRecord]],
    writers: dict[tuple[str, str], WriterRecord],
    commit: int,
) -> None:
    episode_id = int(rows["episode"][0])
    old = known.episodes.get(episode_id)
    if old is not None and old.purged:
        return
    mine = records.get(episode_id, [])
    with_info = [record for record in mine if "info" in record]
    segments = {segment.id: segment for segment in catalog.segments()}
    if mine:
        writer, number = writers[mine[0]["writer"], mine[0]["incarnation"]].id, mine[0]["number"]
    else:  # all of its records are lost: use a name that no writer has
        key = (f"lost/{episode_id}", "repair")
        writers[key] = writers.get(key) or catalog.add_writer(*key)
        writer, number = writers[key].id, 0
    is_step = rows["is_step"]
    counts = np.bincount(rows["source"][is_step], minlength=len(Source))
    info = old.info if old else EpisodeInfo()
    if with_info and (old is None or with_info[-1]["commit"] > old.changed):  # what the old catalog has lost
        info = info_from_json(with_info[-1]["info"])
    num_rows = int(rows["index"][-1]) + 1
    times = [record["time"] for record in mine]
    catalog.put_episode(
        EpisodeRecord(
            id=episode_id,
            writer=writer,
            number=number,
            spec=segments[int(rows["segment"][0])].spec,
            state="cut" if is_step[-1] else "ended",
            info=info,
            num_rows=num_rows,
            num_bytes=int(rows["bytes"].sum()),
            num_steps=int(is_step.sum()),
            num_policy=int(counts[Source.POLICY]),
            num_human=int(counts[Source.HUMAN]),
            num_script=int(counts[Source.SCRIPT]),
            num_random=int(counts[Source.RANDOM]),
            total_reward=float(rows["reward"][is_step].sum()),
            begun=old.begun if old else min((r["commit"] for r in mine), default=commit),
            changed=commit,
            deleted=old.deleted if old else None,
            begun_at=old.begun_at if old else min(times, default=0.0),
            ended_at=old.ended_at if old and old.ended_at else max(times, default=None),
        )
    )
    for run in _runs(rows):
        span = SpanRecord(
            episode=episode_id,
            first_index=int(run["index"][0]),
            segment=int(run["segment"][0]),
            first_row=int(run["row"][0]),
            num_rows=len(run),
            row_check=digest_of_checksums(run["checksum"]),
        )
        catalog.add_span(int(run["commit"][0]) or commit, span)


def _runs(rows: Records) -> Iterator[Records]:
    """Rows of one commit that lie next to each other both in the episode and in the file."""
    together = (np.diff(rows["index"]) == 1) & (np.diff(rows["row"]) == 1)
    together &= (np.diff(rows["segment"]) == 0) & (np.diff(rows["commit"]) == 0)
    yield from np.split(rows, np.flatnonzero(~together) + 1)

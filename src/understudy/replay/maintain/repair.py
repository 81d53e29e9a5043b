"""Repair: keeps all rows that are whole, in episodes without gaps, and reports what it dropped.

In order, each step safe to run again after a crash:
1. files: a wrong size or header is corrected from the catalog or from the header;
2. catalog: one with damage is moved away and rebuilt from the records in the segments;
3. rows: rows that are not whole are removed from the catalog;
4. episodes: the rows before the first gap stay; whole rows after a gap become episodes of their own, labelled
   `salvaged_from` and `salvaged_index`, because rows that were not neighbours must not become neighbours.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

import numpy as np

from understudy.core import DamageError, Source, StepSpec, StoreFailedError, StoreFormatError
from understudy.core.episode import Column
from understudy.core.step import frame_number_of
from understudy.durable import files
from understudy.durable.errors import store_errors
from understudy.durable.file_system import refuse_network_file_system
from understudy.durable.lock import WriterLock
from understudy.replay.format.arrays import Records
from understudy.replay.format.catalog import Catalog
from understudy.replay.format.chunk import Chunk, EpisodeState, Part
from understudy.replay.format.commit_mark import read_mark
from understudy.replay.format.layout import Layout
from understudy.replay.format.lost_commits import listed_behind, lost_commits
from understudy.replay.format.paths import CATALOG_FILE, LOCK_FILE, SEAL_FILE, segment_files, segment_path
from understudy.replay.format.records import EpisodeRecord, SegmentRecord, SpanRecord, WriterRecord
from understudy.replay.format.seal import check_seal
from understudy.replay.format.segment import Segment, digest_of_checksums, read_layout
from understudy.replay.maintain.progress import ProgressCallback
from understudy.replay.maintain.rebuild_catalog import RecoveredCatalog, rebuild_catalog
from understudy.replay.maintain.segment_scan import num_unrecorded
from understudy.replay.maintain.verify import VerifyReport, uncovered_episodes, verify
from understudy.replay.write.store import Store

SALVAGE_ROWS = 256  # of an episode, in one commit


@dataclass(kw_only=True)
class RepairReport:
    """What was wrong, what was repaired, and what is still wrong (nothing, unless the disk itself is failing)."""

    before: VerifyReport
    after: VerifyReport
    actions: list[str] = field(default_factory=list)
    rows_dropped: int = 0
    episodes_trimmed: int = 0
    episodes_lost: int = 0
    episodes_salvaged: int = 0  # new episodes, of whole rows after a gap


def repair(path: str | Path, *, progress: ProgressCallback | None = None) -> RepairReport:
    """Repair a damaged store. Changes nothing if nothing is wrong; refused while another process writes."""
    path = Path(path)
    refuse_network_file_system(path)
    before = verify(path, progress=progress)
    if before.ok:
        return RepairReport(before=before, after=before)
    report = RepairReport(before=before, after=before)
    lock = WriterLock(path / LOCK_FILE)
    try:
        known = _recover(path)
        _repair_files(path, known, report)
        if not known.trusted:
            damaged = rebuild_catalog(path, known)
            report.actions.append(f"rebuilt the catalog from the segments; the old one is in {damaged}")
            with store_errors(path / SEAL_FILE, "remove"):
                files.remove_durably(path / SEAL_FILE)
    finally:
        lock.release()
    with Store.open(path, create=False) as store:
        _repair_records(store, report)
        _drop_damaged_rows(store, report)
        _repair_episodes(store, report)
        for segment in list(store.state.filling.values()):  # write no more rows to segments with damage
            store.seal(segment.id)
    report.after = verify(path, progress=progress)
    return report


# ---- the old catalog


def _recover(path: Path) -> RecoveredCatalog:
    """The contents of the old catalog whose checksums hold."""
    known = RecoveredCatalog()
    with suppress(DamageError):
        known.marked_commit = read_mark(path)
    sealed = False
    try:
        sealed = check_seal(path)
    except DamageError:
        known.trusted = False
    try:
        catalog = Catalog.open(path / CATALOG_FILE)
    except (DamageError, StoreFailedError):
        known.trusted = False
        return known
    except StoreFormatError:
        if (path / CATALOG_FILE).exists():
            raise
        known.trusted = False
        return known
    try:
        known.trusted = known.trusted and not catalog.integrity_problems()
        _collect(catalog, known)
        known.trusted = known.trusted and not lost_commits(path, catalog, sealed=sealed)
        known.trusted = known.trusted and not _has_unlisted_rows(path, catalog)
        known.trusted = known.trusted and not _contradicts_segments(path, catalog, known)
    except DamageError:  # it can be read so far, and no further
        known.trusted = False
    finally:
        catalog.close()
    return known


def _has_unlisted_rows(path: Path, catalog: Catalog) -> bool:
    """Whether whole rows lie after the last row of a segment: if no proof, a hint that the catalog listed them once."""
    for record in catalog.segments():
        file = segment_path(path, record.id)
        if record.sealed or not file.exists():
            continue
        try:
            segment = Segment.open(catalog.layout(record), file)
        except DamageError:
            continue
        with closing(segment):
            if num_unrecorded(segment, record.num_rows):
                return True
    return False


def _contradicts_segments(path: Path, catalog: Catalog, known: RecoveredCatalog) -> bool:
    """Whether the catalog is wrong where the segments are whole: its numbers have no checksums until it is sealed."""
    spans = catalog.spans(order="segment, first_row")
    if set(spans["episode"].tolist()) - known.episodes.keys() or set(spans["segment"].tolist()) - known.layouts.keys():
        return True
    if any(uncovered_episodes(known.episodes, spans)):
        return True
    specs = [catalog.spec(spec_id) for spec_id in catalog.spec_ids()]
    for record in catalog.segments():
        file, listed = segment_path(path, record.id), known.layouts[record.id]
        header = _layout_in_header(file)
        if header is not None and header != listed:
            sizes_differ = (header.capacity, header.heap_bytes) != (listed.capacity, listed.heap_bytes)
            if sizes_differ or (header.spec != listed.spec and header.spec in specs):
                return True
        try:
            segment = Segment.open(listed, file)
        except DamageError:
            continue
        with closing(segment):
            mine = spans[spans["segment"] == record.id]
            if any(listed_behind(catalog, record, segment)) or any(_is_another(segment, span) for span in mine):
                return True
    return False


def _is_another(segment: Segment, span: np.void) -> bool:
    """Whether the rows of a span are whole, and not those that the catalog lists."""
    first_row, num_rows = int(span["first_row"]), int(span["num_rows"])
    if not 0 <= first_row < first_row + num_rows <= segment.layout.capacity:
        return True
    columns, good = segment.read_small(first_row, num_rows)
    same = columns["row/episode"] == span["episode"]
    same &= columns["row/index"] == np.arange(num_rows) + span["first_index"]
    return bool(
        (good & ~same).any() or (good.all() and digest_of_checksums(columns["row/checksum"]) != span["row_check"])
    )


def _collect(catalog: Catalog, known: RecoveredCatalog) -> None:
    """Read each table as far as possible; what fails its check is left out, and the catalog is no longer trusted."""
    try:
        known.store_id = catalog.store_id
        known.last_commit = catalog.last_commit()
        writers = catalog.writers()
        known.writers = [writer for writer in writers if _has_types(writer)]
        known.trusted = known.trusted and len(known.writers) == len(writers)
        for segment in catalog.segments():
            known.layouts[segment.id] = catalog.layout(segment)
        ids = catalog.episode_ids("1")
    except (DamageError, StoreFailedError, ValueError, TypeError, KeyError):
        known.trusted = False
        return
    for episode_id in ids:
        try:
            for episode in catalog.episodes("id = ?", (episode_id,)):
                known.episodes[episode.id] = episode
        except (DamageError, StoreFailedError, ValueError, TypeError):
            known.trusted = False


def _has_types(writer: WriterRecord) -> bool:
    """Whether the values have the types of their columns; SQLite gives what it finds in a damaged page."""
    values: tuple[object, ...] = (writer.name, writer.incarnation, writer.last_seq)
    return [type(value) for value in values] == [str, str, int]


# ---- files


def _repair_files(path: Path, known: RecoveredCatalog, report: RepairReport) -> None:
    for file in segment_files(path):
        layout = _trusted_layout(file, known)
        if layout is None:
            if not known.trusted:
                report.actions.append(
                    f"{file}: its header is destroyed and the catalog does not list it; left as it is"
                )
            continue
        known.layouts[layout.segment_id] = layout
        with store_errors(file, "repair"):
            fd = os.open(file, os.O_RDWR)
            try:
                if os.fstat(fd).st_size != layout.file_bytes:
                    os.ftruncate(fd, layout.file_bytes)
                    report.actions.append(f"{file}: restored its size; the bytes that were cut off are lost")
                if files.read_readable(fd, len(layout.header), 0)[0] != layout.header:
                    files.write_at(fd, layout.header, 0)
                    report.actions.append(f"{file}: wrote its header again")
                os.fsync(fd)
            finally:
                os.close(fd)


def _trusted_layout(file: Path, known: RecoveredCatalog) -> Layout | None:
    """The layout in a trusted catalog, else that in the header if the header is exact, else that in the catalog."""
    listed = known.layouts.get(int(file.stem))
    if listed is not None and known.trusted:
        return listed
    return _layout_in_header(file) or listed


def _layout_in_header(file: Path) -> Layout | None:
    """The layout in a segment's header; None if any byte of the header is wrong."""
    try:
        found = read_layout(file)
        with store_errors(file, "read"), file.open("rb") as stream:
            exact = files.read_readable(stream.fileno(), len(found.header), 0)[0] == found.header
    except (DamageError, StoreFailedError):
        return None
    return found if exact and found.segment_id == int(file.stem) else None


# ---- rows


def _repair_records(store: Store, report: RepairReport) -> None:
    """Blank damaged records: they are only copies of what the catalog lists."""
    for segment, record in _segments(store):
        for span in store.catalog.spans("segment = ?", (record.id,)):
            first_row, num_rows = int(span["first_row"]), int(span["num_rows"])
            columns, good = segment.read_small(first_row, num_rows)
            entries = columns["row/record"]
            for row in np.flatnonzero(good & (entries[:, 1] > 0)):
                if segment.read_heap(entries[row]) is None:
                    segment.blank_heap(entries[row])
                    report.actions.append(f"{segment.path}: blanked the damaged record at row {first_row + int(row)}")
        segment.close()


def _drop_damaged_rows(store: Store, report: RepairReport) -> None:
    """Replace each span that is not whole by its runs of whole rows."""
    for segment, record in _segments(store):
        for span in store.catalog.spans("segment = ?", (record.id,)):
            runs = list(_whole_runs(segment, span))
            whole = runs == [(0, int(span["num_rows"]))]
            if whole and _digest(segment, span, *runs[0]) == span["row_check"]:
                continue
            kept = sum(stop - start for start, stop in runs)
            report.rows_dropped += int(span["num_rows"]) - kept
            with store.commit_lock() as commit, store.transaction(commit):
                store.catalog.remove_spans([int(span["id"])])
                for start, stop in runs:
                    run = SpanRecord(
                        episode=int(span["episode"]),
                        first_index=int(span["first_index"]) + start,
                        segment=record.id,
                        first_row=int(span["first_row"]) + start,
                        num_rows=stop - start,
                        row_check=_digest(segment, span, start, stop),
                    )
                    store.catalog.add_span(int(span["commit_id"]), run)
        segment.clear_tail(record.num_rows, record.heap_used)
        segment.close()
    for record in store.catalog.segments():  # files that are gone
        if not segment_path(store.path, record.id).exists():
            spans = store.catalog.spans("segment = ?", (record.id,))
            report.rows_dropped += int(spans["num_rows"].sum())
            report.actions.append(f"{segment_path(store.path, record.id)}: the file is gone, and its rows with it")
            with store.commit_lock(), store.catalog.transaction(write=True):
                store.catalog.remove_spans(spans["id"])
                store.catalog.remove_segment(record.id)
            store.state.filling.pop(record.spec, None)


def _segments(store: Store) -> Iterator[tuple[Segment, SegmentRecord]]:
    for record in store.catalog.segments():
        file = segment_path(store.path, record.id)
        if file.exists():
            yield Segment.open(store.catalog.layout(record), file, write=True), record


def _whole_runs(segment: Segment, span: np.void) -> Iterator[tuple[int, int]]:
    """The runs of whole rows in a span, as [start, stop) within it."""
    num_rows = int(span["num_rows"])
    fields, good = segment.read_checked(int(span["first_row"]), num_rows)
    good &= fields["row/episode"] == span["episode"]
    good &= fields["row/index"] == np.arange(num_rows) + span["first_index"]
    edges = np.flatnonzero(np.diff(np.concatenate([[False], good, [False]]).astype(np.int8)))
    yield from ((int(a), int(b)) for a, b in edges.reshape(-1, 2))


def _digest(segment: Segment, span: np.void, start: int, stop: int) -> int:
    return digest_of_checksums(segment.read_column("row/checksum", int(span["first_row"]) + start, stop - start))


# ---- episodes


def _repair_episodes(store: Store, report: RepairReport) -> None:
    """Episodes with gaps: the rows before the first gap stay, each whole run after it becomes an episode."""
    for episode_id in store.catalog.episode_ids("not purged"):
        episode = store.catalog.episode(episode_id)
        assert episode is not None
        spans = store.catalog.spans("episode = ?", (episode_id,), order="first_index")
        runs = list(_contiguous(spans))
        if len(runs) == 1 and runs[0]["first_index"][0] == 0 and runs[0]["num_rows"].sum() == episode.num_rows:
            continue
        head = runs.pop(0) if runs and runs[0]["first_index"][0] == 0 else None
        for run in runs:
            report.episodes_salvaged += _salvage(store, episode, run)
        _trim(store, episode, head, runs)
        if head is None:
            report.episodes_lost += 1
            report.actions.append(f"episode {episode_id}: its first rows are lost, so it is no longer listed")
        else:
            report.episodes_trimmed += 1
            kept = int(head["num_rows"].sum())
            report.actions.append(f"episode {episode_id}: kept rows 0 to {kept - 1} of {episode.num_rows}")


def _contiguous(spans: Records) -> Iterator[Records]:
    """Groups of spans that follow each other without a gap."""
    if len(spans):
        ends = spans["first_index"] + spans["num_rows"]
        breaks = np.flatnonzero(spans["first_index"][1:] != ends[:-1]) + 1
        yield from np.split(spans, breaks)


def _salvage(store: Store, episode: EpisodeRecord, run: Records) -> int:
    """Copy a run of rows into an episode of its own; 0 if it holds no step. A second call copies nothing."""
    spec = store.catalog.spec(episode.spec)
    columns = _read(store, run, tuple(spec.stored_columns))
    if not columns["is_step"].any():
        return 0
    first_index = int(run["first_index"][0])
    name = f"repair/{episode.id}/{first_index}"
    writer = store.begin_writer(name, "repair")
    labels = {**episode.info.labels, "salvaged_from": str(episode.id), "salvaged_index": str(first_index)}
    num_rows = len(columns["is_step"])
    last_state: EpisodeState = "cut" if columns["is_step"][-1] else "ended"
    for seq, (start, stop) in enumerate(pairwise(_chunk_edges(spec, columns, num_rows))):
        if seq > writer.last_seq:
            part = Part(
                episode=0,
                first_index=start,
                num_rows=stop - start,
                info=replace(episode.info, labels=labels),
                state=last_state if stop == num_rows else "open",
            )
            store.commit(
                Chunk(
                    writer=name,
                    incarnation="repair",
                    seq=seq,
                    spec=spec,
                    parts=(part,),
                    columns={path: column[start:stop] for path, column in columns.items()},
                )
            )
    if episode.deleted is not None:
        copied = store.catalog.episode_ids("writer = ?", (writer.id,))
        store.delete(copied)
    return 1


def _chunk_edges(spec: StepSpec, columns: Mapping[str, Column], num_rows: int) -> list[int]:
    """Where to part the rows of a run into chunks: after SALVAGE_ROWS or less, and never within a GOP."""
    may_part = np.ones(num_rows + 1, bool)
    for path in spec.encoded:
        may_part[:-1] &= np.asarray(columns[frame_number_of(path)]) == 0
    places = np.flatnonzero(may_part)
    edges = [0]
    while edges[-1] < num_rows:
        within = places[(places > edges[-1]) & (places <= edges[-1] + SALVAGE_ROWS)]
        edges.append(int(within[-1] if len(within) else places[places > edges[-1]][0]))
    return edges


def _trim(store: Store, episode: EpisodeRecord, head: Records | None, rest: list[Records]) -> None:
    """Correct the catalog's record of an episode to its remaining rows."""
    with store.commit_lock() as commit:
        catalog = store.catalog
        if head is None:
            trimmed = replace(episode, purged=True, deleted=episode.deleted or commit, changed=commit)
        else:
            columns = _read(store, head, ("is_step", "source", "reward"))
            is_step = columns["is_step"]
            counts = np.bincount(columns["source"][is_step], minlength=len(Source))
            num_rows = len(is_step)
            trimmed = replace(
                episode,
                state="cut" if is_step[-1] else "ended",
                num_rows=num_rows,
                num_bytes=episode.num_bytes * num_rows // max(episode.num_rows, 1),
                num_steps=int(is_step.sum()),
                num_policy=int(counts[Source.POLICY]),
                num_human=int(counts[Source.HUMAN]),
                num_script=int(counts[Source.SCRIPT]),
                num_random=int(counts[Source.RANDOM]),
                total_reward=float(np.asarray(columns["reward"], np.float64)[is_step].sum()),
                changed=commit,
                ended_at=episode.ended_at or store.clock(),
            )
        with store.transaction(commit):
            for run in rest:
                catalog.remove_spans(run["id"])
            catalog.put_episode(trimmed)
        store.state.episodes.pop((episode.writer, episode.number), None)


def _read(store: Store, spans: Records, paths: tuple[str, ...]) -> dict[str, Column]:
    """Some fields of the rows of several spans."""
    pieces = []
    records = {record.id: record for record in store.catalog.segments()}
    for span in spans:
        record = records[int(span["segment"])]
        segment = Segment.open(store.catalog.layout(record), segment_path(store.path, record.id))
        pieces.append(segment.read_checked(int(span["first_row"]), int(span["num_rows"]))[0])
        segment.close()
    return {
        path: [value for piece in pieces for value in piece[path]]
        if isinstance(pieces[0][path], list)
        else np.concatenate([piece[path] for piece in pieces])
        for path in paths
    }

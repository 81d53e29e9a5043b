"""Verify: reads every committed byte of a store and reports what is not as it was written. Changes nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from understudy.core import DamageError, StoreFailedError, StoreFormatError
from understudy.durable.lock import lock_is_held
from understudy.replay.format.arrays import Records
from understudy.replay.format.catalog import Catalog
from understudy.replay.format.commit_mark import read_mark
from understudy.replay.format.lost_commits import lost_commits
from understudy.replay.format.open_to_read import open_to_read
from understudy.replay.format.paths import CATALOG_FILE, LOCK_FILE, no_store, segment_files, segment_path
from understudy.replay.format.records import EpisodeRecord, SegmentRecord
from understudy.replay.format.seal import check_seal
from understudy.replay.format.segment import Segment, digest_of_checksums
from understudy.replay.maintain.progress import ProgressCallback
from understudy.replay.maintain.segment_scan import num_unrecorded
from understudy.replay.write.not_finite import not_finite_rows


@dataclass(kw_only=True)
class VerifyReport:
    """How much was read, and what is wrong."""

    commit: int = 0
    num_segments: int = 0
    num_episodes: int = 0
    num_rows: int = 0
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # no damage: leftovers of a crash, numbers that are not finite

    @property
    def ok(self) -> bool:
        return not self.problems


def verify(path: str | Path, *, progress: ProgressCallback | None = None) -> VerifyReport:
    """Check everything that is committed when the check begins, also while another process writes to the store."""
    path = Path(path)
    report = VerifyReport()
    if not path.is_dir() or (not (path / CATALOG_FILE).exists() and not segment_files(path)):
        raise no_store(path)
    being_written = lock_is_held(path / LOCK_FILE)
    try:
        clean = check_seal(path)
        catalog = open_to_read(path)
    except (DamageError, StoreFailedError) as error:
        report.problems.append(str(error))
        return report
    except StoreFormatError:
        if (path / CATALOG_FILE).exists():  # a newer format is no damage
            raise
        report.problems.append(f"{path / CATALOG_FILE}: the catalog is gone; run `understudy repair`")
        return report
    try:
        _Verification(path, catalog, report, being_written=being_written, clean=clean).run(progress)
    except (DamageError, StoreFailedError) as error:
        report.problems.append(str(error))
    finally:
        catalog.close()
    return report


class _Verification:
    def __init__(self, path: Path, catalog: Catalog, report: VerifyReport, *, being_written: bool, clean: bool):
        self._path = path
        self._catalog = catalog
        self._report = report
        self._being_written = being_written
        self._clean = clean
        self._not_finite: dict[str, tuple[int, str]] = {}  # by field: number of rows, and where the first is

    def run(self, progress: ProgressCallback | None) -> None:
        report, catalog = self._report, self._catalog
        report.problems += [f"{catalog.path}: {text}" for text in catalog.integrity_problems()]
        if report.problems:
            return
        try:
            read_mark(self._path)
        except DamageError as error:
            report.problems.append(str(error))
        lost = lost_commits(self._path, catalog, sealed=self._clean, being_written=self._being_written)
        report.problems += [lost] if lost else []
        with catalog.transaction(write=False):
            report.commit = catalog.last_commit()
            segments = catalog.segments()
            spans = catalog.spans(order="segment, first_row")
            report.problems += self._episode_problems(spans)
        unknown = sorted({int(number) for number in spans["segment"]} - {segment.id for segment in segments})
        report.problems += [f"{catalog.path}: it lists rows in segment {n} and not the segment" for n in unknown]
        starts = np.searchsorted(spans["segment"], [segment.id for segment in segments])
        stops = np.searchsorted(spans["segment"], [segment.id for segment in segments], side="right")
        for num_finished, (segment, start, stop) in enumerate(zip(segments, starts, stops, strict=True)):
            if progress:
                progress(num_finished, len(segments))
            report.problems += self._segment_problems(segment, spans[start:stop])
            report.num_segments += 1
        if progress:
            progress(len(segments), len(segments))
        report.notes += [
            f"{path}: {num_rows} rows have NaN or infinity, the first at {where}; they are as they were written, and "
            f"training on them makes a network NaN"
            for path, (num_rows, where) in self._not_finite.items()
        ]
        known = {segment.id for segment in catalog.segments()}
        report.notes += [
            f"{file}: the catalog does not list it (a crash left it); `understudy compact` removes it"
            for file in segment_files(self._path)
            if int(file.stem) not in known and not self._being_written
        ]

    def _episode_problems(self, spans: Records) -> Iterator[str]:
        """Episodes that are not as written, and spans that do not fit them."""
        episodes: dict[int, EpisodeRecord] = {}
        ids = self._catalog.episode_ids("1")
        for episode_id in ids:
            try:
                episodes[episode_id] = next(self._catalog.episodes("id = ?", (episode_id,)))
            except (DamageError, ValueError) as error:
                yield str(error)
        self._report.num_episodes += len(episodes)
        yield from (f"{self._catalog.path}: {text}" for text in uncovered_episodes(episodes, spans))
        unknown = sorted({int(episode) for episode in spans["episode"]} - set(ids))
        yield from (f"{self._catalog.path}: it lists rows of episode {e} and not the episode" for e in unknown)

    def _segment_problems(self, record: SegmentRecord, spans: Records) -> Iterator[str]:
        path = segment_path(self._path, record.id)
        try:
            segment = Segment.open(self._catalog.layout(record), path)
        except DamageError as error:
            if not self._gone_since(record.id):
                yield str(error)
            return
        try:
            for span in spans:
                yield from self._span_problems(segment, record, span)
                self._report.num_rows += int(span["num_rows"])
            if not self._being_written and not self._clean and not record.sealed:
                unrecorded = num_unrecorded(segment, record.num_rows)
                if unrecorded:
                    yield (
                        f"{path}: {unrecorded} whole rows are not in the catalog: a crash came before they were "
                        f"acknowledged, or the catalog has lost its log; `understudy repair` keeps them, opening the "
                        f"store to write drops them unless it is proved that they were acknowledged"
                    )
            if not self._being_written:
                for start, stop in segment.dirty_tail(record.num_rows, record.heap_used):
                    text = f"{path}: bytes {start} to {stop} are after the last row and not zero, or cannot be read"
                    if self._clean or record.sealed:
                        yield text
                    else:
                        self._report.notes.append(f"{text} (a crash left them); opening the store clears them")
        finally:
            segment.close()

    def _span_problems(self, segment: Segment, record: SegmentRecord, span: np.void) -> Iterator[str]:
        first_row, num_rows = int(span["first_row"]), int(span["num_rows"])
        where = f"{segment.path}: episode {span['episode']}"
        if first_row + num_rows > record.num_rows:
            yield f"{where}: rows {first_row} to {first_row + num_rows - 1} lie after the segment's last row"
            return
        fields, good = segment.read_checked(first_row, num_rows)
        good &= fields["row/episode"] == span["episode"]
        good &= fields["row/index"] == np.arange(num_rows) + span["first_index"]
        entries = fields["row/record"]
        for row in np.flatnonzero(good & (entries[:, 1] > 0)):
            if segment.read_heap(entries[row]) is None:
                yield f"{where}: the record at row {first_row + int(row)} is not what was written"
        for row in np.flatnonzero(~good):
            at = f"index {span['first_index'] + row} (row {first_row + int(row)})"
            yield f"{where}: {at} is not what was written, or cannot be read"
        for path, rows in not_finite_rows(segment.layout.spec, fields):
            if (sound := rows[good[rows]]).size:
                step = f"episode {span['episode']}, step {span['first_index'] + sound[0]}"
                num_before, first = self._not_finite.get(path, (0, step))
                self._not_finite[path] = num_before + len(sound), first
        if good.all():
            checksums = segment.read_column("row/checksum", first_row, num_rows)
            if digest_of_checksums(checksums) != span["row_check"]:
                yield f"{where}: rows {first_row} to {first_row + num_rows - 1} are not those that the catalog lists"

    def _gone_since(self, segment_id: int) -> bool:
        """Whether compaction has removed a segment since the check began."""
        return self._being_written and all(segment.id != segment_id for segment in self._catalog.segments())


def uncovered_episodes(episodes: Mapping[int, EpisodeRecord], spans: Records) -> Iterator[str]:
    """Episodes whose spans have gaps, or are not as many rows as the episode has."""
    by_episode = spans[np.lexsort((spans["first_index"], spans["episode"]))]
    ids = by_episode["episode"]
    for episode_id, episode in episodes.items():
        rows = by_episode[np.searchsorted(ids, episode_id) : np.searchsorted(ids, episode_id, side="right")]
        ends = rows["first_index"] + rows["num_rows"]
        expected = 0 if episode.purged else episode.num_rows
        found = int(ends[-1]) if len(ends) else 0
        if found != expected or (rows["first_index"] != np.concatenate([[0], ends[:-1]])[: len(rows)]).any():
            yield f"episode {episode_id} has {expected} rows, and its spans do not cover them"

"""Lost commits: proof, in the files beside it, that a catalog has listed more than it lists now.

The catalog may have lost its log after a crash, or an older one may have been put in its place. Both are sound for
SQLite. Whoever writes to such a store would overwrite rows that were acknowledged; so it is not opened.

| found | why it is proof |
|---|---|
| a mark with a higher number | the mark is written when a commit is durable |
| rows behind a segment's last, of a commit after the next | a crash leaves rows of at most one commit: the next |
| rows behind a segment's last, of a commit that the catalog lists | that commit's transaction listed them too |
| spans, or values of listed rows, behind the last of a segment | one transaction writes both |
| a file that is not listed, with rows of a commit after the next | as above |
| listed files that are gone, and files that are not listed | compaction lists the new files before it removes the old |

Rows of exactly the next commit prove nothing: a crash leaves such rows before they are acknowledged. If the mark does
not say otherwise, they count as not acknowledged.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np

from understudy.core import DamageError, StoreFailedError
from understudy.replay.format.catalog import Catalog
from understudy.replay.format.commit_mark import read_mark
from understudy.replay.format.paths import CATALOG_FILE, MARK_FILE, segment_files, segment_path
from understudy.replay.format.records import SegmentRecord, decode_row_record
from understudy.replay.format.segment import HEAP_CHECKSUM, Segment, read_layout

ADVICE = (
    f"the log (`{CATALOG_FILE}-wal`) was damaged or removed after a crash, or an older catalog was put in its place; "
    f"nothing was changed. Put the right files back, or run `understudy repair`, which takes the rows from the segments"
)


def check_commits(directory: Path, catalog: Catalog, *, sealed: bool, being_written: bool = False) -> None:
    """A DamageError if the catalog has lost commits."""
    problem = lost_commits(directory, catalog, sealed=sealed, being_written=being_written)
    if problem is not None:
        raise DamageError(problem)


def lost_commits(directory: Path, catalog: Catalog, *, sealed: bool, being_written: bool = False) -> str | None:
    """A sentence with the first proof; None if there is none.

    The numbers in a `sealed` catalog need no check. While another process writes to the store, only the mark tells.
    """
    marked = _marked(directory)  # before the catalog is asked, which may grow meanwhile
    last = catalog.last_commit()
    if marked > last:
        found = f"commit {marked} was acknowledged (`{MARK_FILE}`)"
    elif not being_written:
        found = next(_unlisted(directory, catalog, last, sealed=sealed), "")
    else:
        found = ""
    return f"{catalog.path}: it ends with commit {last}, but {found}: {ADVICE}" if found else None


def _unlisted(directory: Path, catalog: Catalog, last: int, *, sealed: bool) -> Iterator[str]:
    """What the segments have and the catalog does not list."""
    records = catalog.segments()
    for record in records:
        if not record.sealed:
            yield from _behind(directory, catalog, record, last, sealed=sealed)
    listed = {record.id for record in records}
    there = {int(file.stem): file for file in segment_files(directory)}
    unlisted = {file: newest_commit(file) for number, file in there.items() if number not in listed}
    for file, commit in unlisted.items():
        if commit > last + 1:
            yield f"{file}, which it does not list, has rows of commit {commit}"
    gone = sorted(listed - there.keys())
    if gone and any(unlisted.values()):
        yield f"{segment_path(directory, gone[0])} is gone, and files are there that it does not list"


def _marked(directory: Path) -> int:
    try:
        return read_mark(directory)
    except DamageError:  # verify reports it; a damaged mark says nothing about the catalog
        return 0


def _behind(directory: Path, catalog: Catalog, record: SegmentRecord, last: int, *, sealed: bool) -> Iterator[str]:
    """What lies behind the last row or the last value of a segment and must not."""
    path = segment_path(directory, record.id)
    try:
        with closing(Segment.open(catalog.layout(record), path)) as segment:
            if not sealed:
                yield from listed_behind(catalog, record, segment)
            for commit in _commits(segment, record.num_rows):
                if commit != last + 1:
                    yield f"{path} has rows of commit {commit} that it does not list"
    except (DamageError, StoreFailedError):
        return  # verify reports it, and no process writes to a segment that it cannot open


def listed_behind(catalog: Catalog, record: SegmentRecord, segment: Segment) -> Iterator[str]:
    """Listed rows, or their values, that lie behind the last of a segment as its own entry in the catalog says."""
    if catalog.last_row(record.id) > record.num_rows:
        yield f"it lists rows behind the last row of {segment.path}"
    if _heap_end(segment, record) > record.heap_used:
        yield f"{segment.path} has values of listed rows behind the last one that it lists"


def _commits(segment: Segment, first_row: int) -> Iterator[int]:
    """The commits in the records of the rows from `first_row` on."""
    for _, entries in segment.data_rows("row/record", first_row):
        for row in np.flatnonzero(entries[:, 1]):
            content = segment.read_heap(entries[row])
            record = decode_row_record(content) if content is not None else None
            if record is not None:
                yield record["commit"]


def _heap_end(segment: Segment, record: SegmentRecord) -> int:
    """The end of the last value in the heap that a whole row before the segment's last refers to."""
    found = 0
    for name in ("row/record", *segment.layout.ragged):
        for start, entries in segment.data_rows(name, 0, record.num_rows):
            ends = entries.astype(np.int64).sum(axis=1) + HEAP_CHECKSUM.size
            if name == "row/record":  # most rows have none
                ends[entries[:, 1] == 0] = 0
            for row in np.flatnonzero(ends > max(found, record.heap_used)):
                if segment.read_small(start + int(row), 1)[1].all():  # damaged entries say nothing
                    found = max(found, int(ends[row]))
    return found


def newest_commit(path: Path) -> int:
    """The highest commit number among the records of a segment file; 0 if it has none or is no segment."""
    try:
        with closing(Segment.open(read_layout(path), path)) as segment:
            return max(_commits(segment, 0), default=0)
    except (DamageError, StoreFailedError):
        return 0

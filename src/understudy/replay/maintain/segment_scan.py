"""Segment scan: reads the whole rows and the records of a segment file, without the catalog."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from understudy.replay.format.arrays import Records
from understudy.replay.format.records import RowRecord, decode_row_record
from understudy.replay.format.segment import HEAP_CHECKSUM, Segment

BLOCK_BYTES = 64 * 2**20

ROW_DTYPE = np.dtype(
    [
        ("episode", np.int64),
        ("index", np.int64),
        ("segment", np.int64),
        ("row", np.int64),
        ("checksum", np.uint64),
        ("commit", np.int64),
        ("source", np.int64),
        ("is_step", np.bool_),
        ("reward", np.float64),
        ("bytes", np.int64),
        ("heap_end", np.int64),
    ]
)


@dataclass(frozen=True, kw_only=True)
class SegmentScan:
    """The whole rows of one segment and the records among them."""

    rows: Records  # ROW_DTYPE, by row
    records: dict[int, RowRecord]  # by row


def scan_segment(segment: Segment) -> SegmentScan:
    """Every row whose checksums hold, with what is needed to list its episode in a new catalog."""
    layout = segment.layout
    used = np.flatnonzero(segment.read_rows("row/checksum", 0, layout.capacity)[0])
    num_rows = int(used[-1]) + 1 if used.size else 0
    per_row = sum(column.row_bytes for column in layout.columns.values())
    block = max(1, BLOCK_BYTES // per_row)
    blocks = []
    records: dict[int, RowRecord] = {}
    for first in range(0, num_rows, block):
        size = min(block, num_rows - first)
        fields, good = segment.read_checked(first, size)
        stored = {path: segment.read_rows(path, first, size)[0] for path in (*layout.ragged, "row/record")}
        rows = np.zeros(size, ROW_DTYPE)
        rows["episode"], rows["index"] = fields["row/episode"], fields["row/index"]
        rows["segment"], rows["row"] = layout.segment_id, np.arange(first, first + size)
        rows["checksum"] = segment.read_rows("row/checksum", first, size)[0]
        rows["source"], rows["is_step"] = fields["source"], fields["is_step"]
        rows["reward"] = np.asarray(fields["reward"], np.float64).reshape(size, -1).sum(axis=1)
        rows["bytes"] = per_row
        for path, entries in stored.items():
            ends = entries.astype(np.int64).sum(axis=1) + HEAP_CHECKSUM.size
            if path == "row/record":  # most rows have none
                ends[entries[:, 1] == 0] = 0
            rows["heap_end"] = np.maximum(rows["heap_end"], ends)
            if path != "row/record":
                rows["bytes"] += entries[:, 1].astype(np.int64) + HEAP_CHECKSUM.size
        for row in np.flatnonzero(good & (stored["row/record"][:, 1] > 0)):
            content = segment.read_heap(stored["row/record"][row])
            # A row may be whole although its record is damaged, or was blanked by repair: the row stays.
            if content is not None and (record := decode_row_record(content)) is not None:
                records[first + int(row)] = record
        blocks.append(rows[good])
    rows = np.concatenate(blocks) if blocks else np.zeros(0, ROW_DTYPE)
    for first_row, record in records.items():
        start, stop = np.searchsorted(rows["row"], (first_row, first_row + record["num_rows"]))
        rows["commit"][start:stop] = record["commit"]
    return SegmentScan(rows=rows, records=records)


def num_unrecorded(segment: Segment, num_rows: int) -> int:
    """How many rows after the first `num_rows` are whole, up to the first that is not."""
    stored, _ = segment.read_rows("row/checksum", num_rows, segment.layout.capacity - num_rows)
    candidates = int(np.argmin(stored != 0)) if len(stored) and not stored.all() else len(stored)
    if candidates == 0:
        return 0
    _, good = segment.read_checked(num_rows, candidates)
    return candidates if good.all() else int(np.argmin(good))

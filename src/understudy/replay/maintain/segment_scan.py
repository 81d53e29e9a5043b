"""Salvage: what a segment file tells by itself, row by row, without the catalog."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from understudy.core import DamageError
from understudy.replay.format.segment import HEAP_CHECKSUM, Segment, layout_of

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
class Found:
    """The whole rows of one segment and the records among them."""

    rows: np.ndarray[Any, Any]  # ROW_DTYPE, by row
    records: dict[int, dict[str, Any]]  # by row


def scan(segment: Segment) -> Found:
    """Every row whose checksums hold, with what is needed to describe its episode again."""
    layout = segment.layout
    used = np.flatnonzero(segment.read_column("row/checksum", 0, layout.capacity))
    num_rows = int(used[-1]) + 1 if used.size else 0
    per_row = sum(column.row_bytes for column in layout.columns.values())
    block = max(1, BLOCK_BYTES // per_row)
    blocks = []
    records: dict[int, dict[str, Any]] = {}
    for first in range(0, num_rows, block):
        size = min(block, num_rows - first)
        fields, good = segment.read_checked(first, size)
        stored = {path: segment.read_column(path, first, size) for path in (*layout.ragged, "row/record")}
        rows = np.zeros(size, ROW_DTYPE)
        rows["episode"], rows["index"] = fields["row/episode"], fields["row/index"]
        rows["segment"], rows["row"] = layout.segment_id, np.arange(first, first + size)
        rows["checksum"] = segment.read_column("row/checksum", first, size)
        rows["source"], rows["is_step"] = fields["source"], fields["is_step"]
        rows["reward"] = np.asarray(fields["reward"], np.float64).reshape(size, -1).sum(axis=1)
        rows["bytes"] = per_row
        for path, places in stored.items():
            ends = places.astype(np.int64).sum(axis=1) + HEAP_CHECKSUM.size
            if path == "row/record":  # most rows have none
                ends[places[:, 1] == 0] = 0
            rows["heap_end"] = np.maximum(rows["heap_end"], ends)
            if path != "row/record":
                rows["bytes"] += places[:, 1].astype(np.int64) + HEAP_CHECKSUM.size
        for row in np.flatnonzero(good & (stored["row/record"][:, 1] > 0)):
            record = segment.read_heap(stored["row/record"][row])
            if record is None:  # the row is whole and its record is not: the row stays, the record is lost
                continue
            records[first + int(row)] = json.loads(record)
        blocks.append(rows[good])
    rows = np.concatenate(blocks) if blocks else np.zeros(0, ROW_DTYPE)
    for first_row, told in records.items():
        if told:  # a blanked one is empty
            start, stop = np.searchsorted(rows["row"], (first_row, first_row + told["num_rows"]))
            rows["commit"][start:stop] = told["commit"]
    return Found(rows=rows, records=records)


def num_unrecorded(segment: Segment, num_rows: int) -> int:
    """How many rows behind the first `num_rows` are whole, up to the first that is not."""
    stored = segment.read_column("row/checksum", num_rows, segment.layout.capacity - num_rows)
    candidates = int(np.argmin(stored != 0)) if len(stored) and not stored.all() else len(stored)
    if candidates == 0:
        return 0
    _, good = segment.read_checked(num_rows, candidates)
    return candidates if good.all() else int(np.argmin(good))


def newest_commit(path: Path) -> int:
    """The highest commit number among the records of a segment file; 0 if it has none or is no segment."""
    try:
        segment = Segment.open(layout_of(path), path)
    except DamageError:
        return 0
    try:
        places = segment.read_column("row/record", 0, segment.layout.capacity)
        found = (segment.read_heap(places[row]) for row in np.flatnonzero(places[:, 1]))
        return max((int(json.loads(record)["commit"]) for record in found if record is not None), default=0)
    finally:
        segment.close()

"""Row blocks: the small fields of the rows that were read, in memory, so that numpy takes rows of all segments at once.

A block is BLOCK_ROWS neighbouring rows of a segment. It is read when one of its rows is first asked for, compared with
the checksums of its rows, and kept, up to a quarter of the machine's memory for all blocks; beyond that, the block that
was not used for the longest time makes room. What is kept was right when it was compared and is not read again: damage
that comes later is not served. Nothing is mapped, because the system kills a process that touches a mapped file which
was cut short, or whose disk fails.

Why it pays: a batch of 256 random steps touches about as many segments as there are, with a few rows each. One read for
each row and field costs more than all the rest; here a field of the whole batch is one call of numpy.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

import numpy as np

from understudy.core import DamageError, StepSpec
from understudy.replay.format.arrays import Array
from understudy.replay.format.layout import checksum_of, large_fields
from understudy.replay.format.segment import Segment, as_bytes
from understudy.replay.read.reader import Reader

BLOCK_ROWS = 256
MEMORY_SHARE = 4  # of the machine's memory, one part in so many at most
NOWHERE = -1


class RowBlocks:
    """Small fields of rows of one spec, by segment and row. Not for several threads at once."""

    def __init__(self, reader: Reader, spec: StepSpec, *, counted: Iterable[str] = (), max_bytes: int | None = None):
        """For each large field and those in `counted`, the number of reads of each row is kept here too."""
        self._reader = reader
        large = large_fields(spec)
        self._names = (*(path for path in spec.stored_columns if path not in large), *map(checksum_of, large))
        self._max_bytes = memory_bytes() // MEMORY_SHARE if max_bytes is None else max_bytes
        self._block_bytes = 0  # of the fields of a block, once a segment is known
        self._first_block = np.zeros(0, np.int64)  # by segment: the number of its first block, or NOWHERE
        self._capacity = np.zeros(0, np.int64)  # by segment: its rows; 0 if it is not known
        self._slot = np.zeros(0, np.int64)  # by block: its place below, or NOWHERE
        self._num_blocks = 0
        self._num_slots = 0  # that were ever used; behind them, the arrays below take no memory
        self._free: list[int] = []
        # by slot
        self._block = np.zeros(0, np.int64)
        self._num_rows = np.zeros(0, np.int64)  # of the block's rows, the first so many were read
        self._used = np.zeros(0, np.int64)  # when, in calls of `begin`
        self._now = 0
        # by slot and row
        self._good = np.zeros(0, bool)
        self._columns: dict[str, Array] = {}  # [rows, row_bytes] uint8
        self.num_reads: dict[str, Array] = {path: np.zeros(0, np.uint8) for path in (*large, *counted)}

    @property
    def num_bytes(self) -> int:
        """Of the fields that are kept."""
        return self._num_slots * self._block_bytes

    def begin(self) -> None:
        """What is located from here on stays where it is, until the next call."""
        self._now += 1

    def locate(self, segments: Array, rows: Array) -> Array:
        """Where rows are for `take` and `at`; reads those that are not here yet.

        An IndexError if a row is outside of its segment, a DamageError if one is not what was written.
        """
        if len(rows) == 0:
            return np.zeros(0, np.int64)
        self._know(segments)
        outside = (rows < 0) | (rows >= self._capacity[segments])
        if outside.any():
            first = int(np.argmax(outside))
            capacity = int(self._capacity[segments[first]])
            raise IndexError(f"segment {segments[first]}: expected a row from 0 to {capacity - 1}, got {rows[first]}")
        block = self._first_block[segments] + rows // BLOCK_ROWS
        within = rows % BLOCK_ROWS
        slot = self._slot[block]
        late = slot == NOWHERE
        late[~late] = within[~late] >= self._num_rows[slot[~late]]
        if late.any():
            self._used[slot[slot != NOWHERE]] = self._now
            for number in np.unique(block[late]).tolist():
                mine = np.flatnonzero(block == number)
                self._read(number, int(segments[mine[0]]), int(rows[mine].max()))
            slot = self._slot[block]
        self._used[slot] = self._now
        places: Array = slot * BLOCK_ROWS + within
        good = self._good[places]
        if not good.all():
            wrong = int(np.argmin(good))
            segment, row = self._reader.segment(int(segments[wrong])), int(rows[wrong])
            for column in segment.layout.small:
                segment.read_column(column.name, row, 1)  # raises, if the disk is the reason
            raise damage(segment, "a field", row)
        return places

    def take(self, name: str, places: Array) -> Array:
        """A field of some rows, as bytes [rows, row_bytes]."""
        taken: Array = self._columns[name][places]
        return taken

    def forget(self, removed: Iterable[int]) -> None:
        """Give back the memory of segments that are gone."""
        for segment_id in removed:
            if segment_id < len(self._capacity) and self._capacity[segment_id]:
                first = int(self._first_block[segment_id])
                blocks = np.arange(first, first - (-int(self._capacity[segment_id]) // BLOCK_ROWS))
                for slot in self._slot[blocks][self._slot[blocks] != NOWHERE].tolist():
                    self._empty(slot)
                    self._free.append(slot)

    # ---- reading

    def _know(self, segments: Array) -> None:
        """Number the blocks of segments that are new here."""
        highest, lowest = int(segments.max()), int(segments.min())
        if lowest < 0:
            raise IndexError(f"segment: expected a number from 0, got {lowest}")
        if highest >= len(self._capacity):
            self._capacity = grown(self._capacity, highest + 1)
            self._first_block = grown(self._first_block, highest + 1, NOWHERE)
        for segment_id in np.unique(segments[self._capacity[segments] == 0]).tolist():
            segment = self._reader.segment(segment_id)
            segment.expect_random_reads()
            self._first_block[segment_id] = self._num_blocks
            self._num_blocks += -(-segment.layout.capacity // BLOCK_ROWS)
            self._slot = grown(self._slot, self._num_blocks, NOWHERE)
            self._capacity[segment_id] = segment.layout.capacity

    def _read(self, block: int, segment_id: int, last_row: int) -> None:
        """Read and compare those rows of a block that are committed; the ones behind them may be written now."""
        segment = self._reader.segment(segment_id)
        slot = int(self._slot[block])
        if slot == NOWHERE:
            slot = self._new_slot(segment)
            self._slot[block], self._block[slot], self._num_rows[slot] = slot, block, 0
        known = int(self._num_rows[slot])
        first_row = (block - int(self._first_block[segment_id])) * BLOCK_ROWS
        committed = min(self._reader.num_committed(segment_id), first_row + BLOCK_ROWS)
        first_row += known
        num_rows = max(last_row + 1, committed) - first_row
        fields, good = segment.read_small(first_row, num_rows)
        at = slice(slot * BLOCK_ROWS + known, slot * BLOCK_ROWS + known + num_rows)
        for name in self._names:
            self._columns[name][at] = as_bytes(fields[name], segment.layout.columns[name])
        self._good[at] = good
        for counts in self.num_reads.values():
            counts[at] = 0
        self._num_rows[slot], self._used[slot] = known + num_rows, self._now

    def _new_slot(self, segment: Segment) -> int:
        """A place for a block; another block loses its own if there is no room for both."""
        if self._free:
            return self._free.pop()
        if self._num_slots == len(self._used):
            oldest = int(np.argmin(self._used)) if len(self._used) else NOWHERE
            if oldest != NOWHERE and self._used[oldest] < self._now:
                self._empty(oldest)
                return oldest
            self._allocate(segment)
        self._num_slots += 1
        return self._num_slots - 1

    def _empty(self, slot: int) -> None:
        self._slot[self._block[slot]] = NOWHERE
        self._num_rows[slot], self._used[slot] = 0, 0

    def _allocate(self, segment: Segment) -> None:
        """Make the arrays as long as they may be: the system gives memory to what is written. A call that needs more
        blocks than that at once gets them.
        """
        columns = segment.layout.columns
        self._block_bytes = BLOCK_ROWS * sum(columns[name].row_bytes for name in self._names)
        num_slots = max(self._max_bytes // max(self._block_bytes, 1), 16) + len(self._used)
        self._block, self._num_rows, self._used = (
            grown(array, num_slots) for array in (self._block, self._num_rows, self._used)
        )
        num_rows = num_slots * BLOCK_ROWS
        self._good = grown(self._good, num_rows)
        for name in self._names:
            known = self._columns.get(name, np.zeros((0, columns[name].row_bytes), np.uint8))
            self._columns[name] = grown(known, num_rows)
        self.num_reads = {path: grown(counts, num_rows) for path, counts in self.num_reads.items()}


def memory_bytes() -> int:
    """The memory of this machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def damage(segment: Segment, what: str, row: int) -> DamageError:
    """The error that a row is not what was written."""
    where = f" of row {row}" if row >= 0 else ""
    return DamageError(f"{segment.path}: {what}{where} is not what was written; run `understudy verify`")


def grown(array: Array, length: int, fill: int = 0) -> Array:
    """The array, with `fill` at its end if it is shorter than `length`."""
    if length <= len(array):
        return array
    longer = np.zeros((length, *array.shape[1:]), array.dtype)  # zeros take no memory until they are written
    longer[: len(array)] = array
    if fill:
        longer[len(array) :] = fill
    return longer

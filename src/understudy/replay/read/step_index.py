"""StepIndex: where every step of a store lies, in an order that never changes.

It follows a store, commit by commit, and keeps a few numbers for each span and each run, not for each step. A *run* is
neighbouring rows of one span whose steps have one source. The index holds what all views share: where rows lie, which
span follows which, and which source chose the actions. A span is found again by its episode and first index when
compaction moves it. The order (by commit, then episode, then index) depends only on the commits, so a view as of a
commit is the same in every process.

A step is indexed at the row *after* it: that row holds its outcome, so a step is in the index from the commit of that
row on. The first row of an episode has no step before it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from understudy.core import DamageError
from understudy.replay.format.arrays import Array
from understudy.replay.read.reader import Reader

NONE = -1
NO_STEP = 255  # instead of a source


class Column:
    """An array that grows at its end."""

    def __init__(self, dtype: npt.DTypeLike):
        self._data = np.zeros(64, dtype)
        self._length = 0

    def __len__(self) -> int:
        return self._length

    @property
    def values(self) -> Array:
        """All values, as a view that may be written to."""
        return self._data[: self._length]

    @property
    def num_bytes(self) -> int:
        return self._data.nbytes

    def append(self, values: Array) -> None:
        self.resize(self._length + len(values))
        self._data[self._length - len(values) : self._length] = values

    def resize(self, length: int, fill: int = 0) -> None:
        """Make it longer; new items are `fill`."""
        if length > len(self._data):
            grown = np.zeros(max(length, len(self._data) * 3 // 2), self._data.dtype)
            grown[: self._length] = self._data[: self._length]
            self._data = grown
        if length > self._length:
            self._data[self._length : length] = fill
            self._length = length


class StepIndex:
    """The rows of a store, up to `commit`."""

    def __init__(self, reader: Reader):
        self.reader = reader
        self.commit = 0
        self._newest = 0  # commit in the store, when it was last looked at
        self._last_span_id = 0
        # spans, in the order in which they were committed
        self.span_episode = Column(np.int64)
        self.span_first_index = Column(np.int32)
        self.span_num_rows = Column(np.int32)
        self.span_segment = Column(np.int32)
        self.span_first_row = Column(np.int32)
        self.span_next = Column(np.int32)  # the span that follows in the same episode, or NONE
        self.span_previous = Column(np.int32)
        self.span_first_run = Column(np.int32)
        self.span_last_source = Column(np.uint8)
        # runs; those of a span are neighbours
        self.run_span = Column(np.int32)
        self.run_offset = Column(np.int32)
        self.run_length = Column(np.int32)
        self.run_source = Column(np.uint8)  # of the steps before its rows; NO_STEP for an episode's first row
        self.run_base = Column(np.int64)  # rows in all runs before it: the number of its first row, which never changes
        # episodes, by id
        self.episode_num_rows = Column(np.int32)
        self.episode_first_span = Column(np.int32)
        self.episode_last_span = Column(np.int32)
        self.episode_spec = Column(np.int32)

    @property
    def num_bytes(self) -> int:
        return sum(value.num_bytes for value in vars(self).values() if isinstance(value, Column))

    def follow_moves(self) -> bool:
        """Update only where compaction has moved rows that are indexed; False if it moved none."""
        catalog = self.reader.catalog
        with catalog.transaction(write=False):
            moved = catalog.spans("id > ? and commit_id <= ?", (self._last_span_id, self.commit))
            self._last_span_id = catalog.last_span_id()
        self._move(moved)
        return len(moved) > 0

    def follow(self, until: int | None = None) -> Array:
        """Index what was committed, up to commit `until` or the newest; returns the episodes with new rows."""
        catalog = self.reader.catalog
        before: Array | None = None
        sources: Array | None = None
        while True:
            with catalog.transaction(write=False):
                newest = catalog.last_commit()
                until = newest if until is None else min(until, newest)
                known = self.commit
                moved = catalog.spans("id > ? and commit_id <= ?", (self._last_span_id, known)) if known else None
                new = catalog.spans(
                    "commit_id > ? and commit_id <= ?", (known, until), order="commit_id, episode, first_index"
                )
                last_span_id = catalog.last_span_id()
                self._take_specs(new)
                if newest != self._newest:
                    self.reader.close_removed()
                    self._newest = newest
            try:
                sources = self._read_sources(new) if len(new) else None
                break
            except DamageError:
                # Compaction may have moved the rows and removed the file meanwhile; then the catalog has changed.
                if before is not None and np.array_equal(before, new):
                    raise
                before = new
        self._last_span_id = last_span_id
        if moved is not None:
            self._move(moved)
        self.commit = max(until, known)
        if sources is not None:
            self._add(new, sources)
        return np.unique(new["episode"])

    # ---- indexing

    def _take_specs(self, new: Array) -> None:
        ids = np.unique(new["episode"])
        fresh = ids[ids >= len(self.episode_spec)]
        if len(fresh):
            for column, fill in (
                (self.episode_num_rows, 0),
                (self.episode_first_span, NONE),
                (self.episode_last_span, NONE),
                (self.episode_spec, NONE),
            ):
                column.resize(int(fresh[-1]) + 1, fill)
        unknown = ids[self.episode_spec.values[ids] == NONE]
        if len(unknown):
            pairs = self.reader.catalog.episode_specs(int(unknown[0]), int(unknown[-1]))
            self.episode_spec.values[pairs[:, 0]] = pairs[:, 1]

    def _add(self, new: Array, sources: Array) -> None:
        first = len(self.span_episode)
        ordinal = np.arange(first, first + len(new))
        episode = new["episode"]
        order = np.lexsort((new["first_index"], episode))
        grouped = episode[order]
        same = np.zeros(len(new), bool)
        same[1:] = grouped[1:] == grouped[:-1]
        previous = np.full(len(new), NONE, np.int64)
        previous[order[1:]] = np.where(same[1:], ordinal[order[:-1]], NONE)
        opening = order[~same]  # the first new span of each episode follows its last indexed span
        previous[opening] = self.episode_last_span.values[episode[opening]]

        self.span_episode.append(episode)
        self.span_first_index.append(new["first_index"])
        self.span_num_rows.append(new["num_rows"])
        self.span_segment.append(new["segment"])
        self.span_first_row.append(new["first_row"])
        self.span_previous.append(previous)
        self.span_next.append(np.full(len(new), NONE))
        linked = previous != NONE
        self.span_next.values[previous[linked]] = ordinal[linked]
        starts = opening[previous[opening] == NONE]
        self.episode_first_span.values[episode[starts]] = ordinal[starts]
        closing = order[np.append(~same[1:], True)]
        self.episode_last_span.values[episode[closing]] = ordinal[closing]
        np.add.at(self.episode_num_rows.values, episode, new["num_rows"].astype(np.int32))
        self._add_runs(new, first, sources)

    def _add_runs(self, new: Array, first: int, chosen: Array) -> None:
        """Cut the new spans where the source of the step before changes."""
        lengths = new["num_rows"]
        stops = np.cumsum(lengths)
        starts = stops - lengths
        self.span_last_source.append(chosen[stops - 1])
        sources = np.empty_like(chosen)
        sources[1:] = chosen[:-1]
        previous = self.span_previous.values[first:]
        sources[starts] = np.where(previous == NONE, NO_STEP, self.span_last_source.values[previous])
        change = np.zeros(len(sources), bool)
        change[1:] = sources[1:] != sources[:-1]
        change[starts] = True
        begin = np.flatnonzero(change)
        span = np.searchsorted(starts, begin, side="right") - 1
        first_run = len(self.run_span) + np.searchsorted(begin, starts)
        self.span_first_run.append(first_run)
        self.run_span.append(first + span)
        self.run_offset.append(begin - starts[span])
        run_lengths = np.diff(np.append(begin, len(sources)))
        base = self.run_base.values[-1] + self.run_length.values[-1] if len(self.run_base) else 0
        self.run_base.append(base + np.cumsum(run_lengths) - run_lengths)
        self.run_length.append(run_lengths)
        self.run_source.append(sources[begin])

    def _read_sources(self, new: Array) -> Array:
        """The source of each row of the spans, one after the other; each segment is read once."""
        stops = np.cumsum(new["num_rows"])
        out = np.zeros(int(stops[-1]), np.uint8)
        order = np.argsort(new["segment"], kind="stable")
        edges = np.flatnonzero(np.diff(new["segment"][order])) + 1
        for mine in np.split(order, edges):
            low = int(new["first_row"][mine].min())
            high = int((new["first_row"] + new["num_rows"])[mine].max())
            segment = self.reader.segment(int(new["segment"][mine[0]]))
            column, readable = segment.read_rows("source", low, high - low)
            lengths = new["num_rows"][mine]
            rows = np.repeat(new["first_row"][mine] - low - np.cumsum(lengths) + lengths, lengths) + np.arange(
                lengths.sum()
            )
            if not readable[rows].all():  # between them may be rows that repair has taken out of the catalog
                column = segment.read_column("source", low, high - low)
            targets = np.repeat(stops[mine] - lengths - np.cumsum(lengths) + lengths, lengths) + np.arange(
                lengths.sum()
            )
            out[targets] = column[rows]
        return out

    def _move(self, moved: Array) -> None:
        """Update the segment and row of spans that compaction has moved."""
        for span in moved:
            ordinal = self.find_span(int(span["episode"]), int(span["first_index"]))
            self.span_segment.values[ordinal] = span["segment"]
            self.span_first_row.values[ordinal] = span["first_row"]

    # ---- finding

    def find_span(self, episode: int, index: int) -> int:
        """The span that holds a row of an episode."""
        span = int(self.episode_last_span.values[episode])
        while span != NONE and self.span_first_index.values[span] > index:
            span = int(self.span_previous.values[span])
        return span

    def step_by(self, span: Array, offset: Array, by: int | Array) -> tuple[Array, Array]:
        """The rows `by` rows later (or earlier) in their episodes; they must exist."""
        span, offset = span.copy(), offset + by
        lengths = self.span_num_rows.values
        while (late := np.flatnonzero(offset >= lengths[span])).size:
            offset[late] -= lengths[span[late]]
            span[late] = self.span_next.values[span[late]]
        while (early := np.flatnonzero(offset < 0)).size:
            span[early] = self.span_previous.values[span[early]]
            offset[early] += lengths[span[early]]
        return span, offset

    def locate(self, span: Array, offset: Array) -> tuple[Array, Array]:
        """Segment and row of rows given by span and offset."""
        return self.span_segment.values[span], self.span_first_row.values[span] + offset

    def identity(self, span: Array, offset: Array) -> tuple[Array, Array]:
        """Episode and index of rows."""
        return self.span_episode.values[span], self.span_first_index.values[span] + offset

    def row_number(self, span: Array, offset: Array) -> Array:
        """The numbers of rows among all rows of the store, in the order of the commits; they never change."""
        found: Array = self.run_base.values[self.span_first_run.values[span]] + offset
        return found

    def row_number_of(self, episode: int, index: int) -> int:
        span = np.array([self.find_span(episode, index)])
        return int(self.row_number(span, index - self.span_first_index.values[span])[0])

    def row_position(self, rows: Array) -> tuple[Array, Array]:
        """Span and offset of rows given by number."""
        run = np.searchsorted(self.run_base.values, rows, side="right") - 1
        return self.run_span.values[run].astype(np.int64), self.run_offset.values[run] + rows - self.run_base.values[
            run
        ]

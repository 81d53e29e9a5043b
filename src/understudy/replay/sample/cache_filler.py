"""CacheFiller: makes the resized frames of a view in the background, in the order of the files, before they are drawn.

| thread | takes from | blocks on | woken by |
|---|---|---|---|
| caller of `add_new_rows` | the index of the view | - | - |
| filling threads | the rows that are left | these, when there are none; the lock | `add_new_rows`, `close`; the clock |

One process fills a cache at a time: a lock in its directory, which the system releases if the process is killed. All
others take what is there already and make what is not, for their batches. What cannot be made, because it is damaged or
its segment was removed, is left out here: a batch that needs it says why.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from understudy.core import UnderstudyError
from understudy.processes import forks
from understudy.replay.format.segment import Segment
from understudy.replay.read.resized_field import ResizedField
from understudy.replay.read.view import ViewIndex

PIECE_ROWS = 64
SINGLE_FRAMES = 16  # of those that are no GOP, made and written at once: files of larger writes are read faster
RETRY_S = 1.0  # between two attempts to get the lock, or room in the cache


class _Rows(NamedTuple):
    """Neighbouring rows of a segment, of which one field is to be made."""

    field: ResizedField
    segment: Segment
    first: int
    stop: int


class CacheFiller:
    """Threads that fill the cache with the fields of the rows of one view."""

    def __init__(self, index: ViewIndex, fields: Sequence[ResizedField], num_threads: int):
        self._index = index
        self._fields = fields
        self._num_threads = num_threads
        self._num_spans = 0  # that were added
        self._directory = fields[0].derived.directory
        self._start()
        forks.register(self)

    def _start(self) -> None:
        self._rows: deque[_Rows] = deque()
        self._changed = threading.Condition()
        self._num_busy = 0  # threads that make frames
        self._closed = False
        self._lock_fd: int | None = None
        self._threads: list[threading.Thread] = []

    def after_fork_in_child(self) -> None:
        """The threads are in the parent, which goes on; this process begins with what is committed from here on."""
        if self._lock_fd is not None:
            os.close(self._lock_fd)  # the parent's descriptor holds the lock
        self._start()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        self._unlock()

    def add_new_rows(self) -> None:
        """Have the rows made that the index has got since the last call, if their episodes are in the view."""
        steps = self._index.step_index
        spans = np.arange(self._num_spans, len(steps.span_episode))
        self._num_spans = len(steps.span_episode)
        spans = spans[self._index.episode_counts(steps.span_episode.values[spans]) > 0]
        if not len(spans) or self._directory.is_full:
            return
        segments, firsts = steps.span_segment.values[spans], steps.span_first_row.values[spans]
        order = np.lexsort((firsts, segments))
        segments, firsts = segments[order], firsts[order]
        stops = firsts + steps.span_num_rows.values[spans][order]
        starts = np.flatnonzero(np.append(True, (segments[1:] != segments[:-1]) | (firsts[1:] != stops[:-1])))
        lasts = np.append(starts[1:], len(order)) - 1
        with self._changed:
            for segment_id, first, stop in zip(segments[starts], firsts[starts], stops[lasts], strict=True):
                with suppress(UnderstudyError):
                    segment = steps.reader.segment(int(segment_id))
                    self._rows.extend(_Rows(field, segment, int(first), int(stop)) for field in self._fields)
            self._changed.notify_all()
        if not self._threads:
            self._threads = [
                threading.Thread(target=self._run, name="fill", daemon=True) for _ in range(self._num_threads)
            ]
            for thread in self._threads:
                thread.start()

    def wait(self, timeout_s: float) -> bool:
        """Wait until everything that was added is made, or cannot be; False if that takes longer."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._rows and not self._num_busy, timeout_s)

    # ---- the threads

    def _run(self) -> None:
        while (rows := self._next()) is not None:
            with suppress(UnderstudyError):
                self._make(rows)
            with self._changed:
                self._num_busy -= 1
                self._changed.notify_all()

    def _next(self) -> _Rows | None:
        """The next few rows; waits while there are none, another process fills, or the cache is full."""
        with self._changed:
            while not self._closed:
                if not self._rows:
                    if not self._num_busy:
                        self._unlock()
                    self._changed.wait()
                elif self._directory.is_full or not self._lock():
                    self._changed.wait(RETRY_S)
                else:
                    rows = self._rows.popleft()
                    self._num_busy += 1
                    if rows.stop - rows.first > PIECE_ROWS:
                        self._rows.appendleft(rows._replace(first=rows.first + PIECE_ROWS))
                    return rows._replace(stop=min(rows.stop, rows.first + PIECE_ROWS))
            return None

    def _make(self, rows: _Rows) -> None:
        """Make the GOPs that begin in these rows, and are not in the cache."""
        field, segment, first, stop = rows
        numbers = field.frame_numbers(segment, first, stop - first)
        sources = segment.read_column(field.source_checksum, first, stop - first)
        missing = ~field.derived.has(segment.layout.segment_id, first, sources)
        starts = np.flatnonzero(numbers == 0)[:: SINGLE_FRAMES if field.gop_size == 1 else 1]
        for start, end in pairwise([*starts.tolist(), stop - first]):
            if missing[start:end].any() and not self._closed:
                if self._directory.is_full:  # later, if there is room
                    with self._changed:
                        self._rows.appendleft(rows._replace(first=first + start))
                    return
                with suppress(UnderstudyError):  # damage costs one GOP here, or a few single frames
                    field.make(segment, first + start, first + end - 1)

    def _lock(self) -> bool:
        """Whether this process is the one that fills."""
        if self._lock_fd is None:
            self._lock_fd = self._directory.lock_to_fill()
        return self._lock_fd is not None

    def _unlock(self) -> None:
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None

"""Ticks: the times of the rows, and for each row the latest message of each topic at or before its tick.

All times are int64 nanoseconds, and all sums are of integers, so nothing is rounded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, kw_only=True, eq=False)
class TopicTimes:
    """When the messages of a topic were sent, in the order of time."""

    times: Array  # [M] int64, ascending
    numbers: Array  # [M] int64: the message's number among those of its topic in the file
    num_late: int  # messages that stand in the file behind one with a later time

    @staticmethod
    def of(times: Sequence[int]) -> TopicTimes:
        """From the times in the order of the file; of equal times, the later message counts as later."""
        given = np.asarray(times, np.int64)
        numbers = np.argsort(given, kind="stable")
        late = given < np.maximum.accumulate(given) if len(given) else given
        return TopicTimes(times=given[numbers], numbers=numbers, num_late=int(np.count_nonzero(late)))

    def latest(self, ticks: Array, oldest: int) -> Array:
        """Index of the latest message at or before each tick; -1 if it is older than `oldest`, or there is none."""
        found = np.searchsorted(self.times, ticks, side="right") - 1
        return np.where(found >= np.searchsorted(self.times, oldest, side="left"), found, -1)


class Event(NamedTuple):
    """From here on, rows belong to a new episode, or to none."""

    time: int
    keep: bool


class Window(NamedTuple):
    """A part of the recording that becomes one episode: start <= tick < stop, of messages not older than `oldest`."""

    start: int
    stop: int
    oldest: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Rows:
    """The rows of one episode, of which there may be none."""

    ticks: Array  # [N] int64
    indices: Mapping[str, Array]  # by topic: [N] int64, index of the message in TopicTimes
    num_early: int  # ticks that were left out because a topic had had no message


def windows(topics: Mapping[str, TopicTimes], gap_ns: int | None, events: Sequence[Event] | None) -> Iterator[Window]:
    """The episodes of a recording. Messages from before a gap are not used after it; those from before an event are."""
    times = np.unique(np.concatenate([topic.times for topic in topics.values()]))
    if not len(times):
        return
    ends = np.flatnonzero(np.diff(times) > gap_ns) if gap_ns is not None else np.zeros(0, np.int64)
    for first, last in zip([0, *(ends + 1)], [*ends, len(times) - 1], strict=True):
        start, stop = int(times[first]), int(times[last]) + 1
        if events is None:
            yield Window(start, stop, start)
            continue
        inside = [event for event in events if event.time < stop]
        for event, after in zip(inside, [*(event.time for event in inside[1:]), stop], strict=True):
            if event.keep and after > start:
                yield Window(max(start, event.time), after, start)


def ticks_at(rate: Fraction, window: Window) -> Array:
    """The ticks of a rate, counted from the oldest message that the window may use, exact to the nanosecond."""
    span = window.stop - window.oldest
    count = int(span * rate / 10**9) + 2
    exact = (window.oldest + index * 10**9 * rate.denominator // rate.numerator for index in range(count))
    ticks = np.fromiter(exact, np.int64, count)
    return ticks[(ticks >= window.start) & (ticks < window.stop)]


def ticks_of(topic: TopicTimes, window: Window) -> Array:
    """A tick for each message of a topic."""
    ticks = np.unique(topic.times)
    return ticks[(ticks >= window.start) & (ticks < window.stop)]


def rows_of(topics: Mapping[str, TopicTimes], ticks: Array, window: Window) -> Rows:
    """The rows of the ticks from the first at which every topic has a message."""
    indices = {name: topic.latest(ticks, window.oldest) for name, topic in topics.items()}
    ready = np.ones(len(ticks), bool)
    for found in indices.values():
        ready &= found >= 0
    first = int(np.argmax(ready)) if ready.any() else len(ticks)
    return Rows(
        ticks=ticks[first:],
        indices={name: found[first:] for name, found in indices.items()},
        num_early=first,
    )


def sample_ranges(rows: Rows, topic: str) -> Iterator[tuple[int, int]]:
    """For each step, the messages of a topic since the row before: the first, and the first behind them.

    The first step has only the message of its row.
    """
    found = rows.indices[topic][:-1].tolist()
    before = found[0] - 1
    for index in found:
        yield before + 1, index + 1
        before = index

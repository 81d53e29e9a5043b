"""BagReader: reads recordings as Episodes.

A recording is read twice: first the times of its messages, which say which of them each row needs; then the messages,
of which only those are decoded that a row needs. An episode of N rows has N - 1 steps, because the last row is the
last observation.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections import Counter, deque
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from understudy.core import NO_VERSION, ArraySpec, Episode, EpisodeInfo, Spec, StepSpec, UnderstudyError
from understudy.core import tree as trees
from understudy.core.episode import FPS, MEASURED_FPS, NAMES
from understudy.core.step import Source
from understudy.formats.bags.bag import Bag, find_topic
from understudy.formats.bags.decode import Decoder, NotNumbersError, numbers, stamp_ns, walk
from understudy.formats.bags.fields import TopicField, Value, decoders_of, plan_fields, read_value
from understudy.formats.bags.options import SAMPLES, SAMPLES_TIME, TIME, ReadOptions
from understudy.formats.bags.ticks import (
    Array,
    Event,
    Rows,
    TopicTimes,
    Window,
    rows_of,
    sample_ranges,
    ticks_at,
    ticks_of,
    windows,
)
from understudy.formats.format import Field, FormatError

TICK = f"{TIME}/tick"
MOST_ROWS = 5 * 10**6  # 46 hours at 30 rows per second
STAMP = "stamp"  # label: which time of a message counted, log or header


class BagReader:
    """Reads bags, each of which is one episode or is split into several."""

    def __init__(self, path: Path, bags: Sequence[Path], open_bag: Callable[[Path], Bag], options: ReadOptions):
        self._bags, self._open_bag, self._options = bags, open_bag, options
        first = open_bag(bags[0])
        self._plan = plan_fields(first, options)
        self._tick = self._tick_topic(first)
        self._sampled = self._sampled_fields(first)
        try:
            self.spec = self._make_spec()
        except UnderstudyError as error:
            raise FormatError(f"{path}: {error}") from None
        self.mapping = tuple(self._mapping())
        self.num_episodes: int | None = None if options.splits else len(bags)
        self._schedules: dict[Path, _Schedule] = {}  # of the bag that was read last
        self._counts: dict[Path, _Counts] = {}
        self._kept: tuple[str, Episode] | None = None

    def close(self) -> None:
        """Nothing is open between two messages."""

    def episodes(self, skip: Container[str] = ()) -> Iterator[tuple[str, Episode]]:
        for pair in self._all(skip):
            try:
                yield pair
            except GeneratorExit:  # an import looks at the first episode and then reads all
                self._kept = pair
                raise

    def _all(self, skip: Container[str]) -> Iterator[tuple[str, Episode]]:
        self._counts = {}
        for path in self._bags:
            prefix = "" if len(self._bags) == 1 else f"{path.name}/"
            if not self._options.splits and f"{prefix}episode_000000" in skip:
                continue  # without reading the bag
            bag = self._open_bag(path)
            if path not in self._schedules:
                self._schedules = {path: self._schedule(bag)}
            schedule = self._schedules[path]
            self._counts[path] = schedule.counts
            pending = deque(
                _Pending(key, rows, self._plan.fields)
                for number, rows in enumerate(schedule.episodes)
                if (key := f"{prefix}episode_{number:06d}") and len(rows.ticks) > 1 and key not in skip
            )
            for episode in pending:
                self._check_size(bag, len(episode.rows.ticks))
            kept, self._kept = self._kept, None
            if pending and kept is not None and pending[0].key == kept[0]:
                pending.popleft()
                yield kept
            kept = None
            yield from self._read(bag, schedule, pending)

    @property
    def notes(self) -> tuple[str, ...]:
        """What became of the rows and of the messages of each topic, in the bags that were read until now."""
        if not self._counts:
            return ()
        total = _Counts()
        for counts in self._counts.values():
            total.add(counts)
        notes = []
        if total.num_early:
            notes.append(f"rows left out at the start, before every topic had had a message: {total.num_early:,}")
        if total.num_outside:
            notes.append(f"rows in no episode, as {self._options.episode} says: {total.num_outside:,}")
        if total.num_without_steps:
            notes.append(f"episodes left out because they have fewer than two rows: {total.num_without_steps:,}")
        for topic in self._plan.topics:
            num, used = total.messages[topic], total.used[topic]
            notes.append(
                f"{topic}: {num:,} messages, {used:,} used, {num - used:,} dropped (no row needed them), "
                f"{total.late[topic]:,} late; the oldest in a row was {total.oldest_ns[topic] / 1e6:.3f} ms old"
            )
        return tuple(notes)

    # ---- the spec and the mapping

    def _tick_topic(self, bag: Bag) -> str | None:
        """The topic whose messages are the rows; None if they have a rate."""
        if self._options.fps is not None:
            return None
        if self._options.tick is not None:
            return find_topic(bag, self._options.tick).name
        cameras = [field.source.topic for field in self._plan.fields if field.is_camera]
        return min(cameras or self._plan.topics, key=lambda name: bag.topics[name].num_messages)

    def _sampled_fields(self, bag: Bag) -> tuple[TopicField, ...]:
        """The fields of which all messages are kept."""
        names = [find_topic(bag, name).name for name in self._options.samples]
        found = tuple(field for field in self._plan.fields if field.source.topic in names)
        for name in names:
            fields = [field for field in found if field.source.topic == name]
            if not fields or any(field.is_camera for field in fields):
                raise FormatError(
                    f"{bag.path}: samples={name}: expected a topic of numbers that a field is made of, got "
                    f"{'a camera' if fields else 'another'}; name a field of it, such as extras/NAME={name}, or leave "
                    f"it out"
                )
        return found

    def _make_spec(self) -> StepSpec:
        leaves = {field.path: field.leaf for field in self._plan.fields}
        if self._plan.next_of is not None:
            leaves["action"] = leaves[self._plan.next_of]
        time = ArraySpec(shape=(), dtype="int64")
        leaves |= {f"{TIME}/{path}": time for path in list(leaves)} | {TICK: time}
        for field in self._sampled:
            leaves[f"{SAMPLES}/{field.path}"] = dataclasses.replace(field.leaf, shape=(None, *field.leaf.shape))
            leaves[f"{SAMPLES_TIME}/{field.path}"] = ArraySpec(shape=(None,), dtype="int64")
        parts = {name: Spec(trees.unflatten(trees.below(leaves, name))) for name in ("observation", "action", "extras")}
        return StepSpec(observation=parts["observation"], action=parts["action"], extras=parts["extras"])

    def _mapping(self) -> Iterator[Field]:
        for field in self._plan.fields:
            yield Field(external=str(field.source), internal=field.path, how=field.how)
        if self._plan.next_of is not None:
            yield Field(external=self._plan.next_of, internal="action", how="of the next row")
        rows = f"{float(self._options.fps or 0):g} rows per second" if self._tick is None else "a row for each message"
        yield Field(external=self._tick or "", internal=TICK, how=f"{rows}; nanoseconds since 1970")
        times = f"{self._options.stamp} time of the message, nanoseconds"
        for path in self.spec.extras.flat:
            if path.startswith("time/") and f"extras/{path}" != TICK:
                yield Field(external="", internal=f"extras/{path}", how=times)
        for field in self._sampled:
            all_since = "all messages since the row before"
            yield Field(external=str(field.source), internal=f"{SAMPLES}/{field.path}", how=all_since)
            yield Field(external="", internal=f"{SAMPLES_TIME}/{field.path}", how=f"the times of {all_since}")
        yield Field(external="", internal="reward", how="0: a bag has none")
        yield Field(external="", internal="truncated", how="where the episode ends")
        yield Field(external="", internal="source", how=self._options.source.name.lower())
        for topic, why in self._plan.left_out.items():
            yield Field(external=topic, internal="", how=why)

    # ---- times

    def _schedule(self, bag: Bag) -> _Schedule:
        """Which message each row of each episode of a bag is made of."""
        topics, events = self._scan(bag)
        used = {name: topics[name] for name in self._plan.topics}
        episodes = []
        for window in windows(used, self._options.gap_ns, events):
            episodes.append(rows_of(used, self._ticks(bag, topics, window), window))
        counts = _Counts(num_early=sum(rows.num_early for rows in episodes))
        if events is not None:
            whole = windows(used, self._options.gap_ns, None)
            num = sum(len(self._ticks(bag, topics, window)) for window in whole)
            counts.num_outside = num - sum(len(rows.ticks) + rows.num_early for rows in episodes)
        counts.num_without_steps = sum(len(rows.ticks) < 2 for rows in episodes)
        for name, topic in used.items():
            of_rows = [rows.indices[name] for rows in episodes if len(rows.ticks) > 1]
            if any(field.source.topic == name for field in self._sampled):
                of_rows += [np.arange(found[0], found[-2] + 1) for found in of_rows]
            counts.messages[name] = len(topic.times)
            counts.used[name] = len(np.unique(np.concatenate(of_rows))) if of_rows else 0
            counts.late[name] = topic.num_late
            ages = [rows.ticks - topic.times[rows.indices[name]] for rows in episodes if len(rows.ticks) > 1]
            counts.oldest_ns[name] = max((int(age.max()) for age in ages), default=0)
        return _Schedule(topics=used, episodes=tuple(episodes), counts=counts)

    def _ticks(self, bag: Bag, topics: Mapping[str, TopicTimes], window: Window) -> Array:
        if self._tick is not None:
            return ticks_of(topics[self._tick], window)
        assert self._options.fps is not None
        span_s = (window.stop - window.oldest) / 1e9
        if span_s * self._options.fps > MOST_ROWS:
            raise FormatError(
                f"{bag.path}: its messages span {span_s / 3600:,.1f} hours, which are more than {MOST_ROWS:,} rows; if "
                f"a topic has wrong times, use stamp=log or leave it out, and otherwise split at pauses with gap_s=2"
            )
        return ticks_at(self._options.fps, window)

    def _scan(self, bag: Bag) -> tuple[dict[str, TopicTimes], list[Event] | None]:
        """The times of all messages of the topics that matter, and where episodes begin."""
        episode = self._options.episode
        extra = [name for name in (self._tick, episode.topic if episode else None) if name is not None]
        names = list(dict.fromkeys([*self._plan.topics, *extra]))
        for name in names:
            find_topic(bag, name)
        decode = names if self._options.stamp == "header" else [episode.topic] if episode and episode.field else []
        decoders = decoders_of(bag, decode)
        times: dict[str, list[int]] = {name: [] for name in names}
        marks: list[tuple[int, Any]] = []
        for message in bag.messages(names):
            node = decoders[message.topic].decode(message.data) if message.topic in decoders else None
            time = message.log_time
            if self._options.stamp == "header":
                assert node is not None
                stamp = stamp_ns(decoders[message.topic], node)
                if stamp is None:
                    raise FormatError(
                        f"{bag.path}: {message.topic}: its messages have no header, so stamp=header has no time for "
                        f"them; use stamp=log, or leave the topic out"
                    )
                time = stamp
            if not 0 <= time < 2**62:
                raise FormatError(f"{bag.path}: {message.topic}: a message has the time {time}; expected ns since 1970")
            times[message.topic].append(time)
            if episode is not None and message.topic == episode.topic:
                marks.append((time, self._mark(bag, decoders, node)))
        for name, found in times.items():
            if len(found) != bag.topics[name].num_messages:
                raise FormatError(
                    f"{bag.path}: {name}: expected {bag.topics[name].num_messages:,} messages, as its index says, got "
                    f"{len(found):,}; it is damaged, fetch it again"
                )
        return {name: TopicTimes.of(found) for name, found in times.items()}, _events(marks) if episode else None

    def _mark(self, bag: Bag, decoders: Mapping[str, Decoder], node: Any) -> Any:
        """The value whose change begins an episode; None if each message does."""
        episode = self._options.episode
        assert episode is not None
        if not episode.field:
            return None
        decoder = decoders[episode.topic]
        try:
            found = walk(decoder, node, episode.field)
            try:
                return numbers(decoder, found)[0].tolist()
            except NotNumbersError:
                return str(found.value)
        except FormatError as error:
            raise FormatError(f"{bag.path}: episode={episode}: {error}") from None

    # ---- messages

    def _read(self, bag: Bag, schedule: _Schedule, pending: deque[_Pending]) -> Iterator[tuple[str, Episode]]:
        """Decode the messages that rows need, in one pass, and yield each episode when its last one is there."""
        uses: dict[str, dict[int, list[tuple[_Pending, int, int]]]] = {name: {} for name in schedule.topics}
        for episode in pending:
            for name, topic in schedule.topics.items():
                found = topic.numbers[episode.rows.indices[name]]
                starts = np.flatnonzero(np.diff(found, prepend=-1))
                for start, stop in zip(starts.tolist(), [*starts[1:].tolist(), len(found)], strict=True):
                    uses[name].setdefault(int(found[start]), []).append((episode, start, stop))
                    episode.num_missing += 1
        samples: dict[str, dict[int, list[tuple[_Pending, int, int]]]] = {name: {} for name in schedule.topics}
        for name in {field.source.topic for field in self._sampled}:
            for episode in pending:
                for row, (first, stop) in enumerate(sample_ranges(episode.rows, name)):
                    for index in range(first, stop):
                        number = int(schedule.topics[name].numbers[index])
                        samples[name].setdefault(number, []).append((episode, row, index))
                        episode.num_missing += 1
        decoders = decoders_of(bag, list(schedule.topics)) if pending else {}
        fields = {name: [f for f in self._plan.fields if f.source.topic == name] for name in schedule.topics}
        seen: Counter[str] = Counter()
        for message in bag.messages(list(schedule.topics)) if pending else ():
            number = seen[message.topic]
            seen[message.topic] += 1
            needed, kept = uses[message.topic].pop(number, ()), samples[message.topic].pop(number, ())
            if needed or kept:
                decoder = decoders[message.topic]
                node = decoder.decode(message.data)
                for topic_field in fields[message.topic]:
                    value = _checked(bag, topic_field, decoder, node)
                    for episode, start, stop in needed:
                        episode.columns[topic_field.path][start:stop] = value
                    for episode, row, index in kept:
                        episode.samples.setdefault(topic_field.path, {}).setdefault(row, {})[index] = value
                for episode, _, _ in (*needed, *kept):
                    episode.num_missing -= 1
            while pending and not pending[0].num_missing:
                done = pending.popleft()
                yield done.key, self._episode(schedule, done)
            if not pending:
                return
        if pending:
            raise FormatError(f"{bag.path}: has fewer messages than at first; it was changed while it was read")

    def _check_size(self, bag: Bag, num_rows: int) -> None:
        """Refuse an episode that does not fit in memory, where it is held while it is read."""
        size = num_rows * sum(field.leaf.row_bytes for field in self._plan.fields)
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if size > memory:
            raise FormatError(
                f"{bag.path}: an episode of {num_rows:,} rows takes {size / 1e9:,.0f} GB, and this machine has "
                f"{memory / 1e9:,.0f} GB of memory; give a lower fps=, name fewer cameras, or split it by gap_s= or "
                f"episode="
            )

    def _episode(self, schedule: _Schedule, done: _Pending) -> Episode:
        num = len(done.rows.ticks) - 1
        columns = done.columns
        times = {field.path: schedule.topics[field.source.topic].times for field in self._plan.fields}
        indices = {field.path: done.rows.indices[field.source.topic] for field in self._plan.fields}
        rows: dict[str, Any] = {}
        for path, column in columns.items():
            rows[path] = column if path.partition("/")[0] == "observation" else column[:num]
            rows[f"{TIME}/{path}"] = times[path][indices[path][:num]]
        if (source := self._plan.next_of) is not None:
            rows["action"] = columns[source][1:].copy()
            rows[f"{TIME}/action"] = times[source][indices[source][1:]]
        rows[TICK] = done.rows.ticks[:num]
        for field in self._sampled:
            rows |= _sample_columns(field, schedule.topics[field.source.topic], done)
        parts = {name: trees.unflatten(trees.below(rows, name)) for name in ("observation", "action", "extras")}
        options = self._options
        return Episode(
            **parts,
            reward=np.zeros(num, np.float32),
            terminated=np.zeros(num, bool),
            truncated=np.arange(num) == num - 1,
            source=np.full(num, options.source, np.uint8),
            policy_version=np.full(num, NO_VERSION, np.int64),
            proposal=trees.map_leaves(np.zeros_like, parts["action"]),
            has_proposal=np.zeros(num, bool),
            info=EpisodeInfo(
                task=options.task,
                instruction=options.task,
                kind="demonstration" if options.source in (Source.HUMAN, Source.SCRIPT) else "practice",
                labels=self._labels(done.rows.ticks),
            ),
        )

    def _labels(self, ticks: Array) -> dict[str, str]:
        labels = {STAMP: self._options.stamp}
        if self._options.fps is not None:
            labels[FPS] = f"{float(self._options.fps):g}"
        else:
            labels[MEASURED_FPS] = f"{round((len(ticks) - 1) * 1e9 / int(ticks[-1] - ticks[0]), 2):g}"
        names = {field.path: list(field.names) for field in self._plan.fields if field.names}
        if self._plan.next_of in names:
            names["action"] = names[self._plan.next_of]
        if names:
            labels[NAMES] = json.dumps(names, ensure_ascii=False)
        return labels


@dataclass(kw_only=True)
class _Counts:
    """What happened to the messages of a bag, by topic."""

    messages: Counter[str] = dataclasses.field(default_factory=Counter)
    used: Counter[str] = dataclasses.field(default_factory=Counter)
    late: Counter[str] = dataclasses.field(default_factory=Counter)
    oldest_ns: Counter[str] = dataclasses.field(default_factory=Counter)  # age of the oldest message in a row
    num_early: int = 0
    num_outside: int = 0
    num_without_steps: int = 0

    def add(self, other: _Counts) -> None:
        self.messages += other.messages
        self.used += other.used
        self.late += other.late
        self.oldest_ns |= other.oldest_ns
        self.num_early += other.num_early
        self.num_outside += other.num_outside
        self.num_without_steps += other.num_without_steps


@dataclass(frozen=True, kw_only=True)
class _Schedule:
    topics: Mapping[str, TopicTimes]
    episodes: tuple[Rows, ...]
    counts: _Counts


class _Pending:
    """An episode whose messages are being read."""

    def __init__(self, key: str, rows: Rows, fields: Sequence[TopicField]):
        self.key, self.rows, self._fields = key, rows, fields
        self.num_missing = 0
        self.samples: dict[str, dict[int, dict[int, Array]]] = {}  # by field, row and index of the message
        self._columns: dict[str, Array] = {}

    @property
    def columns(self) -> dict[str, Array]:
        """The columns of N rows; memory is taken when the first message comes."""
        if not self._columns:
            num = len(self.rows.ticks)
            self._columns = {
                field.path: np.empty((num, *field.leaf.fixed_shape), field.leaf.dtype) for field in self._fields
            }
        return self._columns


def _sample_columns(field: TopicField, topic: TopicTimes, done: _Pending) -> dict[str, Any]:
    """All values of a field since the row before, and their times, for each step."""
    values, moments = [], []
    given = done.samples.get(field.path, {})
    for row, (first, stop) in enumerate(sample_ranges(done.rows, field.source.topic)):
        found = [given[row][index] for index in range(first, stop)]
        values.append(np.array(found, field.leaf.dtype).reshape(len(found), *field.leaf.fixed_shape))
        moments.append(topic.times[first:stop])
    return {f"{SAMPLES}/{field.path}": values, f"{SAMPLES_TIME}/{field.path}": moments}


def _events(marks: Sequence[tuple[int, Any]]) -> list[Event]:
    """Where episodes begin: at each mark, or at each change of its value; where it is false, there is none."""
    events: list[Event] = []
    before: Any = _events  # equal to no value
    for time, value in sorted(marks, key=lambda mark: mark[0]):
        if value is None or value != before:
            events.append(Event(time, value is not False))
        before = value
    return events


def _checked(bag: Bag, field: TopicField, decoder: Decoder, node: Any) -> Array:
    """The value of a message for a field, in the shape and the order of joints of the first message."""
    try:
        value: Value = read_value(decoder, bag.topics[field.source.topic], field.source.field, node)
    except FormatError as error:
        if str(error).startswith(str(bag.path)):
            raise
        raise FormatError(f"{bag.path}: {field.source}: {error}") from None
    array = value.array
    if array.dtype == np.float64 and field.leaf.dtype == "float32":
        with np.errstate(over="ignore"):
            array = array.astype(np.float32)
    if value.names != field.names:
        if sorted(value.names) != sorted(field.names):
            raise FormatError(
                f"{bag.path}: {field.source}: expected {', '.join(field.names) or 'no names'} as in the first message, "
                f"got {', '.join(value.names) or 'no names'}; record each publisher in a topic of its own"
            )
        array = array[[value.names.index(name) for name in field.names]]
    if array.shape != field.leaf.shape or str(array.dtype) != field.leaf.dtype:
        raise FormatError(
            f"{bag.path}: {field.source}: expected {field.leaf} as in the first message, got {array.dtype} "
            f"{list(array.shape)}; record each into a topic of its own"
        )
    return array

"""Commit: checks the chunks of one or more writers, writes their rows and lists them in one transaction.

The store's own state does not change before the transaction is durable: a Commit collects the new state, and `publish`
makes it the store's. If anything fails before that, the catalog does not list the rows that were written.
`Store.commit` queues the chunks of its callers, and acknowledges them after `publish`.
"""

from __future__ import annotations

import math
from collections import ChainMap
from collections.abc import MutableMapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar

import numpy as np

from understudy.core import CopiedError, DamageError, FencedError, SequenceError, Source, SpecError, StepSpec
from understudy.core.step import frame_number_of
from understudy.replay.format.catalog import Catalog
from understudy.replay.format.chunk import Chunk, Part
from understudy.replay.format.encoded_columns import broken_numbers
from understudy.replay.format.layout import MAX_HEAP_BYTES, plan_capacity, row_bytes_of
from understudy.replay.format.records import (
    EpisodeRecord,
    RowRecord,
    SegmentRecord,
    SpanRecord,
    WriterRecord,
    encode_row_record,
    info_to_json,
)
from understudy.replay.format.segment import HEAP_CHECKSUM, Segment, digest_of_checksums, to_bytes

_Key = TypeVar("_Key")
_Record = TypeVar("_Record")


@dataclass(kw_only=True)
class StoreState:
    """The store in the memory of the writing process, as of the last commit."""

    commit: int = 0
    next_episode: int = 1
    next_segment: int = 1
    writers: MutableMapping[str, WriterRecord] = field(default_factory=dict)  # by name: the newest incarnation
    episodes: MutableMapping[tuple[int, int], EpisodeRecord] = field(default_factory=dict)  # open, by writer and number
    spec_ids: MutableMapping[str, int] = field(default_factory=dict)  # by the spec's text
    filling: MutableMapping[int, SegmentRecord] = field(
        default_factory=dict
    )  # by spec: the segment that rows are written to


class OpenSegment(Protocol):
    """Opens a segment for writing; with `create`, makes its file first."""

    def __call__(self, record: SegmentRecord, *, create: bool) -> Segment: ...


class Commit:
    """One commit. The calls, in this order: add (any number), record, publish."""

    def __init__(
        self,
        state: StoreState,
        catalog: Catalog,
        open_segment: OpenSegment,
        segment_bytes: int,
        now: float,
    ):
        self._base = state
        self._catalog = catalog
        self._open_segment = open_segment
        self._segment_bytes = segment_bytes
        self._now = now
        self.number = state.commit + 1
        self.num_rows = 0
        self._new = replace(
            state,
            commit=self.number,
            writers=ChainMap({}, state.writers),
            episodes=ChainMap({}, state.episodes),
            filling=ChainMap({}, state.filling),
        )
        self._changed: dict[int, EpisodeRecord] = {}
        self._sealed: list[SegmentRecord] = []
        self._spans: list[SpanRecord] = []
        self._written: dict[int, Segment] = {}  # by id: segments to sync

    # ---- collecting

    def add(self, chunk: Chunk) -> bool:
        """Take a chunk; False if it is stored already. If this raises, no part of the chunk was taken."""
        writer = self._new.writers.get(chunk.writer)
        if writer is None or writer.incarnation != chunk.incarnation:
            why = "has not begun" if writer is None else "was replaced by a newer process of the same name"
            raise (SequenceError if writer is None else FencedError)(
                f"writer {chunk.writer!r} {why}, so its chunk {chunk.seq} is refused; "
                f"stop this process, or begin a writer with another name"
            )
        if chunk.seq <= writer.last_seq:
            if writer.has_other(chunk.seq, chunk.check):
                raise CopiedError(
                    f"writer {chunk.writer!r}: a copy of this writer is alive: the store has another chunk {chunk.seq} "
                    f"of the same incarnation. Was its disk or its virtual machine copied? Stop one of the two; a new "
                    f"process gets an incarnation of its own",
                    last_seq=writer.last_seq,
                )
            return False
        if chunk.seq != writer.last_seq + 1:
            raise SequenceError(
                f"writer {chunk.writer!r}: expected chunk {writer.last_seq + 1}, got {chunk.seq}; "
                f"send the chunks between them"
            )
        self._check_columns(chunk)
        episodes = self._check_parts(chunk, writer)
        if chunk.num_rows:
            self._write_rows(chunk, episodes)
        for part, episode in zip(chunk.parts, episodes, strict=True):
            self._changed[episode.id] = episode
            self._new.episodes[episode.writer, part.episode] = episode
            self._new.next_episode = max(self._new.next_episode, episode.id + 1)
        self._new.writers[chunk.writer] = writer.followed_by(chunk.seq, chunk.check)
        self.num_rows += chunk.num_rows
        return True

    def _check_parts(self, chunk: Chunk, writer: WriterRecord) -> list[EpisodeRecord]:
        """The episodes as they will be after this chunk."""
        spec_id = self._spec_id(chunk.spec)
        new: dict[int, EpisodeRecord] = {}
        next_id = self._new.next_episode
        found = []
        row = 0
        for part in chunk.parts:
            episode = new.get(part.episode) or self._new.episodes.get((writer.id, part.episode))
            if episode is None:
                if self._catalog.has_episode(writer.id, part.episode):
                    raise SequenceError(
                        f"writer {chunk.writer!r}: episode {part.episode} has ended; give the next one a new number"
                    )
                if part.num_rows == 0:
                    raise SequenceError(
                        f"writer {chunk.writer!r}: episode {part.episode} has no rows yet; send its first step with it"
                    )
                episode = EpisodeRecord(
                    id=next_id,
                    writer=writer.id,
                    number=part.episode,
                    spec=spec_id,
                    state="open",
                    info=part.info,
                    begun=self.number,
                    changed=self.number,
                    begun_at=self._now,
                )
                next_id += 1
            if episode.state != "open" or episode.num_rows != part.first_index or episode.spec != spec_id:
                raise SequenceError(
                    f"writer {chunk.writer!r}, episode {part.episode}: expected rows from index {episode.num_rows} of "
                    f"an open episode, got rows from {part.first_index} and the episode is {episode.state}; "
                    f"each episode is written once, in order, with one spec"
                )
            new[part.episode] = episode = self._with_part(episode, part, chunk, row)
            found.append(episode)
            row += part.num_rows
        return found

    def _with_part(self, episode: EpisodeRecord, part: Part, chunk: Chunk, row: int) -> EpisodeRecord:
        rows = slice(row, row + part.num_rows)
        is_step = np.asarray(chunk.columns["is_step"][rows]) if part.num_rows else np.zeros(0, bool)
        if is_step.size and not is_step[:-1].all():
            raise SpecError("is_step: only the last row of an episode may hold no step; write the steps first")
        if part.state == "open" and is_step.size and not is_step[-1]:
            raise SpecError("is_step: a last observation ends the episode; send it with the state 'ended'")
        if part.state == "ended" and (not is_step.size or is_step[-1]):
            raise SpecError("is_step: an episode ends with the row of its last observation; send it, or cut it")
        ends = (np.asarray(chunk.columns["terminated"][rows]) | np.asarray(chunk.columns["truncated"][rows]))[is_step]
        if ends[:-1].any():
            raise SpecError("terminated: only the last step of an episode may be terminated; end the episode there")
        sources = np.asarray(chunk.columns["source"][rows])[is_step]
        counts = np.bincount(sources, minlength=len(Source))
        with np.errstate(over="ignore", invalid="ignore"):
            reward = np.asarray(chunk.columns["reward"][rows], np.float64)[is_step].sum()
        if not math.isfinite(episode.total_reward + float(reward)):
            raise SpecError("reward: the sum over the episode is too large for a float64; scale the rewards")
        num_human = episode.num_human + int(counts[Source.HUMAN])
        info = replace(
            part.info,
            success=episode.info.success if part.info.success is None else part.info.success,
            labels={**episode.info.labels, **part.info.labels},  # labels set meanwhile by an edit stay
            kind="correction" if part.info.kind == "practice" and num_human else part.info.kind,
        )
        return replace(
            episode,
            state=part.state,
            info=info,
            num_rows=episode.num_rows + part.num_rows,
            num_steps=episode.num_steps + int(is_step.sum()),
            num_bytes=episode.num_bytes + part.num_rows * row_bytes_of(chunk.spec) + _ragged_bytes(chunk, rows),
            num_policy=episode.num_policy + int(counts[Source.POLICY]),
            num_human=num_human,
            num_script=episode.num_script + int(counts[Source.SCRIPT]),
            num_random=episode.num_random + int(counts[Source.RANDOM]),
            total_reward=episode.total_reward + float(reward),
            changed=self.number,
            ended_at=None if part.state == "open" else self._now,
        )

    def _check_columns(self, chunk: Chunk) -> None:
        """Refuse columns that are not those of the spec: a chunk may come from another process."""
        wanted, num_rows = chunk.spec.stored_columns, chunk.num_rows
        if chunk.columns.keys() != wanted.keys():
            odd = sorted(chunk.columns.keys() ^ wanted.keys())[0]
            raise SpecError(
                f"{odd}: is in {'the spec' if odd in wanted else 'the chunk'} only; send the columns of the spec"
            )
        for path, leaf in wanted.items():
            column = chunk.columns[path]
            if leaf.ragged:
                good = isinstance(column, list) and len(column) == num_rows
                for value in column if good else ():
                    leaf.check(value, path)
            else:
                good = (
                    isinstance(column, np.ndarray)
                    and column.dtype == leaf.numpy_dtype
                    and column.shape == (num_rows, *leaf.shape)
                )
            if not good:
                raise SpecError(f"{path}: expected {num_rows} rows of {leaf}, got something else; check the writer")
        for path in chunk.spec.encoded:
            if broken_numbers(np.asarray(chunk.columns[frame_number_of(path)]), chunk.parts):
                raise SpecError(f"{path}: its GOPs cross episodes or miss frames; check the writer")

    def _spec_id(self, spec: StepSpec) -> int:
        key = spec.json_text
        if key not in self._base.spec_ids:
            with self._catalog.transaction(write=True):
                self._base.spec_ids[key] = self._catalog.put_spec(spec)
        return self._base.spec_ids[key]

    # ---- writing rows

    def _write_rows(self, chunk: Chunk, episodes: list[EpisodeRecord]) -> None:
        records = self._records(chunk, episodes)
        heap_bytes = sum(len(record) + HEAP_CHECKSUM.size for record in records.values())
        heap_bytes += _ragged_bytes(chunk, slice(None))
        target = self._target_segment(chunk.spec, chunk.num_rows, heap_bytes)
        segment = self._open_segment(target, create=False)
        episode = np.repeat(np.array([e.id for e in episodes], np.int64), [p.num_rows for p in chunk.parts])
        index = np.concatenate(
            [np.arange(p.first_index, p.first_index + p.num_rows, dtype=np.int32) for p in chunk.parts]
        )
        rows = segment.write(
            chunk.columns,
            first_row=target.num_rows,
            heap_offset=target.heap_used,
            episode=episode,
            index=index,
            records=records,
        )
        start = 0
        for part, owner in zip(chunk.parts, episodes, strict=True):
            if part.num_rows:
                check = digest_of_checksums(rows.checksums[start : start + part.num_rows])
                self._spans.append(
                    SpanRecord(
                        episode=owner.id,
                        first_index=part.first_index,
                        segment=target.id,
                        first_row=target.num_rows + start,
                        num_rows=part.num_rows,
                        row_check=check,
                    )
                )
            start += part.num_rows
        self._written[target.id] = segment
        self._new.filling[target.spec] = replace(
            target, num_rows=target.num_rows + chunk.num_rows, heap_used=target.heap_used + rows.heap_bytes
        )

    def _records(self, chunk: Chunk, episodes: list[EpisodeRecord]) -> dict[int, bytes]:
        """For the first row of each part, a copy of what the catalog will list: from these a catalog can be rebuilt."""
        records = {}
        row = 0
        for part, episode in zip(chunk.parts, episodes, strict=True):
            if part.num_rows:
                record: RowRecord = {
                    "commit": self.number,
                    "time": self._now,
                    "writer": chunk.writer,
                    "incarnation": chunk.incarnation,
                    "seq": chunk.seq,
                    "number": part.episode,
                    "episode": episode.id,
                    "first_index": part.first_index,
                    "num_rows": part.num_rows,
                    "state": part.state,
                }
                if part.first_index == 0 or part.state != "open":
                    record["info"] = info_to_json(episode.info)
                records[row] = encode_row_record(record)
            row += part.num_rows
        return records

    def _target_segment(self, spec: StepSpec, num_rows: int, heap_bytes: int) -> SegmentRecord:
        """The segment to write these rows to; if they do not fit into the current one, it is sealed."""
        spec_id = self._spec_id(spec)
        target = self._new.filling.get(spec_id)
        if heap_bytes > MAX_HEAP_BYTES:
            raise SpecError(
                f"{heap_bytes} bytes of ragged values in one chunk, and 4 GiB is the most; commit more often"
            )
        if (
            target is not None
            and target.num_rows + num_rows <= target.capacity
            and target.heap_used + heap_bytes <= target.heap_bytes
        ):
            with suppress(DamageError):  # verify and repair report it; write no more rows to a damaged file
                self._open_segment(target, create=False)
                return target
        full = target
        capacity, heap_capacity = plan_capacity(spec, self._segment_bytes, num_rows, heap_bytes)
        target = SegmentRecord(
            id=self._new.next_segment,
            spec=spec_id,
            capacity=capacity,
            heap_bytes=heap_capacity,
            num_rows=0,
            heap_used=0,
            sealed=False,
        )
        self._open_segment(target, create=True)  # may fail: nothing is changed yet
        if full is not None:
            self._sealed.append(replace(full, sealed=True))
        self._new.next_segment += 1
        self._new.filling[spec_id] = target
        return target

    # ---- making it durable

    def record(self) -> None:
        """Sync the rows and commit the catalog's transaction. When this returns, the commit is durable."""
        catalog = self._catalog
        with catalog.transaction(write=True):
            for segment in self._sealed:
                catalog.put_segment(segment)
            for filling in _top(self._new.filling).values():
                catalog.put_segment(filling)
            for writer in _top(self._new.writers).values():
                catalog.put_last_seq(writer.id, writer.last_seq, writer.checks)
            for episode in self._changed.values():
                catalog.put_episode(episode, self._base.episodes.get((episode.writer, episode.number)))
            for span in self._spans:
                catalog.add_span(self.number, span)
            catalog.add_commit(self.number, self._now, self.num_rows)
            # The statements above stay in memory until the transaction ends, and ran while the disk wrote the rows.
            for written in self._written.values():
                written.sync()

    @property
    def written(self) -> list[Segment]:
        """The segments that rows were written to."""
        return list(self._written.values())

    @property
    def changes(self) -> bool:
        """Whether there is anything to make durable."""
        return bool(self._changed) or bool(_top(self._new.writers))

    def publish(self) -> list[int]:
        """Make the new state the store's own; returns the segments that were sealed."""
        base = self._base
        base.commit = self.number
        base.next_episode = self._new.next_episode
        base.next_segment = self._new.next_segment
        base.writers.update(_top(self._new.writers))
        base.filling.update(_top(self._new.filling))
        for key, episode in _top(self._new.episodes).items():
            if episode.state == "open":
                base.episodes[key] = episode
            else:
                base.episodes.pop(key, None)
        return [segment.id for segment in self._sealed]


def _ragged_bytes(chunk: Chunk, rows: slice) -> int:
    """How many bytes the ragged values of some rows take in the heap."""
    ragged = [chunk.columns[path][rows] for path, leaf in chunk.spec.stored_columns.items() if leaf.ragged]
    return sum(len(to_bytes(value)) + HEAP_CHECKSUM.size for column in ragged for value in column)


def _top(overlay: MutableMapping[_Key, _Record]) -> dict[_Key, _Record]:
    """The entries that this commit has changed."""
    assert isinstance(overlay, ChainMap)
    return dict(overlay.maps[0])

"""Episode parts: trim, split and merge make new episodes of stored ones, which stay as they are.

Rows are copied as they are stored. Nothing is encoded again: every frame of a new episode decodes to the pixels that it
has in the old one (encoded_columns.cut_columns). The new episode's label `trimmed_from`, `split_from` or `merged_from`
says where it comes from, such as "episode 7, steps 10 to 99"; `origins` reads it.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from understudy.codecs import encode_frames
from understudy.core import EpisodeInfo, Kind, Source, StepSpec, StoreError
from understudy.core import tree as trees
from understudy.core.episode import FPS, Column
from understudy.core.step import NO_VERSION, decoded_checksum_of, frame_number_of
from understudy.core.times import LATE_STEPS, SENSORS
from understudy.replay.format.chunk import Chunk, EpisodeState, Part
from understudy.replay.format.encoded_columns import cut_columns
from understudy.replay.format.layout import row_bytes_of
from understudy.replay.format.records import EpisodeRecord
from understudy.replay.read.reader import Reader
from understudy.replay.write.store import Store

TRIMMED_FROM = "trimmed_from"  # labels of new episodes
SPLIT_FROM = "split_from"
MERGED_FROM = "merged_from"
ORIGIN_LABELS = (TRIMMED_FROM, SPLIT_FROM, MERGED_FROM)
WHOLE_LABELS = (SENSORS, LATE_STEPS)  # counts over all of an episode, which say nothing of a part
COMMIT_BYTES = 2**30  # new episodes of together more than this are stored in several commits


@dataclass(frozen=True, kw_only=True)
class EpisodePart:
    """Steps of an episode, from `first` up to `stop` (without it)."""

    episode: int
    first: int
    stop: int

    def __str__(self) -> str:
        return f"episode {self.episode}, steps {self.first} to {self.stop - 1}"


def origins(info: EpisodeInfo) -> tuple[EpisodePart, ...]:
    """The parts of other episodes that an episode was made of, in their order; () if it was recorded or imported."""
    text = next((info.labels[label] for label in ORIGIN_LABELS if label in info.labels), "")
    found = re.findall(r"episode (\d+), steps (\d+) to (\d+)", text)
    return tuple(EpisodePart(episode=int(a), first=int(b), stop=int(c) + 1) for a, b, c in found)


def trim(store: Store, episode: int, first: int, stop: int, *, delete_source: bool = False) -> int:
    """Store the steps from `first` up to `stop` (without it) as a new episode, and return its id.

    It has the attributes of the old one. Unless it ends where the old one ended, its last step is truncated. With
    `delete_source`, the old one is then taken out of every view; `Store.restore` brings it back.
    """
    with store.maintenance_lock:
        source = _Source.read(store, episode)
        if not (0 <= first < stop <= source.num_steps and stop - first < source.num_steps):
            raise StoreError(
                f"trim: expected a part of episode {episode}, which has steps 0 to {source.num_steps - 1}, "
                f"got first {first} and stop {stop}; choose others"
            )
        new = _write(store, "trim", source.spec, [source.part(first, stop, TRIMMED_FROM)])
    if delete_source:
        store.delete([episode])
    return new[0]


def split(store: Store, episode: int, at: Sequence[int], *, delete_source: bool = False) -> list[int]:
    """Store an episode as several that follow each other, each but the first beginning with a step of `at`.

    Returns their ids. A part ends with the observation that the next one begins with, and is truncated there. Only the
    last has the old one's success. With `delete_source`, the old one is then taken out of every view.
    """
    with store.maintenance_lock:
        source = _Source.read(store, episode)
        edges = [0, *at, source.num_steps]
        if not at or any(one >= next_one for one, next_one in pairwise(edges)):
            raise StoreError(
                f"split: expected steps in order, each from 1 to {source.num_steps - 1}, because episode {episode} has "
                f"{source.num_steps} steps, got {', '.join(map(str, at)) or 'none'}; choose others"
            )
        parts = [source.part(first, stop, SPLIT_FROM) for first, stop in pairwise(edges)]
        parts = [*(replace(part, info=replace(part.info, success=None)) for part in parts[:-1]), parts[-1]]
        new = _write(store, "split", source.spec, parts)
    if delete_source:
        store.delete([episode])
    return new


def merge(store: Store, episodes: Sequence[int], *, delete_source: bool = False) -> int:
    """Store episodes that follow each other as one, and return its id. It has the attributes of the first and the
    success of the last.

    Each must begin with the observation that the one before it ended with, bit by bit: a step of the new episode never
    leads to something that did not happen. With `delete_source`, the old ones are then taken out of every view.
    """
    if len(episodes) < 2 or len(set(episodes)) < len(episodes):
        raise StoreError(f"merge: expected two episodes or more, each once, got {list(episodes)}; name others")
    with store.maintenance_lock:
        sources = [_Source.read(store, episode) for episode in episodes]
        for before, after in pairwise(sources):
            _check_follows(before, after)
        new = _write(store, "merge", sources[0].spec, [_merged(sources)])
    if delete_source:
        store.delete(episodes)
    return new[0]


@dataclass(frozen=True, kw_only=True)
class _NewEpisode:
    columns: Mapping[str, Column]  # as they are stored
    state: EpisodeState
    info: EpisodeInfo

    @property
    def num_rows(self) -> int:
        return len(self.columns["reward"])


@dataclass(frozen=True, kw_only=True)
class _Source:
    """A stored episode."""

    record: EpisodeRecord
    spec: StepSpec
    columns: Mapping[str, Column]  # as they are stored

    @staticmethod
    def read(store: Store, episode: int) -> _Source:
        with Reader(store.path) as reader:
            record = reader.record(episode)
            if record.state == "open":
                raise StoreError(f"episode {episode}: is still being recorded; wait until it has ended")
            if record.num_rows < 2:
                raise StoreError(f"episode {episode}: has no step whose outcome is known; choose another")
            record, columns = reader.stored_rows(episode)
            return _Source(record=record, spec=reader.spec(record.spec), columns=columns)

    @property
    def num_steps(self) -> int:
        """Steps whose outcome is known: the row after them is there."""
        return self.record.num_rows - 1

    @property
    def has_last_observation(self) -> bool:
        return not self.columns["is_step"][-1]

    def part(self, first: int, stop: int, label: str) -> _NewEpisode:
        """The rows of some steps, and the observation after them."""
        columns = cut_columns(self.spec, self.columns, first, stop + 1)
        at_end = stop == self.num_steps
        if not at_end:
            columns = _ended_here(self.spec, columns)
        origin = EpisodePart(episode=self.record.id, first=first, stop=stop)
        info = _info(self.record.info, label, [origin], columns["source"][: stop - first])
        return _NewEpisode(columns=columns, state=self.record.state if at_end else "ended", info=info)


def _ended_here(spec: StepSpec, columns: Mapping[str, Column]) -> dict[str, Column]:
    """The rows with the last one as the last observation, and the step before it truncated."""
    ended = dict(columns)
    for path, leaf in spec.columns.items():
        if path.partition(trees.SEPARATOR)[0] == "observation":
            continue
        column, zero = columns[path], leaf.zero()
        if leaf.codec is not None:
            made = encode_frames(leaf.codec, np.asarray(zero)[None])
            zero = np.frombuffer(made.packets[0], np.uint8)
            for name, value in ((frame_number_of(path), 0), (decoded_checksum_of(path), made.checksums[0])):
                ended[name] = np.concatenate([columns[name][:-1], np.array([value], columns[name].dtype)])
        if isinstance(column, list):
            ended[path] = [*column[:-1], zero]
        else:
            ended[path] = np.concatenate([column[:-1], np.asarray(zero, column.dtype)[None]])
    ended["policy_version"][-1] = NO_VERSION
    ended["terminated"][-2], ended["truncated"][-2] = False, True
    return ended


def _check_follows(before: _Source, after: _Source) -> None:
    """Refuse to put an episode behind one that it does not continue."""
    one, other = before.record, after.record
    seam = f"merge: episode {other.id} does not follow episode {one.id}"
    if before.spec != after.spec:
        raise StoreError(f"{seam}: their fields differ; merge episodes of one spec")
    if not before.has_last_observation:
        raise StoreError(f"{seam}: the last observation of episode {one.id} is not known; train on both as they are")
    if before.columns["terminated"][-2]:
        raise StoreError(f"{seam}: the task was terminated with the last step of episode {one.id}; leave them apart")
    for name, mine, its in (
        *((name, getattr(one.info, name), getattr(other.info, name)) for name in ("task", "instruction", "split")),
        ("kind", _kind(one.info), _kind(other.info)),
        (f"label {FPS}", one.info.labels.get(FPS), other.info.labels.get(FPS)),
    ):
        if mine != its:
            raise StoreError(f"{seam}: {name}: expected {mine!r}, got {its!r}; merge episodes of one kind and task")
    for path, leaf in before.spec.columns.items():
        if path.partition(trees.SEPARATOR)[0] != "observation":
            continue
        name = path if leaf.codec is None else decoded_checksum_of(path)
        if not trees.equal_leaf(before.columns[name][-1], after.columns[name][0]):
            raise StoreError(
                f"{seam}: {path}: expected its first observation to be the last one of episode {one.id}, bit by bit, "
                f"got another; something happened between them: train on both as they are"
            )


def _merged(sources: Sequence[_Source]) -> _NewEpisode:
    last = sources[-1]
    pieces = [
        cut_columns(source.spec, source.columns, 0, source.num_steps if source is not last else source.record.num_rows)
        for source in sources
    ]
    columns = _joined(pieces)
    seams = np.cumsum([source.num_steps for source in sources[:-1]]) - 1
    columns["truncated"][seams] = False  # it continues
    parts = [EpisodePart(episode=source.record.id, first=0, stop=source.num_steps) for source in sources]
    info = _info(sources[0].record.info, MERGED_FROM, parts, columns["source"][columns["is_step"]])
    info = replace(info, success=last.record.info.success)
    return _NewEpisode(columns=columns, state=last.record.state, info=info)


def _info(old: EpisodeInfo, label: str, parts: Sequence[EpisodePart], source: Column) -> EpisodeInfo:
    """The attributes of a new episode, with the label that says what it is made of."""
    labels = {name: value for name, value in old.labels.items() if name not in (*ORIGIN_LABELS, *WHOLE_LABELS)}
    labels[label] = "; ".join(map(str, parts))
    human = np.asarray(source) == Source.HUMAN
    if "intervention_count" in labels:
        labels["intervention_count"] = str(int((np.diff(human.astype(int), prepend=0) == 1).sum()))
        labels["intervention_steps"] = str(int(human.sum()))
    return replace(old, labels=labels, kind=_kind(old))


def _kind(info: EpisodeInfo) -> Kind:
    """A part of a correction may have no human step; if it has one, the commit makes it a correction again."""
    return "practice" if info.kind == "correction" else info.kind


# ---- storing


def _write(store: Store, writer: str, spec: StepSpec, episodes: Sequence[_NewEpisode]) -> list[int]:
    """Store new episodes, in one commit unless they are large; returns their ids."""
    pieces = [piece for number, episode in enumerate(episodes) for piece in _pieces(spec, number, episode)]
    fits = sum(_num_bytes(spec, episode.columns) for episode in episodes) <= COMMIT_BYTES
    incarnation = uuid.uuid4().hex
    record = store.begin_writer(writer, incarnation)
    for seq, group in enumerate([pieces] if fits else [[piece] for piece in pieces]):
        chunk = Chunk(
            writer=writer,
            incarnation=incarnation,
            seq=seq,
            spec=spec,
            columns=_joined([columns for _, columns in group]),
            parts=tuple(part for part, _ in group),
        )
        store.commit(chunk)
    with Reader(store.path) as reader:
        return reader.catalog.episode_ids("writer = ?", (record.id,))


def _pieces(spec: StepSpec, number: int, episode: _NewEpisode) -> Iterator[tuple[Part, Mapping[str, Column]]]:
    """The rows of an episode, in pieces of about COMMIT_BYTES."""
    num_pieces = -(-_num_bytes(spec, episode.columns) // COMMIT_BYTES)
    num_rows = -(-episode.num_rows // num_pieces)
    for first in range(0, episode.num_rows, num_rows):
        stop = min(first + num_rows, episode.num_rows)
        state: EpisodeState = episode.state if stop == episode.num_rows else "open"
        part = Part(episode=number, first_index=first, num_rows=stop - first, state=state, info=episode.info)
        yield part, cut_columns(spec, episode.columns, first, stop)


def _num_bytes(spec: StepSpec, columns: Mapping[str, Column]) -> int:
    """Of rows on disk, about."""
    ragged = [columns[path] for path, leaf in spec.stored_columns.items() if leaf.ragged]
    return row_bytes_of(spec) * len(columns["reward"]) + sum(len(value) for column in ragged for value in column)


def _joined(pieces: Sequence[Mapping[str, Column]]) -> Mapping[str, Column]:
    """Columns one below the other."""
    if len(pieces) == 1:
        return pieces[0]
    return {
        path: [value for piece in pieces for value in piece[path]]
        if isinstance(column, list)
        else np.concatenate([piece[path] for piece in pieces])
        for path, column in pieces[0].items()
    }

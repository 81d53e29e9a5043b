"""Records: the episodes, segments and writers of a catalog as values, and an episode as a row of its table."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NotRequired, TypedDict, cast

from understudy.core import DamageError, EpisodeInfo
from understudy.replay.format.chunk import EpisodeState
from understudy.replay.format.conditions import SqlRow, SqlValue
from understudy.replay.format.segment import digest, signed


@dataclass(frozen=True, kw_only=True)
class EpisodeRecord:
    """One episode in the catalog. `begun`, `changed` and `deleted` are commit numbers."""

    id: int
    writer: int
    number: int  # the writer's own number of it
    spec: int
    state: EpisodeState
    info: EpisodeInfo
    num_rows: int = 0
    num_bytes: int = 0  # of its rows and their ragged values, on disk
    num_steps: int = 0
    num_policy: int = 0
    num_human: int = 0
    num_script: int = 0
    num_random: int = 0
    total_reward: float = 0.0
    begun: int
    changed: int
    deleted: int | None = None
    purged: bool = False  # deleted, and its rows are gone from the disk
    begun_at: float
    ended_at: float | None = None


@dataclass(frozen=True)
class EpisodeTotals:
    """Sums over the episodes of one kind, deleted or not deleted."""

    kind: str
    deleted: bool
    episodes: int
    steps: int
    bytes: int
    human_steps: int
    successes: int
    success_known: int  # episodes of which success or failure is known
    open: int
    cut: int


@dataclass(frozen=True, kw_only=True)
class SegmentRecord:
    """One segment in the catalog."""

    id: int
    spec: int
    capacity: int
    heap_bytes: int
    num_rows: int
    heap_used: int
    sealed: bool


@dataclass(frozen=True, kw_only=True)
class SpanRecord:
    """Rows of one episode that lie next to each other in one segment."""

    episode: int
    first_index: int  # of the first row, in its episode
    segment: int
    first_row: int  # in the segment
    num_rows: int
    row_check: int  # digest_of_checksums of the rows


class RowRecord(TypedDict):
    """What stands beside the first row of a span, in the heap of its segment: enough to rebuild the catalog."""

    commit: int
    time: float
    writer: str
    incarnation: str
    seq: int
    number: int  # the writer's own number of the episode
    episode: int
    first_index: int
    num_rows: int
    state: EpisodeState
    info: NotRequired[dict[str, Any]]  # with the first rows of an episode, and the last


def encode_row_record(record: RowRecord) -> bytes:
    return json.dumps(record, ensure_ascii=False, separators=(",", ":")).encode()


def decode_row_record(content: bytes) -> RowRecord | None:
    """The record; None if repair has blanked it."""
    record = json.loads(content)
    return cast(RowRecord, record) if record else None


@dataclass(frozen=True, kw_only=True)
class WriterRecord:
    """One incarnation of a writer in the catalog."""

    id: int
    name: str
    incarnation: str
    last_seq: int
    checks: tuple[int, ...] = ()  # Chunk.check of its last chunks, the newest last; empty if they are not known

    def followed_by(self, seq: int, check: int | None) -> WriterRecord:
        """The record after one more chunk."""
        checks = () if check is None else (*self.checks, check)[-KEPT_CHECKS:]
        return replace(self, last_seq=seq, checks=checks)

    def has_other(self, seq: int, check: int | None) -> bool:
        """Whether the stored chunk of this number is known to be another one than that with this checksum."""
        if check is None or not self.checks:
            return False
        age = self.last_seq - seq
        return age >= len(self.checks) or self.checks[-1 - age] != check


KEPT_CHECKS = 8  # of each writer; more than a writer sends without an acknowledgement
_CHECK_BYTES = 8


def encode_checks(checks: Sequence[int]) -> bytes:
    return b"".join(check.to_bytes(_CHECK_BYTES, "little") for check in checks)


def decode_checks(content: bytes | None = None) -> tuple[int, ...]:
    content = content or b""
    starts = range(0, len(content) - _CHECK_BYTES + 1, _CHECK_BYTES)
    return tuple(int.from_bytes(content[start : start + _CHECK_BYTES], "little") for start in starts)


SEGMENT_FIELDS = tuple(item.name for item in fields(SegmentRecord))
_INFO_COLUMNS = {
    "task": "task",
    "instruction": "instruction",
    "init_state": "init_state",
    "seed": "seed",
    "group": "group_key",
    "actor": "actor",
    "operator": "operator",
    "split": "split",
    "kind": "kind",
}
_PLAIN = tuple(item.name for item in fields(EpisodeRecord) if item.name not in ("info", "purged"))
EPISODE_COLUMNS = (*_PLAIN, "purged", *_INFO_COLUMNS.values(), "success", "labels", "row_check")


def encode_episode(episode: EpisodeRecord) -> list[SqlValue]:
    """The values of its row; the last is the checksum of the others."""
    info = episode.info
    values: list[SqlValue] = [getattr(episode, name) for name in _PLAIN]
    values.append(int(episode.purged))
    values.extend(getattr(info, name) for name in _INFO_COLUMNS)
    values.append(None if info.success is None else int(info.success))
    values.append(json.dumps(info.labels, sort_keys=True, ensure_ascii=False))
    values.append(_row_checksum(values))
    return values


ATTRIBUTE_COLUMNS = ("state", *_INFO_COLUMNS.values(), "success", "labels")


def attribute_values(state: EpisodeState, info: EpisodeInfo) -> list[SqlValue]:
    """The values of the attribute columns of an episode's row."""
    return [
        state,
        *(getattr(info, name) for name in _INFO_COLUMNS),
        None if info.success is None else int(info.success),
        json.dumps(info.labels, sort_keys=True, ensure_ascii=False),
    ]


def decode_episode(row: SqlRow, path: Path, *, check: bool = True) -> EpisodeRecord:
    if check and _row_checksum(row[:-1]) != row[-1]:
        raise DamageError(f"{path}: episode {row[0]} is not as it was written; run `understudy repair`")
    values = dict(zip(EPISODE_COLUMNS, row, strict=True))
    info = EpisodeInfo(
        **{name: values[column] for name, column in _INFO_COLUMNS.items()},
        success=None if values["success"] is None else bool(values["success"]),
        labels=json.loads(values["labels"]),
    )
    return EpisodeRecord(**{name: values[name] for name in _PLAIN}, purged=bool(values["purged"]), info=info)


def editable_fields(episode: EpisodeRecord) -> tuple[EpisodeState, int | None, dict[str, Any]]:
    """State, deletion and attributes: what an edit may change and a view may ask for."""
    return episode.state, episode.deleted, info_to_json(episode.info)


def _row_checksum(values: Sequence[SqlValue]) -> int:
    return signed(digest(repr(tuple(values)).encode()))


def info_to_json(info: EpisodeInfo) -> dict[str, Any]:
    """The attributes that are not at their defaults."""
    found = {name: getattr(info, name) for name in _INFO_DEFAULTS}
    return {name: value for name, value in found.items() if value != _INFO_DEFAULTS[name]}


_INFO_DEFAULTS = {item.name: getattr(EpisodeInfo(), item.name) for item in fields(EpisodeInfo)}


def info_from_json(value: Mapping[str, Any]) -> EpisodeInfo:
    return EpisodeInfo(**value)


def with_labels(episode: EpisodeRecord, labels: Mapping[str, str | None], commit: int) -> EpisodeRecord:
    """The episode with labels set, or removed where the value is None."""
    merged = {**episode.info.labels, **labels}
    kept = {name: value for name, value in merged.items() if value is not None}
    return replace(episode, info=replace(episode.info, labels=kept), changed=commit)

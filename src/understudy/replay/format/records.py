"""Records: what the catalog says of episodes, segments and writers, and how an episode becomes a row and comes back."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from understudy.core import DamageError, EpisodeInfo
from understudy.replay.format.chunk import State
from understudy.replay.format.segment import digest, signed


@dataclass(frozen=True, kw_only=True)
class EpisodeRecord:
    """What the catalog says of one episode. `begun`, `changed` and `deleted` are commit numbers."""

    id: int
    writer: int
    number: int  # the writer's own number of it
    spec: int
    state: State
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
    judged: int  # episodes of which success or failure is known
    open: int
    cut: int


@dataclass(frozen=True, kw_only=True)
class SegmentRecord:
    """What the catalog says of one segment."""

    id: int
    spec: int
    capacity: int
    heap_bytes: int
    num_rows: int
    heap_used: int
    sealed: bool


@dataclass(frozen=True, kw_only=True)
class WriterRecord:
    """What the catalog says of one incarnation of a writer."""

    id: int
    name: str
    incarnation: str
    last_seq: int


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


def encode_episode(episode: EpisodeRecord) -> list[Any]:
    """The values of its row, the check of the others last."""
    info = episode.info
    values = [getattr(episode, name) for name in _PLAIN]
    values.append(int(episode.purged))
    values.extend(getattr(info, name) for name in _INFO_COLUMNS)
    values.append(None if info.success is None else int(info.success))
    values.append(json.dumps(info.labels, sort_keys=True, ensure_ascii=False))
    values.append(_row_check(values))
    return values


ATTRIBUTE_COLUMNS = ("state", *_INFO_COLUMNS.values(), "success", "labels")


def attribute_values(state: State, info: EpisodeInfo) -> list[Any]:
    """What stands in the attribute columns of an episode's row."""
    return [
        state,
        *(getattr(info, name) for name in _INFO_COLUMNS),
        None if info.success is None else int(info.success),
        json.dumps(info.labels, sort_keys=True, ensure_ascii=False),
    ]


def decode_episode(row: Sequence[Any], path: Path, *, check: bool = True) -> EpisodeRecord:
    if check and _row_check(row[:-1]) != row[-1]:
        raise DamageError(f"{path}: episode {row[0]} is not as it was written; run `understudy repair`")
    values = dict(zip(EPISODE_COLUMNS, row, strict=True))
    info = EpisodeInfo(
        **{name: values[column] for name, column in _INFO_COLUMNS.items()},
        success=None if values["success"] is None else bool(values["success"]),
        labels=json.loads(values["labels"]),
    )
    return EpisodeRecord(**{name: values[name] for name in _PLAIN}, purged=bool(values["purged"]), info=info)


def said(episode: EpisodeRecord) -> tuple[State, int | None, dict[str, Any]]:
    """What of an episode a view may ask for and an edit may change."""
    return episode.state, episode.deleted, info_to_json(episode.info)


def _row_check(values: Sequence[Any]) -> int:
    return signed(digest(repr(tuple(values)).encode()))


def info_to_json(info: EpisodeInfo) -> dict[str, Any]:
    """The attributes that are not at their defaults."""
    found = {name: getattr(info, name) for name in _INFO_DEFAULTS}
    return {name: value for name, value in found.items() if value != _INFO_DEFAULTS[name]}


_INFO_DEFAULTS = {item.name: getattr(EpisodeInfo(), item.name) for item in fields(EpisodeInfo)}


def info_from_json(value: Mapping[str, Any]) -> EpisodeInfo:
    return EpisodeInfo(**value)


def with_labels(episode: EpisodeRecord, labels: Mapping[str, str | None], commit: int) -> EpisodeRecord:
    """The episode with labels set, or taken off where the value is None."""
    merged = {**episode.info.labels, **labels}
    kept = {name: value for name, value in merged.items() if value is not None}
    return replace(episode, info=replace(episode.info, labels=kept), changed=commit)

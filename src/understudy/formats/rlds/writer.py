"""RldsWriter: writes Episodes as RLDS for TensorFlow Datasets.

Everything is written into a directory beside the final one, which gets its name when all is on disk. What RLDS has no
field for stands in `steps/understudy` and `episode_metadata/understudy`, which other readers pass over.
"""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from understudy.core import NO_VERSION, ArraySpec, Episode, SpecError, StepSpec
from understudy.core import tree as trees
from understudy.core.episode import Column
from understudy.formats.atomic_dataset import publish_dataset
from understudy.formats.format import FormatError
from understudy.formats.rlds.columns import encode_column, leaf_of
from understudy.formats.rlds.dataset import FEATURES_FILE, INFO_FILE, SPEC_FILE, TEMPLATE, shard_name
from understudy.formats.rlds.example import serialize
from understudy.formats.rlds.features import Leaf, features_json
from understudy.formats.rlds.images import QUALITY
from understudy.formats.rlds.plan import EXTRAS, METADATA, UNDERSTUDY
from understudy.formats.rlds.records import RecordWriter, write_records

_SPLITS = {"train": "train", "eval": "test"}  # our split: its name in TensorFlow Datasets


@dataclass(frozen=True, kw_only=True)
class WriteOptions:
    file_format: str = "tfrecord"
    images: str = "png"  # or jpeg (lossy), or bytes
    shard_mb: int = 512  # size of a shard


class RldsWriter:
    """Writes one dataset."""

    def __init__(self, path: Path, spec: StepSpec, options: WriteOptions):
        if path.exists():
            raise FormatError(f"{path}: already exists; choose another path, or remove it")
        self._path = path
        self._spec = spec
        self._options = options
        self._name, self._version = _name_and_version(path)
        self._leaves = _leaves(spec, options.images)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._partial = path.parent / f".{path.name}.{uuid.uuid4().hex[:8]}.partial"
        self._partial.mkdir()
        self._shards: dict[str, _Shards] = {}
        self._reordered = False

    @property
    def notes(self) -> tuple[str, ...]:
        lossy = [path for path, leaf in self._leaves.items() if leaf.encoding == "jpeg"]
        images = (
            f"{', '.join(lossy)}: written as JPEG, quality {QUALITY}, which is lossy; "
            f"`rlds:{self._path}?images=png` is exact"
        )
        order = "evaluation episodes come after training episodes, in a split of their own"
        return (images,) * bool(lossy) + (order,) * self._reordered

    def add(self, key: str, episode: Episode) -> None:
        flat = {"episode_metadata/episode_id": [key.encode()], METADATA: [json.dumps(asdict(episode.info)).encode()]}
        fields: dict[str, Any] = dict(flat)
        for path, column in _columns(self._spec, episode).items():
            fields |= encode_column(f"steps/{path}", self._leaves[path], column)
        split = _SPLITS[episode.info.split]
        self._reordered |= split == _SPLITS["train"] and _SPLITS["eval"] in self._shards
        if split not in self._shards:
            self._shards[split] = _Shards(partial(self._begin, split), self._options.shard_mb * 10**6)
        self._shards[split].write(serialize(fields))

    def _begin(self, split: str, number: int) -> RecordWriter:
        return write_records(self._partial / f"{split}-{number}", self._options.file_format)

    def close(self) -> None:
        """Rename the shards, write the descriptions, and publish the dataset."""
        try:
            splits = [self._finish(split, shards) for split, shards in self._shards.items()]
            info = {
                "name": self._name,
                "version": self._version,
                "fileFormat": self._options.file_format,
                "description": "Written by Understudy.",
                "splits": splits,
            }
            of_step: Any = trees.unflatten(self._leaves)
            of_episode = {"episode_metadata": {"episode_id": Leaf(kind="text"), UNDERSTUDY: Leaf(kind="text")}}
            self._write(INFO_FILE, info)
            self._write(FEATURES_FILE, features_json(of_step, of_episode))
            self._write(SPEC_FILE, {"spec": self._spec.to_json()})
            publish_dataset(self._partial, self._path)
        except BaseException:
            self.abandon()
            raise

    def _finish(self, split: str, shards: _Shards) -> dict[str, Any]:
        shards.close()
        lengths = shards.lengths
        for number in range(len(lengths)):
            name = shard_name(TEMPLATE, self._name, split, self._options.file_format, number, len(lengths))
            (self._partial / f"{split}-{number}").rename(self._partial / name)
        return {
            "name": split,
            "filepathTemplate": TEMPLATE,
            "shardLengths": [str(length) for length in lengths],
            "numBytes": str(shards.num_bytes),
        }

    def _write(self, name: str, content: Mapping[str, Any]) -> None:
        (self._partial / name).write_text(json.dumps(content, indent=2), encoding="utf-8")

    def abandon(self) -> None:
        for shards in self._shards.values():
            shards.close()
        shutil.rmtree(self._partial, ignore_errors=True)


class _Shards:
    """Records of one split, in files of a bounded size."""

    def __init__(self, begin: Callable[[int], RecordWriter], max_bytes: int):
        self._begin = begin
        self._most_bytes = max_bytes
        self._writer: RecordWriter | None = None
        self._in_shard = 0
        self.lengths: list[int] = []
        self.num_bytes = 0

    def write(self, record: bytes) -> None:
        if self._writer is None or self._in_shard + len(record) > self._most_bytes:
            self.close()
            self._writer = self._begin(len(self.lengths))
            self._in_shard = 0
            self.lengths.append(0)
        self._writer.write(record)
        self._in_shard += len(record)
        self.num_bytes += len(record)
        self.lengths[-1] += 1

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def _leaves(spec: StepSpec, images: str) -> dict[str, Leaf]:
    """How each field of a step is written, by its path in RLDS."""
    flag = ArraySpec(shape=(), dtype="bool")
    leaves = {
        **dict(spec.observation.leaves("observation")),
        **dict(spec.action.leaves("action")),
        **dict(spec.extras.leaves(EXTRAS)),
        **dict(spec.action.leaves(f"{UNDERSTUDY}/proposal")),
        "reward": spec.reward,
        "discount": ArraySpec(shape=(), dtype="float32"),
        "is_first": flag,
        "is_last": flag,
        "is_terminal": flag,
        "language_instruction": ArraySpec(shape=(), dtype="str"),
        f"{UNDERSTUDY}/source": ArraySpec(shape=(), dtype="uint8"),
        f"{UNDERSTUDY}/policy_version": ArraySpec(shape=(), dtype="int64"),
        f"{UNDERSTUDY}/has_proposal": flag,
        f"{UNDERSTUDY}/truncated": flag,
    }
    return {path: leaf_of(leaf, images) for path, leaf in leaves.items()}


def _columns(spec: StepSpec, episode: Episode) -> dict[str, Column]:
    """T+1 rows of each field; the last row is zero except for the observation and the flags."""
    given = episode.columns()
    length = len(episode)
    try:
        for path, leaf in spec.columns.items():
            if path != "is_step" and path not in given:
                raise SpecError(f"{path}: expected {leaf}, got nothing; write each spec into a dataset of its own")
    except SpecError as error:
        raise FormatError(str(error)) from None
    columns: dict[str, Column] = {}
    for path, leaf in spec.columns.items():
        top = path.partition("/")[0]
        if top == "observation":
            columns[path] = given[path]
        elif top in ("action", EXTRAS, "reward"):
            columns[path] = _with_zero(given[path], leaf)
        elif top in ("proposal", "source", "has_proposal", "truncated"):
            columns[f"{UNDERSTUDY}/{path}"] = _with_zero(given[path], leaf)
    terminated = bool(episode.terminated[-1])
    ended = terminated or bool(episode.truncated[-1])
    at = np.arange(length + 1)
    columns |= {
        f"{UNDERSTUDY}/policy_version": np.append(given["policy_version"], NO_VERSION),
        "discount": np.where((at >= length - 1) & terminated, 0, 1).astype(np.float32),
        "is_first": at == 0,
        "is_last": (at == length) & ended,
        "is_terminal": (at == length) & terminated,
        "language_instruction": [episode.info.instruction or ""] * (length + 1),
    }
    return columns


def _with_zero(column: Column, leaf: ArraySpec) -> Column:
    if isinstance(column, list):
        return [*column, leaf.zero()]
    return np.concatenate([column, np.zeros((1, *column.shape[1:]), column.dtype)])


def _name_and_version(path: Path) -> tuple[str, str]:
    """`kitchen/1.0.0` is version 1.0.0 of kitchen; any other name gets version 1.0.0."""
    parts = path.name.split(".")
    if len(parts) == 3 and all(part.isdigit() for part in parts) and path.resolve().parent.name:
        return _plain(path.resolve().parent.name), path.name
    return _plain(path.name), "1.0.0"


def _plain(name: str) -> str:
    """A name with only letters, digits and underscores, as TensorFlow Datasets requires."""
    plain = "".join(letter if letter.isascii() and letter.isalnum() else "_" for letter in name.lower())
    return plain if plain[:1].isalpha() else f"d_{plain}"

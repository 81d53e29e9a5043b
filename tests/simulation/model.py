"""Model: what a history has promised, and whether a store keeps it.

Every row says which episode it belongs to and where in it, and all its values follow from these two numbers. So a store
can be checked without a copy of what was written: a row is right, in its place, and there once, or it is not.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from understudy.core import EpisodeInfo, Step, StepSpec
from understudy.core.spec import ArraySpec, Spec, text
from understudy.replay import EpisodeRecord, Reader

_ID = ArraySpec(shape=(2,), dtype="int64")  # episode, index
_ACTION = Spec(ArraySpec(shape=(2,), dtype="float32"))
SPECS = {
    # With a field large enough for checksums of its own.
    "arm": StepSpec(
        observation=Spec({"id": _ID, "camera": ArraySpec(shape=(20, 20, 3), dtype="uint8")}), action=_ACTION
    ),
    # With ragged fields.
    "chat": StepSpec(
        observation=Spec({"id": _ID, "prompt": text(), "tokens": ArraySpec(shape=(None,), dtype="int32")}),
        action=_ACTION,
    ),
}


def observation(spec: str, number: int, index: int) -> dict[str, Any]:
    if spec == "arm":
        return {"id": np.array([number, index]), "camera": np.full((20, 20, 3), (31 * number + index) % 251, np.uint8)}
    return {
        "id": np.array([number, index]),
        "prompt": f"{number}:{index}" * (index % 3),
        "tokens": np.arange(index % 5, dtype=np.int32),
    }


def step(spec: str, number: int, index: int, *, last: bool = False) -> Step:
    return Step(
        observation=observation(spec, number, index),
        action=np.array([number, index], np.float32),
        reward=float(index % 5),
        terminated=last,
    )


def wrong_values(spec: str, columns: Mapping[str, Any]) -> bool:
    """Whether rows do not hold what their ids say."""
    ids = np.asarray(columns["observation/id"])
    numbers, indices = ids[:, 0], ids[:, 1]
    is_step = np.asarray(columns["is_step"])
    action = np.stack([numbers, indices], axis=1).astype(np.float32)
    wrong = (np.asarray(columns["action"])[is_step] != action[is_step]).any()
    wrong |= (np.asarray(columns["reward"])[is_step] != (indices % 5)[is_step]).any()
    if spec == "arm":
        value = ((31 * numbers + indices) % 251).astype(np.uint8)
        wrong |= (np.asarray(columns["observation/camera"]) != value[:, None, None, None]).any()
    else:
        for number, index, prompt, tokens in zip(
            numbers, indices, columns["observation/prompt"], columns["observation/tokens"], strict=True
        ):
            wrong |= prompt != f"{number}:{index}" * (index % 3) or not np.array_equal(tokens, np.arange(index % 5))
    return bool(wrong)


@dataclass
class EpisodeModel:
    """What is known of one episode. An index counts the steps that a writer was given, also those that it refused."""

    spec: str
    num_given: int = 0
    held: list[int] = field(default_factory=list)  # taken by the writer
    promised: set[int] = field(default_factory=set)  # acknowledged, or recorded in a spool: they are never lost
    stored: set[int] = field(default_factory=set)  # acknowledged by the store: they are in every later backup
    ended: bool = False  # the last observation is among `held`


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """What a backup must have: the store may get another history after it."""

    stored: dict[int, frozenset[int]]  # rows by episode
    batches: tuple[tuple[str, str, str], ...]  # those that were drawn before it


@dataclass
class Model:
    """All promises of a history."""

    episodes: dict[int, EpisodeModel] = field(default_factory=dict)
    deleted: dict[int, bool | None] = field(default_factory=dict)  # by the store's id; None: asked for, and not known
    labels: dict[int, str | None] = field(default_factory=dict)  # likewise
    last_commit: int = 0
    batches: list[tuple[str, str, str]] = field(default_factory=list)  # spec, record and digest of a batch
    versions: dict[int, int] = field(default_factory=dict)  # content by version of parameters
    last_version: int = 0  # acknowledged
    asked: set[int] = field(default_factory=set)  # edited by requests, which are carried out at some time

    def snapshot(self) -> Snapshot:
        stored = {number: frozenset(episode.stored) for number, episode in self.episodes.items()}
        return Snapshot(stored=stored, batches=tuple(self.batches))

    def restored(self, reader: Reader, snapshot: Snapshot) -> None:
        """A backup has become the store: promises that were made after it are void."""
        for number, episode in self.episodes.items():
            stored = snapshot.stored.get(number, frozenset())
            episode.promised, episode.stored = set(stored), set(stored)
            episode.ended = False
        self.last_commit = reader.last_commit()
        self.deleted = {record.id: None for record in reader.episodes("1")}
        self.labels = dict(self.deleted)
        self.batches = [batch for batch in snapshot.batches if json.loads(batch[1])["commit"] <= self.last_commit]
        self.versions, self.last_version = {}, 0

    def begin(self, spec: str) -> int:
        number = len(self.episodes) + 1
        self.episodes[number] = EpisodeModel(spec)
        return number

    def info(self, number: int) -> EpisodeInfo:
        return EpisodeInfo(seed=number, task="simulated", kind="demonstration" if number % 3 == 0 else "practice")

    # ---- checks

    def problems(self, reader: Reader) -> Iterator[str]:
        """What a store does not keep of the promises."""
        if reader.last_commit() < self.last_commit:
            yield f"commit {self.last_commit} was acknowledged, and the store ends with {reader.last_commit()}"
        found: dict[int, dict[int, EpisodeRecord]] = {}  # by episode and index
        gone: set[int] = set()
        for record in reader.episodes("1"):
            number = int(record.info.seed or 0)
            if number not in self.episodes:
                yield f"episode {record.id}: nobody wrote it ({record})"
                continue
            yield from self._record_problems(record)
            if record.purged:
                gone.add(number)
                continue
            yield from self._row_problems(reader, record, number, found.setdefault(number, {}))
        for number, episode in self.episodes.items():
            missing = sorted(episode.promised - found.get(number, {}).keys())
            if missing and number not in gone:
                yield f"episode {number}: rows {missing} were promised and are not there"
            elif episode.ended and max(episode.held) in episode.promised and number not in gone:
                state = found[number][max(episode.held)].state
                if state != "ended":
                    yield f"episode {number}: it ended, and the store says {state}"

    def _record_problems(self, record: EpisodeRecord) -> Iterator[str]:
        wanted = self.deleted.get(record.id, False)
        if wanted is not None and wanted != (record.deleted is not None):
            yield f"episode {record.id}: expected deleted={wanted}, got {record.deleted}"
        label = self.labels.get(record.id, "")
        if label is not None and record.info.labels.get("note", "") != label:
            yield f"episode {record.id}: expected the label {label!r}, got {record.info.labels}"
        if record.purged and record.id not in self.deleted:
            yield f"episode {record.id}: its rows are gone, and nobody deleted it"

    def _row_problems(
        self, reader: Reader, record: EpisodeRecord, number: int, found: dict[int, EpisodeRecord]
    ) -> Iterator[str]:
        _, columns = reader.rows(record.id)
        ids = np.asarray(columns["observation/id"])
        where = f"episode {record.id}, written as {number}"
        if (ids[:, 0] != number).any() or (np.diff(ids[:, 1]) != 1).any():
            yield f"{where}: rows are out of order or of another episode: {ids.tolist()}"
        if wrong_values(self.episodes[number].spec, columns):
            yield f"{where}: rows are not what was written"
        for index in ids[:, 1].tolist():
            if index in found:
                yield f"{where}: row {index} is there twice"
            if index >= self.episodes[number].num_given:
                yield f"{where}: row {index} was never written"
            found[index] = record

    def check_batch(self, spec: str, batch: Any) -> Iterator[str]:
        """Whether transitions are of rows that follow each other."""
        before, after = np.asarray(batch.observation["id"]), np.asarray(batch.next_observation["id"])
        action = np.asarray(batch.action)
        good = (before[:, 0] == after[:, 0]) & (before[:, 1] + 1 == after[:, 1])
        good &= (action[:, 0] == before[:, 0]) & (action[:, 1] == before[:, 1])
        if not good.all():
            row = int(np.argmin(good))
            yield f"a batch has a transition from {before[row]} to {after[row]} with action {action[row]}"
        for number in np.unique(before[:, 0]).tolist():
            if number not in self.episodes or self.episodes[number].spec != spec:
                yield f"a batch has a step of episode {number}, which is not there"


def digest(batch: Any) -> str:
    """The bits of a batch."""
    state = hashlib.sha1(usedforsecurity=False)
    for values in (batch.observation["id"], batch.next_observation["id"], batch.action, batch.reward):
        state.update(np.ascontiguousarray(values).tobytes())
    return state.hexdigest()

"""Which trajectories a store has, read from the labels of their episodes."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from understudy.compat.rlinf.trajectory import Layout, ParsedTrajectory
from understudy.core import StepSpec
from understudy.replay import Reader

WRITER = "rlinf"
COMPLETE = {"complete": "yes"}  # label of a trajectory's last episode: the trajectory is whole if it is there


@dataclass(kw_only=True)
class StoredTrajectory:
    """A trajectory in the store. Its copies in other stores have the same `key`."""

    key: str
    trajectory_id: int
    layout: Layout
    shape: tuple[int, ...]  # of rewards or prev_logprobs; empty if a version stored it that did not keep it
    num_steps: int = 0
    max_episode_length: int = 0
    model_weights_id: str = ""
    episodes: list[int] = field(default_factory=list)  # empty until it is written
    complete: bool = False
    deleted: bool = False

    def entry(self) -> dict[str, Any]:
        """Its entry in RLinf's index."""
        return {
            "num_samples": self.num_steps,
            "trajectory_id": self.trajectory_id,
            "max_episode_length": self.max_episode_length,
            "shape": list(self.shape),
            "model_weights_id": self.model_weights_id,
        }

    @staticmethod
    def of(trajectory: ParsedTrajectory, key: str, trajectory_id: int) -> StoredTrajectory:
        return StoredTrajectory(
            key=key,
            trajectory_id=trajectory_id,
            layout=trajectory.layout,
            shape=trajectory.shape,
            num_steps=trajectory.num_steps,
            max_episode_length=_int(trajectory.labels.get("max_episode_length")),
            model_weights_id=trajectory.labels.get("model_weights_id", ""),
        )

    def last_labels(self, trajectory: ParsedTrajectory) -> dict[str, str]:
        """The labels of its last episode, from which all this is read again."""
        return {
            **COMPLETE,
            "trajectory_id": str(self.trajectory_id),
            "shape": json.dumps(self.shape),
            "layout": self.layout.to_json(),
            "values": json.dumps(trajectory.values),
        }


def read_trajectories(reader: Reader, after: int = 0) -> list[StoredTrajectory]:
    """The trajectories after an episode, the oldest first, without those whose rows were purged."""
    found: dict[str, StoredTrajectory] = {}
    for record in reader.episodes("id > ? and actor = ? and not purged", (after, WRITER)):
        labels = record.info.labels
        trajectory = found.get(str(record.info.group))
        if trajectory is None:
            trajectory = found[str(record.info.group)] = StoredTrajectory(
                key=labels.get("trajectory", ""),
                trajectory_id=-1,
                layout=_layout_of_spec(reader.spec(record.spec)),
                shape=(),
                max_episode_length=_int(labels.get("max_episode_length")),
                model_weights_id=labels.get("model_weights_id", ""),
            )
        trajectory.episodes.append(record.id)
        trajectory.num_steps += record.num_rows - 1
        trajectory.deleted |= record.deleted is not None
        if COMPLETE.items() <= labels.items():
            trajectory.complete = True
            if "layout" in labels:
                trajectory.layout = _layout(labels["layout"])
                trajectory.shape = tuple(json.loads(labels["shape"]))
                trajectory.trajectory_id = _int(labels["trajectory_id"])
    next_id = 0
    for trajectory in found.values():  # those of a version that gave no numbers get them in their order
        if trajectory.trajectory_id < 0:
            trajectory.trajectory_id = next_id
        if not trajectory.deleted:
            next_id = max(next_id, trajectory.trajectory_id + 1)
    return [*found.values()]


@lru_cache(maxsize=256)
def _layout(text: str) -> Layout:
    return Layout.from_json(json.loads(text))


@lru_cache(maxsize=256)
def _layout_of_spec_text(text: str) -> Layout:
    return Layout.of_spec(StepSpec.from_json(json.loads(text)))


def _layout_of_spec(spec: StepSpec) -> Layout:
    return _layout_of_spec_text(spec.json_text)


def _int(text: str | None) -> int:
    try:
        return int(text or 0)
    except ValueError:
        return 0

"""RobomimicWriter: writes Episodes as a file that robomimic's SequenceDataset reads.

understudy/spec         the spec, as JSON
data                    attrs: env_args, total
  demo_0                attrs: num_samples
    obs, next_obs       a dataset for each field
    actions             [T, n] numbers; where an action is a tree, its numbers side by side
    rewards, dones      dones: terminated
    understudy          fields that robomimic does not have; `about`: the key and the attributes
mask                    train, valid: the names of their demos
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import h5py  # type: ignore[import-untyped]
import numpy as np

from understudy.core import Episode, StepSpec, UnderstudyError
from understudy.core import tree as trees
from understudy.core.episode import Column
from understudy.formats.atomic_dataset import publish_dataset
from understudy.formats.format import FormatError
from understudy.formats.hdf5.columns import datasets_of

UNDERSTUDY = "understudy"
SPEC, ABOUT = f"{UNDERSTUDY}/spec", f"{UNDERSTUDY}/about"  # JSON, of the file and of a demonstration
BARE = "obs"  # the name of an observation that is one array
MASKS = {"train": "train", "eval": "valid"}  # split: robomimic's mask
GYM = 2  # robomimic's number for environments of Gym


class RobomimicWriter:
    def __init__(self, path: Path, spec: StepSpec, *, compression: str | None):
        if path.exists():
            raise FormatError(f"{path}: already exists; choose another path, or remove it")
        for name in spec.columns:
            if "\0" in name or "." in name.split(trees.SEPARATOR):
                raise FormatError(f"{name!r}: HDF5 does not allow this name; rename the field")
        self._path, self._spec, self._compression = path, spec, compression
        path.parent.mkdir(parents=True, exist_ok=True)
        self._partial = path.parent / f".{path.name}.{uuid.uuid4().hex[:8]}.partial"
        self._file = h5py.File(self._partial, "w-")
        self._file[SPEC] = _bytes(spec.json_text)
        self._data = self._file.create_group("data", track_order=True)
        self._masks: dict[str, list[str]] = {}
        self._task = "understudy"
        self._num_steps = 0

    def add(self, key: str, episode: Episode) -> None:
        try:
            Episode.from_steps(self._spec, list(episode.steps()), episode.last_observation, episode.info)
        except UnderstudyError as error:
            raise FormatError(f"{key}: {error}; write each spec into a file of its own") from None
        name = f"demo_{len(self._data)}"
        demo = self._data.create_group(name)
        demo.attrs["num_samples"] = len(episode)
        demo[ABOUT] = _bytes(json.dumps({"key": key, "info": asdict(episode.info)}))
        for path, data in _datasets(self._spec, episode):
            packed = self._compression if data.ndim and data.size else None
            demo.create_dataset(path, data=data, compression=packed)
        self._masks.setdefault(MASKS[episode.info.split], []).append(name)
        self._task = episode.info.task or self._task
        self._num_steps += len(episode)

    def close(self) -> None:
        try:
            self._data.attrs["total"] = self._num_steps
            env = {"env_name": self._task, "type": GYM, "env_kwargs": {}}
            self._data.attrs["env_args"] = json.dumps(env)
            for mask, demos in self._masks.items():
                self._file.create_dataset(f"mask/{mask}", data=np.array(demos, "S"))
            self._file.close()
            publish_dataset(self._partial, self._path)
        except BaseException:
            self.abandon()
            raise

    def abandon(self) -> None:
        self._file.close()
        self._partial.unlink(missing_ok=True)


def _datasets(spec: StepSpec, episode: Episode) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    """The datasets of an episode by name."""
    columns = episode.columns()

    def written(start: str, name: str, leaf: Any, column: Column) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
        for part, data in datasets_of(leaf, column).items():
            yield trees.join(trees.join(start, name), part), data

    for path, leaf in spec.observation.leaves():
        column = columns[trees.join("observation", path)]
        yield from written("obs", path or BARE, leaf, column[:-1])
        yield from written("next_obs", path or BARE, leaf, column[1:])
    yield "actions", _side_by_side(spec, columns)
    yield "rewards", episode.reward.reshape(len(episode), -1).sum(1) if episode.reward.ndim > 1 else episode.reward
    yield "dones", episode.terminated.astype(np.uint8)
    for path, leaf in spec.columns.items():
        if path != "is_step" and not path.startswith("observation"):
            yield from written(UNDERSTUDY, path, leaf, columns[path])


def _bytes(text: str) -> np.ndarray[Any, Any]:
    """Text as an array of bytes: attributes are limited to 64 kB, and text in HDF5 ends at the first NUL."""
    return np.frombuffer(text.encode(), np.uint8)


def _side_by_side(spec: StepSpec, columns: dict[str, Column]) -> np.ndarray[Any, Any]:
    """The actions as robomimic stores them: one array [T, n]."""
    fixed = [columns[path] for path, leaf in spec.action.leaves("action") if not leaf.ragged]
    flat = [column.reshape(len(column), -1) for column in fixed]
    if len(flat) == 1:
        return np.asarray(flat[0])
    num_steps = len(columns["reward"])
    return np.concatenate([np.empty((num_steps, 0), np.float32), *flat], axis=1).astype(np.float32)

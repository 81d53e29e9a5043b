"""HilSerlWriter: writes Episodes as pickles of transitions that HIL-SERL can load."""

from __future__ import annotations

import json
import shutil
import uuid
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

import numpy as np

from understudy.core import Episode, Source, Step, StepSpec, UnderstudyError
from understudy.core import tree as trees
from understudy.core.tree import AnyTree, Tree
from understudy.formats.atomic_dataset import publish_dataset
from understudy.formats.format import FormatError
from understudy.formats.hil_serl.values import GRASP_PENALTY, UNDERSTUDY
from understudy.formats.safe_pickle.write import BEGIN, BEGIN_NEXT, END, END_BATCH, dump_item

BATCH = 1000  # items that a reader has on its stack at a time


class HilSerlWriter:
    """Writes one file if the path ends in .pkl, otherwise a directory of transitions_N.pkl (N: transitions so far)."""

    def __init__(self, path: Path, spec: StepSpec, *, steps_per_file: int, stack: str):
        if path.exists():
            raise FormatError(f"{path}: already exists; choose another path, or remove it")
        self._path, self._spec, self._stack = path, spec, stack
        self._steps_per_file = steps_per_file
        path.parent.mkdir(parents=True, exist_ok=True)
        self._partial = path.parent / f".{path.name}.{uuid.uuid4().hex[:8]}.partial"
        self._partial.mkdir()
        self._file: IO[bytes] | None = None
        self._in_file = 0
        self._num_steps = 0

    def add(self, key: str, episode: Episode) -> None:
        steps = list(episode.steps())
        observations = [self._observation(step.observation) for step in steps]
        observations.append(self._observation(episode.last_observation))
        for index, step in enumerate(steps):
            try:
                self._spec.row(step)
            except UnderstudyError as error:
                raise FormatError(f"{key}: {error}; write each spec into a dataset of its own") from None
            transition = _transition(step, observations[index], observations[index + 1])
            if step.last and episode.info.success is not None:
                transition["infos"]["succeed"] = episode.info.success
            if index == 0:
                own = transition["infos"][UNDERSTUDY]
                own |= {
                    "key": key,
                    "info": json.dumps(asdict(episode.info)),
                    "spec": self._spec.json_text,
                    "stack": self._stack,
                }
            self._write(dump_item(transition))
        self._end_if_full()

    def _observation(self, observation: Tree) -> AnyTree:
        if self._stack == "keep":
            return observation
        return trees.map_leaves(lambda leaf: np.asarray(leaf)[None] if not isinstance(leaf, str) else leaf, observation)

    # ---- files

    def _write(self, item: bytes) -> None:
        if self._file is None:
            self._file = (self._partial / "file").open("wb")
            self._file.write(BEGIN)
        elif self._in_file % BATCH == 0:
            self._file.write(END_BATCH + BEGIN_NEXT)
        self._file.write(item)
        self._in_file += 1
        self._num_steps += 1

    def _end_if_full(self) -> None:
        """Start a new file only between episodes."""
        if self._path.suffix != ".pkl" and self._in_file >= self._steps_per_file:
            self._end_file()

    def _end_file(self) -> None:
        if self._file is None:
            return
        with self._file as file:
            file.write(END_BATCH + END)
        (self._partial / "file").rename(self._partial / f"transitions_{self._num_steps}.pkl")
        self._file, self._in_file = None, 0

    def close(self) -> None:
        try:
            if self._num_steps == 0:
                raise FormatError(
                    f"{self._path}: no episode was written, and a file without transitions cannot be read"
                )
            self._end_file()
            if self._path.suffix == ".pkl":
                (made,) = self._partial.iterdir()
                publish_dataset(made, self._path)
                self._partial.rmdir()
            else:
                publish_dataset(self._partial, self._path)
        except BaseException:
            self.abandon()
            raise

    def abandon(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
        shutil.rmtree(self._partial, ignore_errors=True)


def _transition(step: Step, observation: Tree, next_observation: Tree) -> dict[str, Any]:
    infos: dict[str, Any] = {}
    if step.source == Source.HUMAN:
        infos["intervene_action"] = step.action
    flags = (int(step.source), step.policy_version, step.terminated, step.truncated, step.proposal is not None)
    infos[UNDERSTUDY] = {"step": flags, "proposal": step.proposal, "extras": step.extras}
    transition = {
        "observations": observation,
        "actions": step.action,
        "next_observations": next_observation,
        "rewards": step.reward,
        "masks": 1.0 - step.terminated,
        "dones": step.last,
        "infos": infos,
    }
    if isinstance(step.extras, dict) and GRASP_PENALTY in step.extras:
        transition[GRASP_PENALTY] = infos[GRASP_PENALTY] = step.extras[GRASP_PENALTY]
    return transition

"""The files of HIL-SERL's scripts, in and out: what is written here they load without a change.

    load_run("runs/pick", buffer)             # buffer/*.pkl; what is also in demo_buffer/*.pkl is marked as a human's
    export_run("runs/pick", store)            # buffer/transitions_*.pkl, demo_buffer/transitions_*.pkl
    export_demos("demo_data", "pick", store)  # demo_data/pick_20_demos_2026-11-16_15-40-00.pkl

`buffer` has all steps, `demo_buffer` those that a human took a second time, as the actor of train_rlpd.py saves them.
Nothing that is in a file is run.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from understudy.compat.hil_serl.buffer import MemoryEfficientReplayBuffer
from understudy.core import Episode, Source, StoreError
from understudy.core import tree as trees
from understudy.durable import files
from understudy.durable.errors import store_errors
from understudy.formats.hil_serl.files import find_files
from understudy.formats.safe_pickle.write import BEGIN, END, END_BATCH, dump_item
from understudy.replay import Reader

STEPS_PER_FILE = 1000


def load_run(checkpoint_path: str | Path, buffer: MemoryEfficientReplayBuffer) -> int:
    """Insert the transitions of a run's `buffer`, or of any directory of pickles; returns how many were read."""
    num_read = 0
    for transition in find_files(Path(checkpoint_path)).transitions():
        buffer.insert(trees.unflatten(transition.fields), human=transition.human)
        num_read += 1
    buffer.flush()
    return num_read


def export_run(checkpoint_path: str | Path, store: str | Path, *, steps_per_file: int = STEPS_PER_FILE) -> int:
    """Write all steps to `buffer` and those of a human to `demo_buffer`; returns the number of all.

    The directories must be new or empty. Files have the number of their last step, as the actor's have.
    """
    if steps_per_file < 1:
        raise StoreError(f"steps_per_file: expected a number from 1, got {steps_per_file}")
    folders = [Path(checkpoint_path) / name for name in ("buffer", "demo_buffer")]
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.glob("*.pkl")):
            raise StoreError(f"{folder}: holds .pkl files already, which would be loaded too; choose another directory")
    everything: list[dict[str, Any]] = []
    human: list[dict[str, Any]] = []
    num_steps = 0

    def write() -> None:
        if everything:
            for folder, transitions in zip(folders, (everything, human), strict=True):
                _write(folder / f"transitions_{num_steps}.pkl", transitions)  # an empty list too, as there
            everything.clear()
            human.clear()

    for episode in _episodes(store):
        for transition, is_human in transitions_of(episode):
            everything.append(transition)
            if is_human:
                human.append(transition)
            num_steps += 1
            if num_steps % steps_per_file == 0:
                write()
    write()
    return num_steps


def export_demos(demo_data: str | Path, exp_name: str, store: str | Path) -> Path:
    """Write the successful episodes as one file of demonstrations with HIL-SERL's name, which is returned."""
    transitions: list[dict[str, Any]] = []
    num_demos = 0
    for episode in _episodes(store):
        if episode.info.success:
            num_demos += 1
            found = [transition for transition, _ in transitions_of(episode, infos=True)]
            found[-1]["infos"]["succeed"] = True
            transitions += found
    if not transitions:
        raise StoreError(f"{store}: has no successful episode to export; see `understudy info --episodes`")
    moment = time.strftime("%Y-%m-%d_%H-%M-%S")
    path = Path(demo_data) / f"{exp_name}_{num_demos}_demos_{moment}.pkl"
    path.parent.mkdir(parents=True, exist_ok=True)
    _write(path, transitions)
    return path


def transitions_of(episode: Episode, *, infos: bool = False) -> Iterator[tuple[dict[str, Any], bool]]:
    """The episode's steps as transitions, each with whether a human took it; with `infos`, as demonstrations have."""
    for index in range(len(episode)):
        step = episode.step(index)
        human = step.source == Source.HUMAN
        transition: dict[str, Any] = {
            "observations": step.observation,
            "actions": step.action,
            "next_observations": trees.map_leaves(operator.itemgetter(index + 1), episode.observation),
            "rewards": float(step.reward),
            "masks": 1.0 - step.terminated,
            "dones": step.last,
            **trees.unflatten({path: _plain(leaf) for path, leaf in trees.leaves(step.extras)}),
        }
        if infos:
            transition["infos"] = {"succeed": False, **({"intervene_action": step.action} if human else {})}
        yield transition, human


def _plain(leaf: Any) -> Any:
    return leaf.item() if np.ndim(leaf) == 0 and hasattr(leaf, "item") else leaf


def _episodes(store: str | Path) -> Iterator[Episode]:
    with Reader(store) as reader:
        for record in reader.episodes():
            if record.num_rows > 1:
                yield reader.read(record.id)


def _write(path: Path, transitions: list[dict[str, Any]]) -> None:
    content = [BEGIN, *(dump_item(transition) for transition in transitions), END_BATCH, END]
    with store_errors(path, "write"):
        files.write_durably(path, content)

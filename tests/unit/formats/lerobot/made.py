"""Small datasets for the tests of LeRobot's format: copies of golden ones, and smooth images that videos keep."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from understudy.core import ArraySpec, Episode, EpisodeInfo, Source, Spec, Step, StepSpec
from understudy.formats import find_format

GOLDEN = Path(__file__).parents[3] / "golden" / "formats" / "lerobot"
SPEC = StepSpec(
    observation=Spec(
        {
            "front": ArraySpec(shape=(32, 48, 3), dtype="uint8"),
            "state": ArraySpec(shape=(3,), dtype="float32"),
            "prompt": ArraySpec(shape=(), dtype="str"),
        }
    ),
    action=Spec(ArraySpec(shape=(2,), dtype="float32", low=-1.0, high=1.0)),
    extras=Spec({"log_prob": ArraySpec(shape=(), dtype="float32")}),
)


def image(moment: int) -> np.ndarray[Any, Any]:
    """A slope whose brightness tells the moment."""
    across, down = np.meshgrid(np.arange(48), np.arange(32))
    return np.stack([across + 2 * moment, down + 2 * moment, (across + down) // 2 + 2 * moment], -1).astype(np.uint8)


def smooth_episode(num_steps: int, seed: int = 0) -> Episode:
    rng = np.random.default_rng(seed)

    def observation(index: int) -> dict[str, Any]:
        state = rng.normal(size=3).astype(np.float32)
        return {"front": image(10 * seed + index), "state": state, "prompt": f"step {index}"}

    steps = [
        Step(
            observation=observation(index),
            action=rng.uniform(-1, 1, 2).astype(np.float32),
            reward=float(index == num_steps - 1),
            terminated=index == num_steps - 1,
            source=Source.HUMAN if index % 3 == 1 else Source.POLICY,
            policy_version=7,
            proposal=rng.uniform(-1, 1, 2).astype(np.float32) if index % 3 == 1 else None,
            extras={"log_prob": np.float32(rng.normal())},
        )
        for index in range(num_steps)
    ]
    info = EpisodeInfo(task="push", instruction="push it", seed=seed, success=True, kind="correction")
    return Episode.from_steps(SPEC, steps, observation(num_steps), info)


def write(path: Path, episodes: list[Episode], spec: StepSpec = SPEC, **options: str) -> Path:
    target = find_format("lerobot").write(path, spec, options)
    try:
        for number, episode in enumerate(episodes):
            target.add(str(number), episode)
        target.close()
    except BaseException:
        target.abandon()
        raise
    return path


def read(path: Path, **options: str) -> list[Episode]:
    with closing(find_format("lerobot").read(path, options)) as source:
        return [episode for _, episode in source.episodes()]


def copy_of_golden(name: str, folder: Path, change: Callable[[dict[str, Any]], object] | None = None) -> Path:
    """A golden dataset that may be damaged; `change` is given what info.json says."""
    dataset_dir = folder / name
    shutil.copytree(GOLDEN / name, dataset_dir)
    if change is not None:
        edit_json(dataset_dir / "meta" / "info.json", change)
    return dataset_dir


def edit_json(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    fields = json.loads(path.read_text())
    change(fields)
    path.write_text(json.dumps(fields))

"""What is written here, read by the real lerobot: UNDERSTUDY_LEROBOT_PYTHON and UNDERSTUDY_LEROBOT_V21_PYTHON name it.

How to make these environments is in tests/golden/formats/lerobot/make.py; benchmarks/lerobot.py does more.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.unit.formats.lerobot.made import GOLDEN, read, smooth_episode, write
from tests.unit.formats.lerobot.test_packets import exported, make_store

from understudy.core import ArraySpec, Episode, Spec, StepSpec
from understudy.core.examples import random_episode, text_spec
from understudy.formats.lerobot.info import NUMBERS

PYTHONS = {"3": os.environ.get("UNDERSTUDY_LEROBOT_PYTHON"), "2.1": os.environ.get("UNDERSTUDY_LEROBOT_V21_PYTHON")}

SHAPES = {"one": (), "row": (3,), "table": (2, 3), "block": (2, 2, 3), "deep": (1, 2, 1, 2)}
EVERY = StepSpec(
    observation=Spec({f"{d}_{name}": ArraySpec(shape=s, dtype=d) for d in NUMBERS for name, s in SHAPES.items()}),
    action=Spec(ArraySpec(shape=(2,), dtype="float32")),
)


@pytest.fixture(params=list(PYTHONS))
def version(request: pytest.FixtureRequest) -> str:
    if PYTHONS[request.param] is None:
        pytest.skip(f"no environment variable names a Python with a lerobot that reads v{request.param}")
    return str(request.param)


def asked(version: str, dataset_dir: Path) -> dict[str, np.ndarray[Any, Any]]:
    quiet = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(dataset_dir.parent / "hf"), "CUDA_VISIBLE_DEVICES": ""}
    answer = dataset_dir.parent / "answer.npz"
    completed = subprocess.run(
        [str(PYTHONS[version]), GOLDEN / "make.py", "read", dataset_dir, answer],
        env=quiet,
        capture_output=True,
        text=True,
        check=False,
    )
    assert completed.returncode == 0, completed.stderr[-3000:]
    with np.load(answer) as found:
        return dict(found)


def test_every_dtype_and_shape(tmp_path: Path, version: str) -> None:
    episodes = [random_episode(EVERY, num, num) for num in (4, 3)]
    found = asked(version, write(tmp_path / "d", episodes, EVERY, version=version))
    seen = 0
    for name in EVERY.observation.flat:
        wanted = np.concatenate([episode.observation[name][: len(episode)] for episode in episodes])
        if name.startswith("float64"):
            wanted = wanted.astype(np.float32)  # lerobot rounds
        if not name.startswith("uint64"):  # which has no column
            assert np.array_equal(found[f"observation.{name}"].reshape(wanted.shape).astype(wanted.dtype), wanted), name
            seen += 1
    assert seen == 5 * 11


@pytest.mark.parametrize("video", ["av1", "h264", "lossless", "png"])
def test_frames_and_what_goes_with_them(tmp_path: Path, version: str, video: str) -> None:
    episodes = [smooth_episode(5, 0), smooth_episode(1, 1), smooth_episode(7, 2)]
    dataset_dir = write(tmp_path / "d", episodes, video=video, version=version, fps="20")
    found = asked(version, dataset_dir)

    def ours(pick: Any, source: list[Episode]) -> np.ndarray[Any, Any]:
        return np.concatenate([pick(episode)[: len(episode)] for episode in source])

    assert np.array_equal(found["observation.images.front"], ours(lambda e: e.observation["front"], read(dataset_dir)))
    assert np.array_equal(found["action"], ours(lambda e: e.action, episodes))
    assert np.array_equal(found["next.reward"], ours(lambda e: e.reward, episodes))
    assert np.array_equal(found["next.done"], ours(lambda e: e.terminated, episodes))
    assert np.array_equal(found["complementary_info.log_prob"], ours(lambda e: e.extras["log_prob"], episodes))
    assert found["observation.prompt"].tolist() == [text for e in episodes for text in e.observation["prompt"][:-1]]
    assert np.allclose(found["timestamp"][:5], np.arange(5) / 20)
    assert set(found["task"].tolist()) == {"push it"}


def test_what_has_no_column_is_passed_over(tmp_path: Path, version: str) -> None:
    spec = text_spec()
    found = asked(version, write(tmp_path / "d", [random_episode(spec, 4, 1)], spec, version=version))
    assert "observation.prompt" in found
    assert not any("jpeg" in key or key == "action" for key in found)


def test_frames_that_a_store_had_encoded(tmp_path: Path, version: str) -> None:
    make_store(tmp_path / "store")
    assert len(exported(tmp_path / "store", tmp_path / "d", f"?version={version}").kept) == 2
    found = asked(version, tmp_path / "d")
    seen = read(tmp_path / "d", rest="ignore", last="step")  # decoded and converted to RGB as lerobot does it
    for camera in ("front", "wrist", "side", "raw"):
        wanted = np.concatenate([episode.observation[camera][:-1] for episode in seen])
        assert np.array_equal(found[f"observation.images.{camera}"], wanted), camera
    assert np.allclose(found["timestamp"][:23], np.arange(23) / 30)

"""What is written here, read by the real TensorFlow Datasets; set UNDERSTUDY_TFDS_PYTHON to a Python that has it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

from understudy.core import ArraySpec, Episode, Spec, StepSpec
from understudy.core.examples import CANONICAL, random_episode
from understudy.core.spec import DTYPES
from understudy.formats import find_format

PYTHON = os.environ.get("UNDERSTUDY_TFDS_PYTHON")
READ = Path(__file__).parents[3] / "golden" / "formats" / "rlds" / "make.py"
pytestmark = pytest.mark.skipif(
    PYTHON is None, reason="UNDERSTUDY_TFDS_PYTHON names no Python with tensorflow-datasets"
)

EVERY = StepSpec(
    observation=Spec(
        {
            f"{dtype}{kind}": ArraySpec(shape=shape, dtype=dtype)
            for dtype in DTYPES
            if dtype != "str"
            for kind, shape in (("", ()), ("_row", (3,)), ("_many", (40, 30)), ("_ragged", (None, 2)))
        }
    ),
    action=Spec(
        {
            "colour": ArraySpec(shape=(9, 8, 4), dtype="uint8"),
            "grey": ArraySpec(shape=(9, 8, 1), dtype="uint8"),
            "depth": ArraySpec(shape=(9, 8, 1), dtype="uint16"),
        }
    ),
)


def some(name: str) -> tuple[StepSpec, Episode]:
    return (EVERY, random_episode(EVERY, 4, 1)) if name == "every dtype" else CANONICAL[name]()


@pytest.mark.parametrize("name", ["images", "nested", "text", "truncated", "every dtype"])
@pytest.mark.parametrize("file_format", ["tfrecord", "array_record"])
def test_tensorflow_datasets_reads_what_is_written(tmp_path: Path, name: str, file_format: str) -> None:
    spec, episode = some(name)
    target = find_format("rlds").write(tmp_path / "data", spec, {"file_format": file_format, "shard_mb": "1"})
    target.add("one", episode)
    target.add("two", episode)
    target.close()
    quiet = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
    completed = subprocess.run(
        [str(PYTHON), READ, "read", tmp_path / "data", tmp_path / "read.npz"],
        env=quiet,
        capture_output=True,
        text=True,
        check=False,
    )
    assert completed.returncode == 0, completed.stderr[-3000:]
    with np.load(tmp_path / "read.npz") as found:
        read = dict(found)
    length = len(episode)
    for number in (0, 1):
        for path, column in episode.columns().items():
            top = path.partition("/")[0]
            theirs = path if top in ("observation", "action", "reward", "extras") else f"understudy/{path}"
            if path == "terminated":
                theirs = ""
            for row in range(length + 1 if top == "observation" else length):
                if theirs:
                    got, wanted = read[f"train/{number}/steps/#{row}/{theirs}"], column[row]
                    if isinstance(wanted, str):
                        assert str(got) == wanted
                    else:
                        np.testing.assert_array_equal(got.reshape(np.shape(wanted)), wanted, err_msg=path)
                        assert got.dtype == wanted.dtype or file_format == "array_record", path  # its numpy side widens
        last = f"train/{number}/steps/#{length}"
        assert (bool(read[f"{last}/is_terminal"]), bool(read[f"{last}/is_last"])) == (
            bool(episode.terminated[-1]),
            True,
        )
        assert f"train/{number}/steps/#{length + 1}/is_last" not in read
        assert str(read[f"train/{number}/episode_metadata/episode_id"]) == ("one", "two")[number]

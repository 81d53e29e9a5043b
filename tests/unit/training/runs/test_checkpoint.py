"""Checkpoints: whole or not at all, bounded in number, and honest about damage."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from understudy.training.runs.checkpoint import (
    ARRAYS,
    FACTS,
    CheckpointError,
    newest_checkpoint,
    read_checkpoint,
    write_checkpoint,
)

STATE = {
    "weights": np.arange(6, dtype=np.float32).reshape(2, 3),
    "steps": np.array(7, np.int64),
    "kind": "sac",
    "turned": np.arange(6.0).reshape(2, 3).T,
}


def test_what_was_saved_is_read_and_only_so_many_are_kept(tmp_path: Path) -> None:
    assert newest_checkpoint(tmp_path) is None
    for number in (5, 10, 15, 20):
        write_checkpoint(tmp_path, number, STATE, {"episodes": number}, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["000000000015-0", "000000000020-0"]
    newest = newest_checkpoint(tmp_path)
    assert newest is not None
    found = read_checkpoint(newest)
    assert (found.number, found.facts, found.state["kind"]) == (20, {"episodes": 20}, "sac")
    for name in ("weights", "steps", "turned"):
        wanted = STATE[name]
        assert isinstance(wanted, np.ndarray)
        assert np.array_equal(found.state[name], wanted)
        assert (found.state[name].shape, found.state[name].dtype) == (wanted.shape, wanted.dtype)


def test_the_same_number_again_is_newer(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 5, STATE, {"try": 1}, keep=2)
    path = write_checkpoint(tmp_path, 5, STATE, {"try": 2}, keep=2)
    assert read_checkpoint(path).facts == {"try": 2}
    assert newest_checkpoint(tmp_path) == path
    for attempt in range(3, 13):  # a run that is stopped often reaches two digits
        write_checkpoint(tmp_path, 5, STATE, {"try": attempt}, keep=2)
    newest = newest_checkpoint(tmp_path)
    assert newest is not None
    assert read_checkpoint(newest).facts == {"try": 12}
    with pytest.raises(CheckpointError, match="at least 1"):
        write_checkpoint(tmp_path, 6, STATE, {}, keep=0)


@pytest.mark.parametrize("name", [ARRAYS, FACTS])
@pytest.mark.parametrize("how", ["flip", "cut", "gone"])
def test_damage_is_refused_in_one_sentence(name: str, how: str, tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, 5, STATE, {}, keep=2)
    content = bytearray((path / name).read_bytes())
    if how == "gone":
        (path / name).unlink()
    elif how == "cut":
        (path / name).write_bytes(content[: len(content) // 2])
    else:
        content[-20] ^= 0x10
        (path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=f"remove {path} to resume from an older one"):
        read_checkpoint(path)


WRITER = """
import sys, numpy as np
from pathlib import Path
from understudy.training.runs.checkpoint import write_checkpoint
for number in range(int(sys.argv[2]), 10**6):
    write_checkpoint(Path(sys.argv[1]), number, {"x": np.full(50_000, number)}, {"n": number}, keep=2)
"""


def test_a_writer_that_is_killed_leaves_whole_checkpoints(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    for round_ in range(4):
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path), str(10**5 * round_)])
        before = newest_checkpoint(tmp_path)
        while newest_checkpoint(tmp_path) == before:
            time.sleep(0.01)
        time.sleep(rng.uniform(0, 0.4))
        os.kill(writer.pid, signal.SIGKILL)
        writer.wait()
        for path in tmp_path.glob("[0-9]*"):
            found = read_checkpoint(path)
            assert (found.state["x"] == found.number).all()
        assert newest_checkpoint(tmp_path) is not None


def test_the_same_number_again_and_again(tmp_path: Path) -> None:
    """A run that is resumed from the same place comes to the same number; only one is kept."""
    for turn in range(4):
        path = write_checkpoint(tmp_path, 7, {}, {"turn": turn}, keep=1)
    assert [found.name for found in tmp_path.iterdir()] == ["000000000007-3"] == [path.name]
    assert read_checkpoint(path).facts == {"turn": 3}

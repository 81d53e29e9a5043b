"""The benchmark of cameras: short forms of recording, and of lerobot beside it."""

from __future__ import annotations

import json
import os
import stat
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks.cameras import CAMERAS, _found, _seen, record, spec_of
from benchmarks.cameras_lerobot import mark, number_in

from understudy.core import Step
from understudy.replay import Store

LEROBOT_PYTHON = os.environ.get("UNDERSTUDY_LEROBOT_PYTHON")


@pytest.fixture
def frames(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with eight frames of each camera."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    for name in CAMERAS:
        coarse = rng.integers(0, 200, (8, 30, 40, 1), np.uint8)
        np.save(tmp_path / f"{name}.npy", coarse.repeat(16, axis=1).repeat(16, axis=2).repeat(3, axis=3))
    return tmp_path


def read_report(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return report


def test_a_marked_frame_shows_its_number() -> None:
    frames = np.full((256, 20, 130, 3), 90, np.uint8)
    assert [number_in(frame) for frame in mark(frames)] == list(range(256))
    assert (frames == 90).all()


def test_every_step_over_the_network_is_there_after_a_kill(frames: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(seconds=3, frames=frames, kills=1)
    report = read_report(capsys)
    assert (report["steps"], report["rows lost"], report["rows with numbers of another"]) == (90, 0, 0)
    assert report["frames of another"] == 0
    assert min(report["PSNR dB"].values()) > 30
    assert report["CPU ms a step, server"] > 0
    assert "lerobot" not in report


def test_rows_of_another_step_are_counted(frames: Path) -> None:
    pictures = {name: mark(np.load(frames / f"{name}.npy")) for name in CAMERAS}
    with Store.open(frames / "store") as store:
        writer = store.writer("arm", spec_of("h264"))
        writer.begin()
        for number in (0, 1, 3, 2, 4):
            seen = _seen(pictures, number)
            step = Step(observation=seen, action=np.zeros(14, np.float32), reward=0.0, truncated=number == 4)
            writer.append(step)
        writer.end(_seen(pictures, 5))
    found = _found(frames / "store", pictures, num_steps=6)
    assert (found["rows lost"], found["rows with numbers of another"], found["frames of another"]) == (1, 2, 2 * 3)


def test_lerobot_is_given_the_same_frames_and_its_own_time(frames: Path, capsys: pytest.CaptureFixture[str]) -> None:
    python = frames / "python"
    python.write_text(f"""#!{sys.executable}
import json, pathlib, sys
import numpy as np
program, what, frames, out, seconds = sys.argv[1:]
kept = [str(np.load(frames + "/" + name + ".npy").shape) for name in {CAMERAS}]
pathlib.Path(out, "answers.json").write_text(json.dumps([pathlib.Path(program).name, what, kept, seconds]))
""")
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    record(seconds=0.5, frames=frames, lerobot_python=python, lerobot_seconds=7)
    told = read_report(capsys)["lerobot"]
    assert told == ["cameras_lerobot.py", "record", ["(8, 480, 640, 3)"] * 3, "7"]
    record(seconds=0.5, frames=frames, lerobot_python=python)
    assert read_report(capsys)["lerobot"][3] == "0.5"


@pytest.mark.skipif(LEROBOT_PYTHON is None, reason="UNDERSTUDY_LEROBOT_PYTHON is not set")
def test_lerobot_itself_records(frames: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert LEROBOT_PYTHON is not None
    record(seconds=1, frames=frames, lerobot_python=Path(LEROBOT_PYTHON))
    answers = read_report(capsys)["lerobot"]
    assert set(answers) == {"streaming", "images"}
    assert set(answers["images"]["frames lost"].values()) == {0}
    assert min(answers["images"]["PSNR dB"].values()) > 30
    assert set(answers["images"]["frames at another step, of 100"].values()) == {0}

"""`understudy film`: a recorded episode as a moving picture."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tests.writing import write_episode

from understudy.cli import main
from understudy.core import Source
from understudy.core.examples import random_episode, robot_spec, small_spec
from understudy.replay import Store
from understudy.training.runs.video import COLOURS, LATER, STRIP, draw_episode


@pytest.fixture
def store(tmp_path: Path) -> Path:
    with Store.open(tmp_path / "store") as opened:
        for name, spec in (("a", robot_spec(16)), ("b", small_spec())):
            writer = opened.writer(name, spec)
            episode = random_episode(spec, 12, 1)
            write_episode(writer, episode)
    return tmp_path / "store"


def test_a_film_has_every_observation_and_the_right_speed(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "a.gif"
    assert main(["film", str(store), "1", "--out", str(out), "--fps", "10"]) == 0
    assert capsys.readouterr().out.strip().endswith("a.gif: 13 frames of 388x208")
    with Image.open(out) as picture:
        assert (picture.n_frames, picture.info["duration"]) == (13, 100)  # type: ignore[attr-defined]


def test_a_film_is_named_after_its_store_and_overwrites_no_other(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    other = tmp_path / "demos of 10:30"
    other.mkdir()
    shutil.copytree(store, other / "store")
    for path in (other, other, store.rename(tmp_path / "kitchen")):
        assert main(["film", str(path / "store" if path == other else path), "1"]) == 0
    names = ["demos-of-10-30-episode-1.gif", "demos-of-10-30-episode-1-2.gif", "kitchen-episode-1.gif"]
    assert [line.partition(": ")[0] for line in capsys.readouterr().out.splitlines()] == names
    assert sorted(path.name for path in here.iterdir()) == sorted(names)


def test_the_strip_shows_who_was_in_control() -> None:
    episode = random_episode(robot_spec(16), 12, 1)
    frames = draw_episode(episode)
    width = frames[0].shape[1]
    for index in (0, 5, 12):
        line = frames[index][-STRIP // 2]
        for step in range(12):
            colour = COLOURS[Source(int(episode.source[step]))] if step < index else LATER
            assert tuple(line[(2 * step + 1) * width // 24]) == colour
    assert len({tuple(frames[12][-1][x]) for x in range(width)}) == 2  # policy and human
    first = episode.observation[next(iter(episode.observation))]
    assert not np.array_equal(frames[0][:192], frames[1][:192])
    assert first.shape[0] == len(frames)


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["2"], "has no cameras"),
        (["99"], "there is no episode 99"),
        ([str(2**70)], f"there is no episode {2**70}"),
        (["1", "--fps", "0"], "fps: expected a number above 0"),
        (["1", "--out", "x.mov"], "videos are written as .gif"),
        (["1", "--out", "nowhere/x.gif"], "choose another path"),
    ],
)
def test_what_cannot_be_filmed_is_refused(
    args: list[str], text: str, store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["film", str(store), *args]) == 1
    assert text in capsys.readouterr().err

"""`understudy film`: a recorded episode as a moving picture."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from PIL import Image
from tests.writing import write_episode

from understudy.cli import main
from understudy.core import DamageError, EpisodeInfo, Source
from understudy.core.cameras import encode_cameras
from understudy.core.examples import random_episode, robot_spec, small_spec
from understudy.replay import Reader, Store
from understudy.training.runs.video import BLOCK_ROWS, COLOURS, LATER, STRIP, draw_episode, film_of, write_video


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
    assert capsys.readouterr().out.strip().endswith("a.gif: 13 frames of 388x208, 10 a second")
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


@pytest.fixture
def encoded(tmp_path: Path) -> tuple[Path, int]:
    """More rows than are decoded at a time, with a GOP across the border."""
    spec = encode_cameras(robot_spec(130), "h264")
    episode = replace(random_episode(spec, BLOCK_ROWS + 7, 1), info=EpisodeInfo(labels={"fps": "12.5"}))
    with Store.open(tmp_path / "encoded") as opened:
        write_episode(opened.writer("a", spec, commit_steps=45), episode)
    return tmp_path / "encoded", len(episode) + 1


def test_encoded_frames_are_filmed_as_mp4_at_their_own_rate(
    encoded: tuple[Path, int], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, num_frames = encoded
    monkeypatch.chdir(tmp_path)
    assert main(["film", str(path), "1"]) == 0
    assert capsys.readouterr().out.strip() == f"encoded-episode-1.mp4: {num_frames} frames of 524x276, 12.5 a second"
    with av.open("encoded-episode-1.mp4") as video:
        stream = video.streams.video[0]
        shown = [frame.to_ndarray(format="rgb24") for frame in video.decode(stream)]
        assert (len(shown), stream.average_rate) == (num_frames, Fraction(25, 2))
    with Reader(path) as reader:
        drawn = draw_episode(reader.read(1))
    assert all(
        np.abs(a.astype(int) - b).mean() < 20 for a, b in zip(shown, drawn, strict=True)
    )  # of noise, which is lossy


@pytest.mark.parametrize("rate", ["fast", "0", "-3", "nan", "1e9"])
def test_a_label_that_is_no_rate_is_ignored(rate: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Store.open(tmp_path / "store") as opened:
        episode = random_episode(robot_spec(16), 3, 1)
        writer = opened.writer("a", robot_spec(16))
        write_episode(writer, replace(episode, info=EpisodeInfo(labels={"fps": rate})))
    assert main(["film", str(tmp_path / "store"), "1", "--out", str(tmp_path / "a.gif")]) == 0
    assert "20 a second" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["a.gif", "a.mp4"])
def test_a_film_that_fails_leaves_no_part_of_it(name: str, tmp_path: Path) -> None:
    def frames() -> Iterator[np.ndarray[Any, Any]]:
        for _ in range(30):
            yield np.zeros((64, 64, 3), np.uint8)
        raise DamageError("segment 3: row 7 does not match its checksum")

    with pytest.raises(DamageError, match="row 7"):
        write_video(tmp_path / name, frames())
    assert list(tmp_path.iterdir()) == []


def test_a_long_episode_is_drawn_frame_by_frame(encoded: tuple[Path, int]) -> None:
    path, _ = encoded
    with Reader(path) as reader:
        whole = draw_episode(reader.read(1))
        assert np.array_equal(list(film_of(reader, 1).frames), whole)


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
        (["1", "--out", "x.mov"], "videos are written as .gif or .mp4, got .mov"),
        (["1", "--out", "nowhere/x.mp4"], "choose another path"),
        (["1", "--out", "nowhere/x.gif"], "choose another path"),
    ],
)
def test_what_cannot_be_filmed_is_refused(
    args: list[str], text: str, store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["film", str(store), *args]) == 1
    assert text in capsys.readouterr().err

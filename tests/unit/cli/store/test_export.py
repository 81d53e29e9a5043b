"""`understudy export`: episodes of a store as a data set of another format."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from tests.writing import write_episode

from understudy.cli import main
from understudy.core import ArraySpec, Episode, Spec, StepSpec
from understudy.core.examples import random_episode, small_spec
from understudy.formats import find_format
from understudy.replay import Store


@pytest.fixture
def store(tmp_path: Path) -> Path:
    with Store.open(tmp_path / "store") as opened:
        writer = opened.writer("w", small_spec())
        for number in range(3):
            episode = random_episode(small_spec(), 4, number, terminated=number > 0)
            write_episode(writer, episode)
    return tmp_path / "store"


def test_it_exports_and_says_what_was_not_carried(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(store), f"rlds:{tmp_path}/out"]) == 0
    said = capsys.readouterr().out
    assert f"3 episodes exported (12 steps) to {tmp_path}/out" in said
    for sentence in find_format("rlds").cannot:
        assert sentence in said
    assert find_format("rlds").read(tmp_path / "out", {}).num_episodes == 3


def test_it_says_what_depends_on_the_attributes_of_the_episodes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Store.open(tmp_path / "store") as opened:
        writer = opened.writer("w", small_spec())
        write_episode(writer, random_episode(small_spec(), 4, 0), split="eval", success=True)
        write_episode(writer, random_episode(small_spec(), 4, 1), success=None)
    assert main(["export", str(tmp_path / "store"), f"rlds:{tmp_path}/rlds"]) == 0
    assert "evaluation episodes come after training episodes" in capsys.readouterr().out
    assert main(["export", str(tmp_path / "store"), f"lerobot:{tmp_path}/lerobot"]) == 0
    assert "next.success: false in 1 episodes of which it is not known" in capsys.readouterr().out


def test_where_and_options_choose(store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = f"rlds:{tmp_path}/out?file_format=array_record"
    assert main(["export", str(store), target, "--where", "success = 1"]) == 0
    assert "2 episodes exported" in capsys.readouterr().out
    assert list((tmp_path / "out").glob("*.array_record-00000-of-00001"))


def test_it_says_what_this_export_lost_and_nothing_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    camera = ArraySpec(shape=(32, 32, 3), dtype="uint8")
    spec = StepSpec(
        observation=Spec({"front": camera, "state": ArraySpec(shape=(2,), dtype="float32")}),
        action=Spec(ArraySpec(shape=(2,), dtype="float32")),
    )
    ragged = replace(spec, extras=Spec({"points": ArraySpec(shape=(None, 3), dtype="float32")}))
    stores = {"cameras": spec, "numbers": small_spec(), "ragged": ragged}
    for name, of in stores.items():
        with Store.open(tmp_path / name) as opened:
            for number in range(2):
                episode = random_episode(of, 4, number)
                frames = np.zeros((5, 32, 32, 3), np.uint8)
                frames[:, :, :, :] = np.arange(32, dtype=np.uint8)[:, None, None] * 4
                steps = [
                    step
                    if name == "numbers"
                    else replace(step, observation={**cast("dict[str, Any]", step.observation), "front": frames[0]})
                    for step in episode.steps()
                ]
                last = cast("dict[str, Any]", episode.last_observation)
                last = last if name == "numbers" else {**last, "front": frames[0]}
                write_episode(opened.writer(f"w{number}", of), Episode.from_steps(of, steps, last, episode.info))

    def said(name: str, target: str) -> list[str]:
        assert main(["export", str(tmp_path / name), target]) == 0
        return capsys.readouterr().out.splitlines()[1:]

    at = str(tmp_path / "out")
    jpeg = "observation/front: written as JPEG, quality {}, which is lossy; `{}?images=png` is exact"
    assert said("cameras", f"mcap:{at}1") == [jpeg.format(90, f"mcap:{at}1")]
    assert said("cameras", f"mcap:{at}2?images=png") == []
    assert said("numbers", f"mcap:{at}3") == []
    assert said("cameras", f"rlds:{at}4?images=jpeg")[0] == jpeg.format(95, f"rlds:{at}4")
    assert not any("lossy" in line for line in said("cameras", f"rlds:{at}5"))
    lossy = [line for line in said("cameras", f"lerobot:{at}6?fps=10") if "lossy" in line]
    assert len(lossy) == 1
    assert lossy[0].startswith(
        "observation/front: written as av1 video, which is lossy (mean error of an episode up to "
    )
    assert lossy[0].endswith(f"of 255); `lerobot:{at}6?video=lossless` is exact")
    exact = "\n".join(said("cameras", f"lerobot:{at}7?fps=10&video=lossless"))
    for other in ("lossy", "uint64", "H.264", "?last=", "Files of others", "next.success"):
        assert other not in exact
    assert "meta/understudy, which LeRobot ignores" in exact
    points = "extras/points: only Understudy reads this, because LeRobot has no column for ragged fields, empty fields"
    assert any(line.startswith(points) for line in said("ragged", f"lerobot:{at}8?fps=10&video=png"))


@pytest.mark.parametrize(
    ("target", "where", "text"),
    [
        ("rlds:{there}", "1", "already exists"),
        ("rlds:{tmp}/new", "succes = 1", "there is no column 'succes'"),
        ("rlds:{tmp}/new", "0", "no episode matches '0'"),
        ("rlds:{tmp}/new?images=gif", "1", "expected images=png|jpeg|bytes"),
        ("lerobto:{tmp}/new", "1", "did you mean 'lerobot'?"),
    ],
)
def test_mistakes_are_one_line_and_leave_nothing(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], target: str, where: str, text: str
) -> None:
    there = tmp_path / "there"
    there.mkdir()
    assert main(["export", str(store), target.format(tmp=tmp_path, there=there), "--where", where]) == 1
    assert text in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["store", "there"]

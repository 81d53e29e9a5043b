"""`understudy export`: episodes of a store as a data set of another format."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.writing import write_episode

from understudy.cli import main
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


def test_where_and_options_choose(store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = f"rlds:{tmp_path}/out?file_format=array_record"
    assert main(["export", str(store), target, "--where", "success = 1"]) == 0
    assert "2 episodes exported" in capsys.readouterr().out
    assert list((tmp_path / "out").glob("*.array_record-00000-of-00001"))


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

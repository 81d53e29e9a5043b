"""`understudy import`: a data set of another format into a store."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from understudy.cli import main
from understudy.core.examples import random_episode, small_spec
from understudy.formats import find_format
from understudy.replay import Reader, Store
from understudy.service import Server, ServerConfig


@pytest.fixture
def data(tmp_path: Path) -> Path:
    spec = small_spec()
    target = find_format("rlds").write(tmp_path / "kitchen" / "1.0.0", spec, {})
    for number in range(3):
        episode = random_episode(spec, 4, number)
        target.add(str(number), replace(episode, info=replace(episode.info, kind="practice")))
    target.close()
    return tmp_path / "kitchen"


def test_it_imports_once(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = tmp_path / "store"
    assert main(["import", f"rlds:{data}", str(store), "--as", "demonstration"]) == 0
    assert "3 episodes imported (12 steps)" in capsys.readouterr().out
    assert main(["import", f"rlds:{data}/1.0.0", str(store)]) == 0  # the same data by another path
    assert "0 episodes imported (0 steps); 3 were in the store already" in capsys.readouterr().out
    with Reader(store) as reader:
        records = list(reader.episodes())
    assert [record.info.kind for record in records] == ["demonstration"] * 3
    assert all(record.info.labels["origin"].startswith("rlds:kitchen/1.0.0@") for record in records)


def test_a_data_set_that_was_renamed_is_not_imported_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = tmp_path / "store"
    golden = Path(__file__).parents[3] / "golden/formats/robomimic/robomimic.hdf5"
    for name in ("before.hdf5", "after.hdf5"):
        shutil.copy(golden, tmp_path / name)
        assert main(["import", f"robomimic:{tmp_path / name}", str(store)]) == 0
    said = capsys.readouterr().out.splitlines()[-1]
    with Reader(store) as reader:
        assert said == f"0 episodes imported (0 steps); {len(list(reader.episodes()))} were in the store already"


def test_a_dry_run_says_what_would_become_of_each_field(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    assert main(["import", f"rlds:{data}", str(tmp_path / "store"), "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "rlds, 3 episodes" in said
    for words in (("steps/observation", "observation", "float32 [4]"), ("steps/is_terminal", "terminated", "bool []")):
        assert any(all(word in line for word in words) for line in said.splitlines())
    assert not (tmp_path / "store").exists()
    assert main(["import", f"rlds:{data}", "--dry-run"]) == 0  # a store is not asked for


def test_workers_are_the_formats(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["import", f"rlds:{data}", str(tmp_path / "store"), "--workers", "2"]) == 0
    assert main(["import", f"rlds:{data}", str(tmp_path / "store"), "--workers", "0"]) == 1
    assert "expected workers= a number from 1, got '0'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("rlds:nowhere", "nowhere: expected a directory of TensorFlow Datasets, got nothing"),
        ("rdls:here", "did you mean 'rlds'?"),
        ("rlds:{data}?split=val", "has no split 'val'; it has train"),
        ("rlds:{data}?colour=red", "has no option 'colour'"),
    ],
)
def test_mistakes_are_one_line(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], source: str, text: str
) -> None:
    assert main(["import", source.format(data=data), str(tmp_path / "store")]) == 1
    assert text in capsys.readouterr().err
    assert not (tmp_path / "store").exists()


def test_a_store_is_needed(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["import", f"rlds:{data}"]) == 1
    assert "store: expected a directory or the address of a server" in capsys.readouterr().err


def test_it_imports_into_a_server(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    token = tmp_path / "token"
    token.write_text("0123456789abcdef")
    with (
        Store.open(tmp_path / "store") as store,
        Server(store, ServerConfig(port=0, token=token.read_text())) as server,
    ):
        assert main(["import", f"rlds:{data}", server.address]) == 1
        assert "token is missing or wrong" in capsys.readouterr().err
        assert main(["import", f"rlds:{data}", server.address, "--token-file", str(token)]) == 0
        assert main(["import", f"rlds:{data}", server.address, "--token-file", str(token)]) == 0
    assert "3 were in the store already" in capsys.readouterr().out
    with Reader(tmp_path / "store") as reader:
        assert len(list(reader.episodes())) == 3

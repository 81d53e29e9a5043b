"""info, verify, repair and compact, as a person runs them."""

import json
from pathlib import Path

import pytest
from tests.writing import write_episode

from understudy.cli import main
from understudy.core.examples import random_episode, robot_spec, small_spec
from understudy.replay import Reader, Store
from understudy.replay.format.paths import segment_files
from understudy.replay.format.segment import read_layout
from understudy.service import connect
from understudy.service.client.spool import Spool


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Six episodes of two specs, one of them deleted."""
    path = tmp_path / "store"
    with Store.open(path, segment_bytes=50_000) as opened:
        for name, spec in (("arm", robot_spec(20)), ("toy", small_spec())):
            writer = opened.writer(name, spec)
            for seed in range(3):
                episode = random_episode(spec, 5 + 3 * seed, seed)
                write_episode(writer, episode)
        opened.delete([2])
    return path


def run(capsys: pytest.CaptureFixture[str], *args: str | Path) -> tuple[int, str]:
    """The exit code and all that was printed, with its lines joined."""
    code = main([str(arg) for arg in args])
    captured = capsys.readouterr()
    return code, " ".join((captured.out + captured.err).split())


def damage(path: Path) -> None:
    """Flip one bit of the fourth camera frame."""
    segment = segment_files(path)[0]
    place = read_layout(segment).columns["observation/wrist_1"].at(3) + 100
    with segment.open("r+b") as file:
        file.seek(place)
        byte = file.read(1)
        file.seek(place)
        file.write(bytes([byte[0] ^ 1]))


def test_info_counts_by_kind(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out = run(capsys, "info", store)
    assert code == 0
    assert "not being written" in out
    assert "correction, deleted" in out
    assert "observation/wrist_1 uint8 [20, 20, 3]" in out
    assert "writers: arm, toy" in out
    assert "9 of the rows are dead; `understudy compact` frees their space" in out


def test_info_as_json_has_the_same(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", str(store), "--as-json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert sum(group["episodes"] for group in content["totals"]) == 6
    assert content["num_dead_rows"] == 9
    assert content["being_written"] is False


def test_info_lists_the_newest_episodes(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", str(store), "--episodes", "--limit", "2", "--as-json"]) == 0
    assert [episode["id"] for episode in json.loads(capsys.readouterr().out)] == [6, 5]
    code, out = run(capsys, "info", store, "--episodes")
    assert code == 0
    assert "deleted" in out
    assert "task-1" in out


@pytest.mark.parametrize("columns", [60, 80])
def test_the_table_of_episodes_fits_its_terminal(
    columns: int, store: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main(["info", str(store), "--episodes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    names = ["id", "state", "kind", "steps", "human", "reward", "success", "task"]
    assert lines[0].split() == names + (["actor", "labels"] if columns == 80 else [])
    assert all(len(line) <= columns and "…" not in line for line in lines)
    assert ("a wider terminal, or --as-json" in lines[-1]) == (columns == 60)


def test_the_summary_fits_a_narrow_terminal(
    store: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    assert main(["info", str(store)]) == 0
    out = capsys.readouterr().out
    assert ", deleted " in out
    assert "…" not in out
    assert all(len(line) <= 60 for line in out.splitlines())


def test_info_says_when_a_store_is_being_written(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Store.open(store):
        assert "being written" in run(capsys, "info", store)[1]


def test_info_of_a_spool_counts_what_waits_and_what_is_damaged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with connect("127.0.0.1:9") as remote:
        writer = remote.writer("arm", small_spec(), spool=tmp_path / "spool", commit_steps=2)
        write_episode(writer, random_episode(small_spec(), 6, 0))
        writer.flush()
        writer.close(timeout_s=0.0)
    last = sorted((tmp_path / "spool").glob("*/*.safetensors"))[-1]
    last.write_bytes(last.read_bytes()[:-1])
    Spool(tmp_path / "spool").close()
    code, out = run(capsys, "info", tmp_path / "spool")
    assert code == 0
    assert "a spool, not being written 3 chunks wait for their server" in out
    assert "1 chunks were damaged on this disk and set aside, in" in out
    assert main(["info", str(tmp_path / "spool"), "--as-json"]) == 0
    assert json.loads(capsys.readouterr().out)["num_damaged"] == 1


def test_verify_and_repair_of_a_sound_store(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out = run(capsys, "verify", store)
    assert code == 0
    assert "everything is as it was written: 6 episodes, 54 rows" in out
    assert run(capsys, "repair", store) == (0, "nothing to repair")


def test_verify_and_repair_of_a_damaged_store(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damage(store)
    code, out = run(capsys, "verify", store)
    assert code == 1
    assert "is not what was written" in out
    assert "1 problems; read 6 episodes" in out
    code, out = run(capsys, "repair", store)
    assert code == 0
    assert "dropped 1 rows; 1 episodes are shorter, 0 are lost, 1 new ones hold the valid rows after a gap" in out
    assert "everything is as it was written" in out
    assert run(capsys, "verify", store)[0] == 0


def test_verify_prints_at_most_limit_problems(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for file in segment_files(store):
        file.unlink()
    code, out = run(capsys, "verify", store, "--limit", "1")
    assert code == 1
    assert out.count("the file is gone") == 1
    assert "more" in out
    code, out = run(capsys, "repair", store, "--limit", "1")
    assert "and" in out


def test_compact_asks_first(store: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    code, out = run(capsys, "compact", store)
    assert code == 1
    assert "cannot ask, because there is no terminal; add --yes to confirm" in out
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("rich.console.Console.input", lambda self, prompt: "n")
    code, out = run(capsys, "compact", store)
    assert code == 1
    assert "nothing was changed" in out
    monkeypatch.setattr("rich.console.Console.input", lambda self, prompt: "y")
    code, out = run(capsys, "compact", store)
    assert code == 0
    assert "1 episodes removed" in out


@pytest.mark.parametrize(
    ("option", "left"),
    [
        ("--max-practice-steps", [3, 5, 6]),
        ("--max-correction-steps", [1, 4]),
        ("--max-demonstration-steps", [1, 3, 4, 5, 6]),
    ],
)
def test_compact_with_a_budget(store: Path, option: str, left: list[int], capsys: pytest.CaptureFixture[str]) -> None:
    code, _ = run(capsys, "compact", store, "--yes", option, "0", "--min-dead", "0")
    assert code == 0
    with Reader(store) as reader:
        kept = [record.id for record in reader.episodes()]
    assert kept == left or (option == "--max-practice-steps" and set(left) <= set(kept))
    assert run(capsys, "verify", store)[0] == 0


def test_min_dead_spares_segments(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "removed 0 segments" in run(capsys, "compact", store, "--yes", "--min-dead", "0.9")[1]
    assert "removed 1 segments" in run(capsys, "compact", store, "--yes", "--min-dead", "0.1")[1]


def test_wrong_paths_are_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("info", "verify", "compact"):
        code, out = run(capsys, command, tmp_path / "nowhere")
        assert code == 1
        assert "error:" in out
        assert "not an Understudy store" in out
        assert "Traceback" not in out

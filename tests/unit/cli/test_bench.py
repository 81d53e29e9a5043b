from pathlib import Path

import pytest

from understudy.cli.main import main
from understudy.replay import bench


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch, tmp_path):
    """Lines are not broken, and what is made without --directory is made in `tmp_path`."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)


def run(capsys, *options):
    """The rows of the table by their way, and its title."""
    small = {"--rounds": "1", "--commits": "2", "--commit-steps": "3"}
    given = dict(zip(options[::2], options[1::2], strict=True))
    assert main(["bench", "store", *(word for pair in (small | given).items() for word in pair)]) == 0
    lines = capsys.readouterr().out.splitlines()
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if line.startswith("│")]
    title = next(line.strip() for line in lines if "a commit" in line)
    return {name: [float(value) for value in values] for name, *values in cells}, title


def test_shows_each_way_beside_the_bare_calls(capsys, tmp_path):
    rows, title = run(capsys)
    assert list(rows) == ["pwrite + fdatasync", "Store.commit", "Writer.append"]
    assert rows["pwrite + fdatasync"][2] == 1.0
    assert all(value > 0 for values in rows.values() for value in values)
    assert title == "3 steps (0.30 MB) a commit, 2 commits, median of 1 rounds"
    assert list(tmp_path.iterdir()) == []


def test_a_ratio_is_the_bare_time_divided_by_ours():
    def costs(*wall_s):
        return tuple(bench.Cost(wall_s=s, cpu_s=1.0) for s in wall_s)

    result = bench.BenchResult(
        commit_bytes=1,
        rounds={bench.SPARSE: costs(2, 2, 9), bench.RESERVED: costs(3, 3, 3), bench.COMMIT: costs(4, 5, 9)},
    )
    assert result.bare == bench.SPARSE
    assert result.cost(bench.COMMIT).wall_s == 5
    assert result.ratio(bench.COMMIT) == 0.5


def written_bytes():
    """All that this process has handed to the system so far."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["wchar"])


@pytest.mark.parametrize(
    ("option", "value", "title"),
    [
        ("--rounds", "3", "3 steps (0.30 MB) a commit, 2 commits, median of 3 rounds"),
        ("--commits", "6", "3 steps (0.30 MB) a commit, 6 commits, median of 1 rounds"),
        ("--commit-steps", "9", "9 steps (0.89 MB) a commit, 2 commits, median of 1 rounds"),
    ],
)
def test_the_amount_is_chosen(capsys, option, value, title):
    before = written_bytes()
    assert run(capsys, option, value)[1] == title
    step_bytes = 2 * 128 * 128 * 3 + 27 * 4
    assert 18 <= (written_bytes() - before) / len(bench.WAYS) / step_bytes < 30


def test_the_place_is_chosen(capsys, tmp_path):
    there = tmp_path / "there"
    there.mkdir()
    untouched = [path.stat().st_mtime_ns for path in (there, tmp_path)]
    run(capsys, "--directory", str(there))
    assert there.stat().st_mtime_ns > untouched[0]
    assert tmp_path.stat().st_mtime_ns == untouched[1]
    assert list(there.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--rounds", "0"], "error: rounds: expected at least 1, got 0"),
        (["--commits", "-1"], "error: commits: expected at least 1, got -1"),
        (["--commit-steps", "0"], "error: commit_steps: expected at least 1, got 0"),
        (["--directory", "nowhere"], "error: nowhere: there is no such directory; make it, or choose another"),
    ],
)
def test_what_makes_no_sense_is_refused(capsys, options, message):
    assert main(["bench", "store", *options]) == 1
    assert capsys.readouterr().err.strip() == message

from pathlib import Path

import pytest

from understudy.cli.main import main
from understudy.core.examples import robot_spec
from understudy.replay import Store
from understudy.selftest import bench_control_loop as bench_control
from understudy.selftest import bench_delivery as delivery
from understudy.selftest import bench_store as bench


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
        (["--directory", "nowhere"], "error: nowhere: no such directory; create it, or choose another"),
    ],
)
def test_what_makes_no_sense_is_refused(capsys, options, message):
    assert main(["bench", "store", *options]) == 1
    assert capsys.readouterr().err.strip() == message


# ---- delivery


def rows_of(text):
    """The cells of each line of a table, by their first one."""
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines() if line.startswith("│")]
    return {name: values for name, *values in cells}


def test_deliver_shows_each_way_beside_bare_grpc(capsys, tmp_path):
    assert main(["bench", "deliver", "--rounds", "1", "--chunks", "2", "--chunk-steps", "3"]) == 0
    text = capsys.readouterr().out
    rows = rows_of(text)
    assert list(rows) == ["bare gRPC", "RemoteWriter, no spool", "RemoteWriter, disk spool"]
    assert rows["bare gRPC"][2] == "1.00"
    assert all(float(rows[way][0]) > 0 for way in rows)
    assert "2 chunks of 3 steps (0.30 MB), median of 1 rounds" in text
    assert "agentlace" in text
    assert list(tmp_path.iterdir()) == []


def test_deliver_shows_how_many_writers_share(capsys, tmp_path):
    options = ["--rounds", "1", "--chunks", "2", "--chunk-steps", "3", "--writers", "3"]
    assert main(["bench", "deliver", *options]) == 0
    text = capsys.readouterr().out
    rows = rows_of(text)
    assert list(rows) == ["RemoteWriter, no spool", "RemoteWriter, disk spool"]
    assert all(0 < float(rows[way][2]) <= 1 for way in rows)
    assert "3 writers at once, each 2 chunks of 3 steps (1 MB), median of 1 rounds" in text
    assert list(tmp_path.iterdir()) == []


def test_the_slowest_writer_is_seen_beside_the_mean():
    result = delivery.ManyWritersResult(
        writer_bytes=3_000_000, writer_steps=30, rounds={delivery.SPOOL: ((1.0, 1.0, 4.0), (2.0, 2.0, 2.0))}
    )
    assert result.fairness(delivery.SPOOL) == pytest.approx((1 / 3 + 1) / 2)  # 0.25 of a mean of 0.75
    assert result.megabytes_per_s(delivery.SPOOL) == pytest.approx((9 / 4 + 9 / 2) / 2)


@pytest.mark.nightly  # a benchmark with pauses
def test_control_loop_shows_each_phase_and_loses_nothing(capsys, tmp_path, monkeypatch):
    for name in ("STOPPED_S", "RUNNING_S", "DOWN_S", "UP_S"):
        monkeypatch.setattr(bench_control, name, 0.3)
    assert main(["bench", "control-loop", "--seconds", "1.5"]) == 0
    text = capsys.readouterr().out
    rows = rows_of(text)
    assert list(rows) == ["healthy", "slow", "dead", "restarting"]
    for values in rows.values():
        p50, p99, p999, longest = (float(value) for value in values[:4])
        assert 0 < p50 <= p99 <= p999 <= longest
        assert values[5] == "0"
    assert "600 steps, lost 0, different or twice 0" in text
    assert list(tmp_path.iterdir()) == []


def test_a_step_that_is_not_in_the_store_is_counted(tmp_path):
    frames = bench_control._frames()
    with Store.open(tmp_path / "store") as store:
        writer = store.writer("loop", robot_spec())
        writer.begin()
        for number in (0, 1, 3, 3):
            writer.append(bench_control._step(number, 10, frames))
        writer.cut()
    assert bench_control._compare(tmp_path / "store", 5) == (2, 1)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["deliver", "--writers", "0"], "error: writers: expected at least 1, got 0"),
        (["deliver", "--chunks", "0"], "error: chunks: expected at least 1, got 0"),
        (
            ["control-loop", "--seconds", "0"],
            "error: control-loop: expected seconds and rate above 0 and at least one step, got 0.0 s at 100.0 Hz",
        ),
    ],
)
def test_a_delivery_that_makes_no_sense_is_refused(capsys, words, message):
    assert main(["bench", *words]) == 1
    assert capsys.readouterr().err.strip() == message


def test_remote_sample_shows_both_bare_ways(capsys, tmp_path):
    options = ["--steps", "200", "--batch-size", "16", "--batches", "2", "--rounds", "1"]
    assert main(["bench", "remote-sample", *options]) == 0
    text = capsys.readouterr().out
    rows = rows_of(text)
    assert list(rows) == ["RemoteSampler", "bare gRPC, one message", "bare gRPC, pieces of 1 MiB"]
    assert all(float(values[1]) > 0 for values in rows.values())
    assert "batches of 16 transitions (3 MB), median of 1 rounds" in text
    assert list(tmp_path.iterdir()) == []


def test_parameters_shows_when_all_readers_have_them(capsys, tmp_path):
    assert main(["bench", "parameters", "--megabytes", "2", "--readers", "2", "--rounds", "1"]) == 0
    text = capsys.readouterr().out
    rows = rows_of(text)
    assert next(iter(rows)) == "publish, until all 2 have it"
    assert all(float(values[0]) > 0 for values in rows.values())
    assert "2 MB to 2 readers, median of 1 rounds" in text
    assert list(tmp_path.iterdir()) == []

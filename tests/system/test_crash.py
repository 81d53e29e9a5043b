"""Real processes, really killed."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from understudy.cli import main
from understudy.core import DamageError
from understudy.replay import Reader, Store, repair, verify
from understudy.selftest import crash_test
from understudy.selftest.crash_test import run_crash_test

WRITER = """
import sys
from understudy.core.examples import random_episode, small_spec
from understudy.core import DamageError
from understudy.replay import Store

store = Store.open(sys.argv[1], segment_bytes=20_000)
writer = store.writer("w", small_spec())
for seed in range(10_000):
    episode = random_episode(small_spec(), 3, seed)
    writer.begin(episode.info)
    for step in episode.steps():
        writer.append(step)
    writer.end(episode.last_observation)
    print(seed, flush=True)
"""


@pytest.mark.parametrize("kills", [8, pytest.param(50, marks=pytest.mark.nightly)])
def test_kills_lose_nothing(kills: int, tmp_path: Path) -> None:
    report = run_crash_test(tmp_path / "store", kills=kills, seed=1)
    assert report.kills == kills
    assert report.ok, report
    assert report.found == report.acknowledged > 20 * kills
    assert len(report.killed_while) >= min(6, kills // 4)  # phases


@pytest.mark.parametrize("encoded", [False, True])
@pytest.mark.nightly
def test_a_thousand_kills_lose_nothing(encoded: bool, tmp_path: Path) -> None:
    report = run_crash_test(tmp_path / "store", kills=1000, seed=2, encoded=encoded)
    assert report.ok, report


def test_kills_and_damage_lose_no_encoded_frame(tmp_path: Path) -> None:
    pytest.importorskip("av")
    for seed in range(1, 10):  # on a busy machine, three may be killed before their first commit
        shutil.rmtree(tmp_path / "store", ignore_errors=True)
        report = run_crash_test(tmp_path / "store", kills=3, seed=seed, damage=True, encoded=True)
        assert report.ok, report
        if report.acknowledged:
            break
    assert report.found == report.acknowledged > 0
    with Reader(tmp_path / "store") as reader:
        (spec,) = (reader.spec(number) for number in reader.catalog.spec_ids())
        assert sorted(spec.encoded) == ["observation/depth", "observation/video"]


def test_the_command_prints_its_verdict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["crash-test", "--kills", "2", "--directory", str(tmp_path), "--seed", "3"]) == 0
    out = capsys.readouterr().out
    assert "2 kills" in out
    assert "lost 0, duplicated 0, different 0" in out
    assert not list(tmp_path.iterdir())


def test_kills_and_damage_lose_nothing_else(tmp_path: Path) -> None:
    report = run_crash_test(tmp_path / "store", kills=3, seed=1, damage=True)
    assert report.damage is not None
    assert report.ok, report.damage
    assert report.damage.damaged.total() == 3


def test_a_child_that_is_killed_at_once_leaves_a_store_to_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(crash_test, "_child", lambda *args: time.sleep(60))
    monkeypatch.setattr(crash_test, "KILLS_PER_DAMAGED_STORE", 1)
    report = run_crash_test(tmp_path / "store", kills=2, seed=1, damage=True)
    assert report.ok, report
    assert report.damage is not None
    assert report.damage.damaged.total() == report.kills == 2
    assert report.acknowledged == 0


@pytest.mark.nightly
def test_three_hundred_kills_with_damage(tmp_path: Path) -> None:
    report = run_crash_test(tmp_path / "store", kills=300, seed=5, damage=True)
    assert report.damage is not None
    assert report.ok, report.damage
    assert report.damage.num_repaired > 30
    assert len(report.damage.damaged) >= 8  # kinds of files, flipped and cut


def test_the_command_prints_what_was_damaged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["crash-test", "--kills", "1", "--damage", "--directory", str(tmp_path), "--seed", "3"]) == 0
    out = capsys.readouterr().out
    assert "1 damaged copies" in out
    assert "of all others lost 0" in " ".join(out.split())
    assert main(["crash-test", "--damage", "--chain"]) == 1
    assert "expected one of --chain and --damage" in capsys.readouterr().err


def test_a_test_that_finds_a_loss_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The crash test can fail: with a store that acknowledges and stores nothing, it counts what is lost."""
    monkeypatch.setattr(Store, "commit", lambda self, chunk: self.state.commit)
    report = run_crash_test(tmp_path / "store", kills=3, seed=4)
    assert not report.ok
    assert report.lost > 0


def killed_store(path: Path) -> int:
    """A store whose writer was killed after some acknowledgements; returns the last seed acknowledged."""
    with subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout
        seeds = [child.stdout.readline() for _ in range(30)]
        child.kill()
        seeds += child.stdout.read().splitlines(keepends=True)
    return int(next(seed for seed in reversed(seeds) if seed.endswith("\n")))


def test_a_log_that_is_cut_short_is_noticed(tmp_path: Path) -> None:
    """Without its last bytes SQLite's log gives fewer commits: the segments still tell that there were more."""
    path = tmp_path / "store"
    last = killed_store(path)
    log = path / "catalog.sqlite-wal"
    whole = log.read_bytes()
    assert whole
    for cut in [*range(1, 4097, 64), 4096]:
        os.truncate(log, len(whole) - cut)
        report = verify(path)
        try:
            with Reader(path) as reader:
                seeds = max(record.info.seed or 0 for record in reader.episodes())
        except DamageError:
            assert not report.ok, cut
        else:
            assert seeds >= last, cut
        (path / "catalog.sqlite-shm").unlink(missing_ok=True)
        log.write_bytes(whole)
    os.truncate(log, len(whole) - 4096)
    assert repair(path).after.ok
    with Reader(path) as reader:
        assert max(record.info.seed or 0 for record in reader.episodes()) >= last


@pytest.mark.serial
def test_opening_after_a_kill_takes_no_time(tmp_path: Path) -> None:
    path = tmp_path / "store"
    killed_store(path)
    started = time.monotonic()
    Store.open(path).close()
    assert time.monotonic() - started < 2.0
    assert verify(path).ok

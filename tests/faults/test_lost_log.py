"""A catalog that has lost its log, or is older than the segments: no row is cleared, and repair lists all of them."""

import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from tests.writing import write_episode

from understudy.core import DamageError
from understudy.core.examples import random_episode, small_spec
from understudy.replay import EVERYTHING, Reader, Sampler, Store, compact, repair, verify
from understudy.replay.format.paths import CATALOG_FILE, LOCK_FILE, MARK_FILE, SEAL_FILE, segment_files, segment_path

NUM_EPISODES = 8
LOG = f"{CATALOG_FILE}-wal"

WRITER = f"""
import os, shutil, sys
from pathlib import Path
from understudy.core.examples import random_episode, small_spec
from understudy.replay import Store
store = Store.open(sys.argv[1], segment_bytes=2**18)
writer = store.writer("w", small_spec(), commit_steps=4, background=False)
for seed in range({NUM_EPISODES}):
    episode = random_episode(small_spec(), 9, seed)
    writer.begin(seed=seed)
    for step in episode.steps():
        writer.append(step)
    writer.end(episode.last_observation, success=seed % 2 == 0)
    if seed == {NUM_EPISODES} // 2:
        store.catalog.checkpoint()
print(store.last_commit, flush=True)
os.kill(os.getpid(), 9)
"""


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """A store whose writer was killed, with the number of its last commit; half of it is only in the log."""
    path = tmp_path_factory.mktemp("killed") / "store"
    done = subprocess.run([sys.executable, "-c", WRITER, path], stdout=subprocess.PIPE, check=False)
    assert done.returncode == -9
    return path, int(done.stdout)


@pytest.fixture
def path(killed: tuple[Path, int], tmp_path: Path) -> Path:
    shutil.copytree(killed[0], tmp_path / "store")
    return tmp_path / "store"


def flip_first(path: Path) -> None:
    flip(path / LOG, 17)


def flip_last(path: Path) -> None:
    flip(path / LOG, (path / LOG).stat().st_size - 100)  # in the frames of the last commit


def flip(file: Path, offset: int) -> None:
    content = bytearray(file.read_bytes())
    content[offset] ^= 1
    file.write_bytes(content)


def cut(path: Path) -> None:
    os.truncate(path / LOG, (path / LOG).stat().st_size // 2)


def remove(path: Path) -> None:
    (path / LOG).unlink()


def contents(path: Path) -> dict[Path, bytes]:
    """All files, but the empty log and the -shm file that SQLite makes for every reader."""
    found = {file: file.read_bytes() for file in path.rglob("*") if file.is_file() and not file.name.endswith("-shm")}
    return {file: content for file, content in found.items() if content or not file.name.endswith("-wal")}


@pytest.mark.parametrize("marked", [True, False], ids=["marked", "of an earlier version"])
@pytest.mark.parametrize("lose", [flip_first, cut, remove])
def test_a_lost_log_is_refused_and_repaired(
    lose: Callable[[Path], None], marked: bool, path: Path, killed: tuple[Path, int]
) -> None:
    lose(path)
    if not marked:
        (path / MARK_FILE).unlink()
    check_refused(path)
    check_repaired(path, killed[1])


def test_the_mark_proves_the_loss_of_the_last_commit(path: Path, killed: tuple[Path, int]) -> None:
    flip_last(path)
    last = killed[1]
    with pytest.raises(DamageError, match=f"it ends with commit {last - 1}, but commit {last} was acknowledged"):
        Store.open(path)
    check_refused(path)
    check_repaired(path, last)


def test_without_a_mark_rows_of_the_next_commit_count_as_not_acknowledged(path: Path, killed: tuple[Path, int]) -> None:
    flip_last(path)
    (path / MARK_FILE).unlink()
    assert any("are not in the catalog" in problem for problem in verify(path).problems)  # repair would keep them
    with Store.open(path) as store:
        assert store.last_commit == killed[1] - 1
    assert verify(path).ok


def test_the_mark_proves_the_loss_of_a_commit_without_rows(path: Path, killed: tuple[Path, int]) -> None:
    Store.open(path).close()
    store = Store.open(path)
    store.label([1], {"seen": "yes"})
    copy = path.with_name("copy")
    shutil.copytree(path, copy)  # as a kill would leave it
    store.close()
    remove(copy)
    check_refused(copy)
    check_repaired(copy, killed[1] + 1)


@pytest.mark.parametrize("segment_bytes", [2**20, 4000], ids=["in the same segment", "in new segments"])
def test_a_catalog_that_is_older_than_the_segments(segment_bytes: int, tmp_path: Path) -> None:
    path = tmp_path / "store"
    write(path, range(3), segment_bytes)
    old = {name: (path / name).read_bytes() for name in (CATALOG_FILE, SEAL_FILE)}
    write(path, range(3, NUM_EPISODES), segment_bytes)
    with Reader(path) as reader:
        last = reader.last_commit()
    for name, content in old.items():
        (path / name).write_bytes(content)
    check_refused(path)
    (path / MARK_FILE).unlink()
    check_refused(path)
    check_repaired(path, last)


def test_a_compaction_that_the_catalog_has_lost(tmp_path: Path) -> None:
    path = tmp_path / "store"
    write(path, range(NUM_EPISODES), 4000)
    with Store.open(path) as store:
        store.delete([2])
    old = {name: (path / name).read_bytes() for name in (CATALOG_FILE, SEAL_FILE)}
    with Store.open(path) as store:
        assert compact(store, min_dead=0.01).rows_moved
    for name, content in old.items():
        (path / name).write_bytes(content)
    (path / MARK_FILE).unlink()
    check_refused(path)
    assert repair(path).after.ok
    with Store.open(path) as store:
        compact(store)
    assert seeds(path) == [seed for seed in range(NUM_EPISODES) if seed != 1]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ("update segments set num_rows = num_rows - 13", "it lists rows behind the last row of"),
        ("update segments set heap_used = heap_used - 100", "has values of listed rows behind the last one"),
    ],
)
def test_numbers_in_the_catalog_that_would_clear_rows(
    change: str, text: str, path: Path, killed: tuple[Path, int]
) -> None:
    with closing(sqlite3.connect(path / CATALOG_FILE)) as db, db:
        db.execute(change)
    db.close()
    with pytest.raises(DamageError, match=text):
        Store.open(path)
    check_refused(path)
    check_repaired(path, killed[1])


def test_a_damaged_shm_file_is_made_again(path: Path, killed: tuple[Path, int]) -> None:
    (path / f"{CATALOG_FILE}-shm").write_bytes(os.urandom(40_000))
    with Store.open(path) as store:
        assert store.last_commit == killed[1]
    assert seeds(path) == [*range(NUM_EPISODES)]


def test_a_damaged_mark_is_found_and_written_again(path: Path, killed: tuple[Path, int]) -> None:
    flip(path / MARK_FILE, 3)
    (problem,) = verify(path).problems
    assert problem == f"{path / MARK_FILE}: not what was written; run `understudy repair`, which writes it again"
    assert repair(path).after.ok
    assert seeds(path) == [*range(NUM_EPISODES)]


def test_rows_that_were_never_acknowledged_are_cleared(path: Path, killed: tuple[Path, int]) -> None:
    """What a crash leaves before the transaction: rows behind the last, or in a file of their own."""
    shutil.copy(segment_files(path)[0], path / "before")
    store = Store.open(path)
    writer = store.writer("late", small_spec())
    write_episode(writer, random_episode(small_spec(), 5, 99))
    with_rows = segment_files(path)[0].read_bytes()
    last = store.last_commit - 1
    store.close()
    with closing(sqlite3.connect(path / CATALOG_FILE)) as db, db:
        for table, column in (("commits", "id"), ("spans", "commit_id"), ("episodes", "changed")):
            db.execute(f"delete from {table} where {column} > ?", (last,))
        db.execute("update segments set num_rows = (select max(first_row + num_rows) from spans)")
    db.close()
    (path / SEAL_FILE).unlink()
    (path / MARK_FILE).unlink()
    segment_path(path, 2).write_bytes(with_rows.replace(b'"segment":"1"', b'"segment":"2"', 1))
    assert segment_files(path) == [segment_path(path, 1), segment_path(path, 2)]
    with Store.open(path) as store:
        assert store.last_commit == last
    assert segment_files(path) == [segment_path(path, 1)]
    assert verify(path).notes == []
    assert seeds(path) == [*range(NUM_EPISODES)]


# ---- what is checked


def write(path: Path, numbers: range, segment_bytes: int) -> None:
    with Store.open(path, segment_bytes=segment_bytes) as store:
        writer = store.writer("w", small_spec(), commit_steps=4, background=False)
        for seed in numbers:
            episode = random_episode(small_spec(), 9, seed)
            writer.begin(seed=seed)
            for step in episode.steps():
                writer.append(step)
            writer.end(episode.last_observation, success=seed % 2 == 0)


def check_refused(path: Path) -> None:
    """Every way to open it says what to do, and changes no file."""
    before = contents(path)
    with pytest.raises(DamageError, match="run `understudy repair`"):
        Store.open(path)
    with pytest.raises(DamageError, match="run `understudy repair`"):
        Reader(path)
    with pytest.raises(DamageError, match="run `understudy repair`"):
        Sampler(path, EVERYTHING, batch_size=4, seed=1)
    assert not verify(path).ok
    after = contents(path)
    after.pop(path / LOCK_FILE)
    before.pop(path / LOCK_FILE, None)  # its content is for people
    assert after == before


def check_repaired(path: Path, last_commit: int) -> None:
    report = repair(path)
    assert report.after.ok, report.after.problems
    assert report.rows_dropped == 0
    assert seeds(path) == [*range(NUM_EPISODES)]
    with Store.open(path) as store:
        assert store.last_commit > last_commit  # no number is given twice
    assert verify(path).ok


def seeds(path: Path) -> list[int | None]:
    """The seeds of the episodes; each is as it was written."""
    with Reader(path) as reader:
        records = list(reader.episodes())
        for record in records:
            seed = int(record.info.seed or 0)
            written = random_episode(small_spec(), 9, seed)
            assert reader.read(record.id).equals(replace(written, info=record.info))
            assert (record.state, record.info.success) == ("ended", seed % 2 == 0)
    return [record.info.seed for record in records]

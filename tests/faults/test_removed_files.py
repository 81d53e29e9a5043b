"""Files that somebody removes under a writing process: it stops, and acknowledges nothing into deleted files."""

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.writing import write_episode

from understudy.core import StoreFailedError
from understudy.core.examples import random_episode, small_spec
from understudy.replay import Reader, Store, Writer, repair, verify
from understudy.replay.format.paths import CATALOG_FILE, LOCK_FILE, SEGMENTS_DIRECTORY, segment_path

TEXT = "removed, moved or replaced while this process writes to the store; nothing more is acknowledged"
EPISODES = [random_episode(small_spec(), 9, seed) for seed in range(4)]


def remove(name: str) -> Callable[[Path], None]:
    return lambda path: (path / name).unlink()


def replace_segment(path: Path) -> None:
    file = segment_path(path, 1)
    shutil.copy(file, path / "copy")
    (path / "copy").replace(file)


def begin(path: Path, name: str = "w") -> tuple[Store, Writer]:
    store = Store.open(path, segment_bytes=2**16)
    return store, store.writer(name, small_spec(), commit_steps=4, background=False)


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (remove(LOCK_FILE), LOCK_FILE),
        (remove(CATALOG_FILE), CATALOG_FILE),
        (remove(f"{CATALOG_FILE}-wal"), f"{CATALOG_FILE}-wal"),
        (remove(f"{CATALOG_FILE}-shm"), f"{CATALOG_FILE}-shm"),
        (lambda path: shutil.rmtree(path / SEGMENTS_DIRECTORY), "segments/00000001.safetensors"),
        (replace_segment, "segments/00000001.safetensors"),
        (lambda path: path.rename(path.with_name("moved")), LOCK_FILE),
        (shutil.rmtree, LOCK_FILE),
    ],
    ids=["lock", "catalog", "log", "shm", "segments", "segment replaced", "store moved", "store"],
)
def test_a_writer_whose_files_are_removed_stops(damage: Callable[[Path], None], named: str, tmp_path: Path) -> None:
    path = tmp_path / "store"
    store, writer = begin(path)
    write_episode(writer, EPISODES[0])
    damage(path)
    with pytest.raises(StoreFailedError, match=TEXT) as error:
        write_episode(writer, EPISODES[1])
    assert str(error.value).startswith(f"{path / named}: ")
    with pytest.raises(StoreFailedError, match=TEXT):
        store.label([1], {"seen": "yes"})
    store.close()
    assert not (path / "catalog.seal").exists()


@pytest.mark.parametrize("name", [LOCK_FILE, f"{CATALOG_FILE}-shm"])
def test_an_edit_is_not_acknowledged_either(name: str, tmp_path: Path) -> None:
    store, writer = begin(tmp_path / "store")
    write_episode(writer, EPISODES[0])
    (tmp_path / "store" / name).unlink()
    with pytest.raises(StoreFailedError, match=TEXT):
        store.label([1], {"seen": "yes"})
    store.close()


def test_what_was_acknowledged_before_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "store"
    store, writer = begin(path)
    write_episode(writer, EPISODES[0])
    (path / CATALOG_FILE).unlink()
    with pytest.raises(StoreFailedError):
        write_episode(writer, EPISODES[1])
    store.close()
    assert repair(path).after.ok
    with Reader(path) as reader:
        assert reader.read(1).equals(EPISODES[0])


def test_two_writers_never_write_over_each_other(tmp_path: Path) -> None:
    """The second one gets in because the lock of the first was removed; each has rows that were acknowledged."""
    path = tmp_path / "store"
    first, one = begin(path, "first")
    write_episode(one, EPISODES[0])
    one.begin()
    steps = list(EPISODES[1].steps())
    for step in steps[:7]:  # four of them are committed
        one.append(step)
    (path / LOCK_FILE).unlink()
    second, two = begin(path, "second")
    write_episode(two, EPISODES[2])
    with pytest.raises(StoreFailedError, match=TEXT):
        one.append(steps[7])
    write_episode(two, EPISODES[3])
    first.close()
    second.close()
    assert verify(path).ok
    with Reader(path) as reader:
        assert reader.read(1).equals(EPISODES[0])
        assert reader.record(2).num_rows == 4
        assert reader.read(3).equals(EPISODES[2])
        assert reader.read(4).equals(EPISODES[3])
        # A process that has the old lock may be in the middle of a write, so the second uses a segment of its own.
        segments = {int(e): int(s) for e, s in reader.catalog.select("select distinct episode, segment from spans")}
    assert segments == {1: 1, 2: 1, 3: 2, 4: 2}


SECOND = """
import os, sys
from understudy.core.examples import random_episode, small_spec
from understudy.replay import Store
from tests.writing import write_episode
store = Store.open(sys.argv[1], segment_bytes=2**16)
write_episode(store.writer("w", small_spec()), random_episode(small_spec(), 9, 0))
print("written", flush=True)
sys.stdin.read()
os._exit(0)
"""


def test_a_store_in_the_place_of_a_removed_one_keeps_its_log(tmp_path: Path) -> None:
    """SQLite removes its log by name when the last connection is closed, also if the name is another's by now."""
    path = tmp_path / "store"
    store, writer = begin(path)
    write_episode(writer, EPISODES[1])
    shutil.rmtree(path)
    with subprocess.Popen(
        [sys.executable, "-c", SECOND, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as second:
        assert second.stdout is not None
        assert second.stdout.readline() == b"written\n"
        store.close()
        del store, writer
        second.kill()
    with Reader(path) as reader:
        assert reader.read(1).equals(EPISODES[0])

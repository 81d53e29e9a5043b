"""Reading where this user may not write: a store that was closed, that is being written, that was killed, and a log."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.writing import write_episode

from understudy.core import StoreError
from understudy.core.examples import random_episode, small_spec
from understudy.replay import Reader, Store
from understudy.replay.format.catalog import Catalog
from understudy.replay.format.paths import CATALOG_FILE

READ_ALL = """
import os, sys
from pathlib import Path
from understudy.core import StoreError
from understudy.replay import EVERYTHING, Reader, Sampler, verify
from understudy.replay.maintain.summary import summarize
path = Path(sys.argv[1])
assert not os.access(path, os.W_OK)
try:
    report = verify(path)
    with Reader(path) as reader, Sampler(path, EVERYTHING, batch_size=4) as sampler:
        episodes = [reader.read(record.id) for record in reader.episodes()]
        sampler.follow()
        assert len(sampler.sample().reward) == 4
    assert summarize(path).num_dead_rows == 0
    print(report.ok, report.commit, len(episodes), sum(len(e) for e in episodes), len(sampler))
except StoreError as error:
    print(type(error).__name__, error)
"""


def _obey_permissions() -> None:
    """Also for root: the program that is started next may not write where the mode forbids it."""
    drop_from_bounding_set, may_override_mode = 24, 1  # prctl's number, capability
    ctypes.CDLL(None).prctl(drop_from_bounding_set, may_override_mode, 0, 0, 0)


def read_all(path: Path) -> str:
    """What a process without the right to write sees of the store, in one line."""
    done = subprocess.run(
        [sys.executable, "-c", READ_ALL, str(path)],
        check=False,
        capture_output=True,
        text=True,
        preexec_fn=_obey_permissions,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


@pytest.fixture
def read_only(path: Path) -> Iterator[Path]:
    """Called before what needs the store writable: the tests lock it."""
    yield path
    unlock(path)


def lock(path: Path) -> None:
    for directory in (path, path / "segments"):
        directory.chmod(0o555)


def unlock(path: Path) -> None:
    for directory in (path, path / "segments"):
        directory.chmod(0o755)


def write_one(store: Store, seed: int) -> None:
    writer = store.writer(f"more-{seed}", small_spec())
    write_episode(writer, random_episode(small_spec(), 5, seed))
    writer.flush()


def kill_a_writer(path: Path) -> None:
    pid = os.fork()
    if pid == 0:
        store = Store.open(path)
        write_one(store, 9)
        os._exit(0)  # as a kill: nothing is closed
    os.waitpid(pid, 0)


def test_a_closed_store_is_read(read_only: Path) -> None:
    lock(read_only)
    assert read_all(read_only) == "True 5 4 20 20"


def test_a_store_that_another_process_writes_is_read(read_only: Path) -> None:
    with Store.open(read_only) as store:
        write_one(store, 9)
        lock(read_only)
        assert read_all(read_only) == "True 7 5 25 25"
        unlock(read_only)


def test_a_store_whose_writer_was_killed_is_read(read_only: Path) -> None:
    kill_a_writer(read_only)
    lock(read_only)
    assert read_all(read_only) == "True 7 5 25 25"


def test_a_log_alone_is_refused_and_not_called_damage(read_only: Path, tmp_path: Path) -> None:
    kill_a_writer(read_only)
    (read_only / f"{CATALOG_FILE}-shm").unlink()
    lock(read_only)
    said = read_all(read_only)
    assert said.startswith("StoreFormatError ")
    assert "catalog.sqlite-wal has commits that SQLite reads only where it may write; copy the directory" in said
    copy = Path(shutil.copytree(read_only, tmp_path / "copy"))  # what the error says
    unlock(copy)
    with Reader(copy) as reader:
        assert len(list(reader.episodes())) == 5


def test_a_reader_without_locks_notices_the_writer(path: Path) -> None:
    """Without SQLite's locks, pages of two commits would be mixed: so it says so, before and after the close."""
    catalog = Catalog.open(path / CATALOG_FILE, immutable=True)
    assert catalog.last_commit() == 5
    with Store.open(path) as store:
        with pytest.raises(StoreError, match=r"another process has written to the store since .*; open it again"):
            catalog.last_commit()
        write_one(store, 9)
        with pytest.raises(StoreError, match="open it again"):
            list(catalog.episodes())
    with pytest.raises(StoreError, match="open it again"):
        catalog.spans()
    catalog.close()

"""Reader: what it reads, what it reports as new, and what it refuses."""

import gc
import sqlite3
from pathlib import Path

import pytest
from tests.writing import write_episode

from understudy.core import DamageError, StoreError, StoreFailedError, StoreFormatError
from understudy.core.examples import random_episode, small_spec
from understudy.replay import Reader, Store, repair
from understudy.replay.format.paths import CATALOG_FILE, segment_files
from understudy.replay.format.segment import read_layout


def test_episodes_come_back_as_they_were_written(path: Path) -> None:
    with Reader(path) as reader:
        assert reader.num_open_segments == 0
        for record in reader.episodes():
            assert reader.read(record.id).equals(random_episode(small_spec(), 5, record.id - 1))
        assert reader.num_open_segments == 1
    assert reader.num_open_segments == 0  # closed with it


def test_follow_reports_each_change_once(path: Path) -> None:
    with Store.open(path) as store, Reader(path) as reader:
        changes = reader.follow()
        assert changes.episodes == (1, 2, 3, 4)
        assert changes.spans["num_rows"].sum() == 4 * 6
        assert not reader.follow()
        store.label([3], {"seen": "yes"})
        assert reader.follow().episodes == (3,)
        write_episode(store.writer("w", small_spec()), random_episode(small_spec(), 2, 9))
        changes = reader.follow(timeout_s=1.0)
        assert changes.episodes == (5,)
        assert changes.commit == reader.commit == reader.last_commit()


def test_a_reader_that_was_open_during_a_repair_says_so(path: Path) -> None:
    with Reader(path) as reader:
        num_episodes = len(reader.follow().episodes)
        catalog = path / CATALOG_FILE
        content = bytearray(catalog.read_bytes())
        content[5000] ^= 1
        catalog.write_bytes(content)
        assert repair(path).after.ok
        with Store.open(path) as store:
            write_episode(store.writer("w", small_spec()), random_episode(small_spec(), 2, 9))
        with pytest.raises(StoreFailedError, match="open the store again"):
            reader.follow()
    with Reader(path) as reader:
        assert len(reader.follow().episodes) == num_episodes + 1


def test_rows_are_flat_columns_with_the_last_observation(path: Path) -> None:
    with Reader(path) as reader:
        record, columns = reader.rows(2)
        assert record.num_rows == len(columns["observation"]) == 6
        assert columns["is_step"].tolist() == [True] * 5 + [False]


def test_a_damaged_row_is_named(path: Path) -> None:
    (file,) = segment_files(path)
    with file.open("r+b") as content:
        content.seek(read_layout(file).columns["action"].at(8))
        content.write(b"\xff\xff\xff")
    with Reader(path) as reader:
        reader.read(1)
        with pytest.raises(DamageError, match=r"row 8 \(episode 2, index 2\) is not what was written; run `understudy"):
            reader.read(2)


def test_what_is_not_there_is_refused(path: Path, tmp_path: Path) -> None:
    with Reader(path) as reader:
        with pytest.raises(StoreError, match="there is no episode 9; see `understudy info --episodes`"):
            reader.record(9)
        with pytest.raises(DamageError, match="segment 7 is not in the catalog"):
            reader.segment(7)
    with pytest.raises(StoreFormatError, match="there is no such directory"):
        Reader(tmp_path / "nowhere")


def test_a_reader_that_nobody_closed_closes_its_catalog(path: Path) -> None:
    reader = Reader(path)
    connection = reader.catalog._db
    del reader
    gc.collect()
    with pytest.raises(sqlite3.ProgrammingError, match="closed"):
        connection.execute("select 1")

"""Repair: whole rows stay, in episodes without gaps; what is lost is reported."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from understudy.core.examples import random_episode, small_spec
from understudy.replay import Reader, repair, verify
from understudy.replay.format.catalog import ADDED_COLUMNS, _tables
from understudy.replay.format.paths import CATALOG_FILE, SEAL_FILE, segment_files, segment_path
from understudy.replay.format.segment import read_layout


def damage(path: Path, column: str, row: int) -> None:
    (file,) = segment_files(path)
    with file.open("r+b") as stream:
        stream.seek(read_layout(file).columns[column].at(row))
        stream.write(b"\xa5\x5a")


def test_nothing_is_changed_if_nothing_is_wrong(path: Path) -> None:
    files = [path / CATALOG_FILE, path / SEAL_FILE, *segment_files(path)]
    before = [file.read_bytes() for file in files]
    report = repair(path)
    assert (report.actions, report.before.ok) == ([], True)
    assert [file.read_bytes() for file in files] == before


def test_rows_after_a_damaged_one_become_an_episode_of_their_own(path: Path) -> None:
    damage(path, "reward", 8)  # episode 2, index 2
    report = repair(path)
    assert report.after.ok
    assert (report.rows_dropped, report.episodes_trimmed, report.episodes_salvaged, report.episodes_lost) == (
        1,
        1,
        1,
        0,
    )
    assert "episode 2: kept rows 0 to 1 of 6" in report.actions
    with Reader(path) as reader:
        assert [(r.id, r.num_rows, r.state) for r in reader.episodes()] == [
            (1, 6, "ended"),
            (2, 2, "cut"),
            (3, 6, "ended"),
            (4, 6, "ended"),
            (5, 3, "ended"),
        ]
        labels = reader.record(5).info.labels
        assert (labels["salvaged_from"], labels["salvaged_index"]) == ("2", "3")
        assert reader.read(4).equals(random_episode(small_spec(), 5, 3))


def test_an_episode_without_its_first_row_is_lost_as_such(path: Path) -> None:
    damage(path, "observation", 0)
    report = repair(path)
    assert (report.after.ok, report.episodes_lost, report.episodes_salvaged) == (True, 1, 1)
    with Reader(path) as reader:
        assert [record.id for record in reader.episodes()] == [2, 3, 4, 5]


@pytest.mark.parametrize("how", ["gone", "garbage"])
def test_a_catalog_is_rebuilt_from_the_segments(path: Path, how: str) -> None:
    if how == "gone":
        (path / CATALOG_FILE).unlink()
    else:
        (path / CATALOG_FILE).write_bytes(b"\0" * 40_000)
    report = repair(path)
    assert report.after.ok
    assert report.actions[0].startswith("rebuilt the catalog from the segments; the old one is in ")
    with Reader(path) as reader:
        for record in reader.episodes():
            assert reader.read(record.id).equals(random_episode(small_spec(), 5, record.id - 1))
        assert len(list(reader.episodes())) == 4


@pytest.mark.parametrize("value", ["'seven'", "x'00'", "1.5"])
def test_a_writer_whose_row_is_damaged_does_not_stop_it(path: Path, value: str) -> None:
    db = sqlite3.connect(path / CATALOG_FILE)
    with db:
        db.execute(f"update writers set last_seq = {value}")
    db.close()
    assert repair(path).after.ok
    with Reader(path) as reader:
        assert [record.num_rows for record in reader.episodes()] == [6, 6, 6, 6]
        assert all(isinstance(writer.last_seq, int) for writer in reader.catalog.writers())


NAMES = [(table, name) for table, names in _tables().items() for name in names if table != "sqlite_sequence"]
ADDED = [(table, name) for table, names in ADDED_COLUMNS.items() for name in names]  # an older store has none of them


@pytest.mark.parametrize(("table", "column"), NAMES)
def test_a_damaged_name_in_the_schema_does_not_stop_it(path: Path, table: str, column: str) -> None:
    """SQLite's own check finds nothing wrong then."""
    with Reader(path) as reader:
        before = [reader.read(record.id) for record in reader.episodes()]
    with closing(sqlite3.connect(path / CATALOG_FILE)) as db:
        db.execute(f"alter table {table} rename column {column} to {column}x")
    (path / SEAL_FILE).unlink()
    assert verify(path).ok == ((table, column) in ADDED)
    report = repair(path)
    assert report.after.ok
    assert report.rows_dropped == report.episodes_lost == 0
    with Reader(path) as reader:
        after = [reader.read(record.id) for record in reader.episodes()]
    assert len(after) == len(before)
    assert all(a.equals(b) for a, b in zip(after, before, strict=True))


def test_a_short_file_gets_its_size_back(path: Path) -> None:
    (file,) = segment_files(path)
    size = file.stat().st_size
    with file.open("r+b") as stream:
        stream.truncate(size - 100)
    report = repair(path)
    assert report.after.ok
    assert f"{file}: restored its size; the bytes that were cut off are lost" in report.actions
    assert file.stat().st_size == size


def test_the_rows_of_a_file_that_is_gone_are_reported(path: Path) -> None:
    segment_path(path, 1).unlink()
    report = repair(path)
    assert (report.after.ok, report.rows_dropped, report.episodes_lost) == (True, 24, 4)

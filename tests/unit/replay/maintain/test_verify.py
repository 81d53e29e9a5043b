"""Verify: finds damage in every kind of byte, and calls leftovers of a crash harmless."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from understudy.core import StoreFormatError
from understudy.core.examples import random_episode, small_spec
from understudy.replay import Reader, repair, verify
from understudy.replay.format.paths import CATALOG_FILE, SEAL_FILE, segment_files, segment_path
from understudy.replay.format.segment import read_layout


def overwrite(file: Path, offset: int, content: bytes = b"\xa5\x5a") -> None:
    with file.open("r+b") as stream:
        stream.seek(offset)
        stream.write(content)


def test_a_good_store_is_read_whole(path: Path) -> None:
    calls = []
    report = verify(path, progress=lambda finished, total: calls.append((finished, total)))
    assert report.ok
    assert (report.num_segments, report.num_episodes, report.num_rows, report.notes) == (1, 4, 24, [])
    assert calls == [(0, 1), (1, 1)]


@pytest.mark.parametrize(
    ("column", "row", "text"),
    [
        ("reward", 8, "episode 2: index 2 (row 8) is not what was written"),
        ("row/checksum", 23, "episode 4: index 5 (row 23) is not what was written"),
        ("observation", 24, "are after the last row and not zero"),
    ],
)
def test_a_changed_byte_is_found(path: Path, column: str, row: int, text: str) -> None:
    (file,) = segment_files(path)
    overwrite(file, read_layout(file).columns[column].at(row))
    (problem,) = verify(path).problems
    assert problem.startswith(f"{file}: ")
    assert text in problem


def test_damage_to_a_record_and_to_the_header(path: Path) -> None:
    (file,) = segment_files(path)
    overwrite(file, read_layout(file).heap_offset + 10)
    (problem,) = verify(path).problems
    assert "episode 1: the record at row 0 is not what was written" in problem
    overwrite(file, 20)
    (problem,) = verify(path).problems
    assert "the header is not the one that was written; run `understudy verify`, then `understudy repair`" in problem


def test_a_segment_that_is_gone(path: Path) -> None:
    segment_path(path, 1).unlink()
    (problem,) = verify(path).problems
    assert "the file is gone; restore it from a backup, or run `understudy repair`" in problem


def test_a_catalog_that_changed_or_is_gone(path: Path) -> None:
    overwrite(path / CATALOG_FILE, 5000)
    (problem,) = verify(path).problems
    assert "it changed after the store was closed" in problem
    (path / CATALOG_FILE).unlink()
    (problem,) = verify(path).problems
    assert "the catalog is gone; run `understudy repair`" in problem


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ("update spans set segment = 9 where id = 2", "it lists rows in segment 9 and not the segment"),
        ("update spans set episode = 9 where id = 2", "it lists rows of episode 9 and not the episode"),
        ("update spans set first_index = 1 where id = 2", "episode 2 has 6 rows, and its spans do not cover them"),
    ],
)
def test_numbers_of_a_catalog_that_is_not_sealed(path: Path, change: str, text: str) -> None:
    (path / SEAL_FILE).unlink()
    with closing(sqlite3.connect(path / CATALOG_FILE)) as db:
        db.execute(change)
        db.commit()
    assert f"{path / CATALOG_FILE}: {text}" in verify(path).problems
    assert repair(path).after.ok
    with Reader(path) as reader:  # the segments are whole, so nothing is lost
        for number in range(4):
            assert reader.read(number + 1).equals(random_episode(small_spec(), 5, number))


def test_a_file_that_the_catalog_does_not_list_is_a_note(path: Path) -> None:
    segment_path(path, 9).write_bytes(b"left by a crash")
    report = verify(path)
    assert report.ok
    (note,) = report.notes
    assert "the catalog does not list it (a crash left it); `understudy compact` removes it" in note


def test_what_is_no_store(tmp_path: Path) -> None:
    with pytest.raises(StoreFormatError, match="not an Understudy store"):
        verify(tmp_path)

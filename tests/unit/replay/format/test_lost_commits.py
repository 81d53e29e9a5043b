"""Lost commits: what is proof, and what is not. tests/faults/test_lost_log.py has what comes of it."""

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from understudy.core import DamageError
from understudy.replay.format.catalog import Catalog
from understudy.replay.format.commit_mark import CommitMark
from understudy.replay.format.lost_commits import check_commits, lost_commits, newest_commit
from understudy.replay.format.paths import CATALOG_FILE, MARK_FILE, SEAL_FILE, segment_path


def test_a_file_that_is_no_segment_has_no_commits(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"nothing")
    assert newest_commit(tmp_path / "x") == 0


def found(path: Path, *, being_written: bool = False) -> str | None:
    catalog = Catalog.open(path / CATALOG_FILE)
    try:
        return lost_commits(path, catalog, sealed=False, being_written=being_written)
    finally:
        catalog.close()


def go_back(path: Path, num_commits: int) -> None:
    """Make the catalog what it was so many commits ago."""
    (path / SEAL_FILE).unlink()
    (path / MARK_FILE).unlink()
    with closing(sqlite3.connect(path / CATALOG_FILE)) as db, db:
        (last,) = db.execute("select max(id) from commits").fetchone()
        for table, column in (("commits", "id"), ("spans", "commit_id"), ("episodes", "changed")):
            db.execute(f"delete from {table} where {column} > ?", (last - num_commits,))
        db.execute("update segments set num_rows = (select max(first_row + num_rows) from spans)")
    db.close()


def test_a_sound_store_has_lost_nothing(path: Path) -> None:
    assert found(path) is None


def test_rows_of_the_next_commit_are_no_proof_and_later_ones_are(path: Path) -> None:
    go_back(path, 1)
    assert found(path) is None
    CommitMark(path, 5).close()
    assert "it ends with commit 4, but commit 5 was acknowledged (`catalog.mark`)" in str(found(path))
    go_back_once_more(path)
    assert "00000001.safetensors has rows of commit 5 that it does not list" in str(found(path))
    assert found(path, being_written=True) is None  # they may be those of the process that writes


def go_back_once_more(path: Path) -> None:
    (path / SEAL_FILE).touch()
    go_back(path, 1)


def test_a_file_that_is_not_listed(path: Path) -> None:
    copy = segment_path(path, 2)
    content = segment_path(path, 1).read_bytes()
    copy.write_bytes(content.replace(b'"segment":"1"', b'"segment":"2"', 1))
    assert newest_commit(copy) == 5
    assert found(path) is None  # compaction may have left it
    segment_path(path, 1).unlink()
    assert "is gone, and files are there that it does not list" in str(found(path))


def test_the_error_names_the_catalog(path: Path) -> None:
    CommitMark(path, 100).close()
    catalog = Catalog.open(path / CATALOG_FILE)
    with pytest.raises(DamageError, match=r"catalog\.sqlite: it ends with commit 5, but commit 100 was acknowledged"):
        check_commits(path, catalog, sealed=True)
    catalog.close()
    shutil.rmtree(path)

"""Catalog: what it lists, and what its errors mean; decided by SQLite's codes, not by its words."""

import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from understudy.core import (
    DamageError,
    EpisodeInfo,
    StoreClosedError,
    StoreError,
    StoreFailedError,
    StoreFormatError,
)
from understudy.core.examples import small_spec
from understudy.replay import Reader, Store, repair, verify
from understudy.replay.format.catalog import Catalog
from understudy.replay.format.paths import CATALOG_FILE
from understudy.replay.format.records import EpisodeRecord, SegmentRecord, SpanRecord


@pytest.fixture
def catalog(tmp_path: Path):
    made = Catalog.create(tmp_path / CATALOG_FILE, "store-id")
    yield made
    made.close()


def episode(number: int, **changes) -> EpisodeRecord:
    made = EpisodeRecord(
        id=number, writer=1, number=number, spec=1, state="ended", info=EpisodeInfo(), begun=1, changed=1, begun_at=0.0
    )
    return replace(made, **changes)


def test_what_is_put_in_comes_out(catalog: Catalog) -> None:
    spec = small_spec()
    segment = SegmentRecord(id=3, spec=1, capacity=64, heap_bytes=100, num_rows=5, heap_used=7, sealed=False)
    with catalog.transaction(write=True):
        assert catalog.put_spec(spec) == catalog.put_spec(spec) == 1
        writer = catalog.add_writer("arm", "one")
        catalog.put_last_seq(writer.id, 4, (7, 2**64 - 1))
        catalog.put_segment(segment)
        for number in (1, 2, 5):
            catalog.put_episode(episode(number))
        span = SpanRecord(episode=5, first_index=0, segment=3, first_row=1, num_rows=4, row_check=-8)
        catalog.add_span(6, span)
        catalog.add_commit(6, 12.5, 4)
    assert catalog.spec(1) == spec
    assert catalog.writer("arm", "one") == replace(writer, last_seq=4, checks=(7, 2**64 - 1))
    assert catalog.writer("arm", "two") is None
    assert (catalog.segment(3), catalog.segment(4)) == (segment, None)
    assert (catalog.last_commit(), catalog.last_segment_id(), catalog.last_episode_id()) == (6, 3, 5)
    assert [record.id for record in catalog.episodes("id > ?", (1,))] == [2, 5]
    found = catalog.spans()
    assert found[["commit_id", "episode", "first_row", "num_rows", "row_check"]].tolist() == [(6, 5, 1, 4, -8)]
    assert catalog.episode_specs(2, 5).tolist() == [[2, 1], [5, 1]]
    assert catalog.has_episode(1, 5)
    assert not catalog.has_episode(2, 5)


def test_episodes_come_in_pages(catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("understudy.replay.format.catalog.PAGE_EPISODES", 2)
    with catalog.transaction(write=True):
        for number in range(1, 6):
            catalog.put_episode(episode(number))
    assert [record.id for record in catalog.episodes()] == [1, 2, 3, 4, 5]


def test_an_edit_keeps_what_was_before(catalog: Catalog) -> None:
    before, after = episode(1), episode(1, deleted=7, changed=7)
    with catalog.transaction(write=True):
        catalog.put_episode(before)
        catalog.put_episode(after, before)
        catalog.put_episode(replace(after, num_steps=3), after)  # what no view asks for is no edit
    assert catalog.select("select commit_id, episode, state, deleted from edits") == [(7, 1, "ended", None)]


def test_live_and_dead_rows(catalog: Catalog) -> None:
    with catalog.transaction(write=True):
        for number, changes in enumerate(({}, {"deleted": 2}, {"deleted": 2, "state": "open"}), 1):
            catalog.put_episode(episode(number, **changes))
            span = SpanRecord(episode=number, first_index=0, segment=1, first_row=0, num_rows=10**number, row_check=0)
            catalog.add_span(1, span)
    assert catalog.live_rows() == {1: 1010}  # the one that is still written to is not dead
    assert catalog.dead_episodes(1) == {2}


def test_a_failed_transaction_changes_nothing(catalog: Catalog) -> None:
    def fail() -> None:
        with catalog.transaction(write=True):
            catalog.put_episode(episode(1))
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert list(catalog.episodes()) == []


# ---- errors


def test_a_typo_in_a_condition_is_the_callers_mistake(path: Path) -> None:
    with Reader(path) as reader:
        with pytest.raises(StoreError) as caught:
            reader.episodes("sucess = 1")  # at once, not when it is iterated
        assert str(caught.value) == "condition 'sucess = 1': there is no column 'sucess'; did you mean 'success'?"
        assert type(caught.value) is StoreError  # neither damage nor a failing disk
        assert len(list(reader.episodes("success = 1"))) == 4


@pytest.mark.parametrize(
    ("condition", "values"),
    [
        ("json_extract(task, '$.a') = 1", ()),  # compiles, and fails with each row
        ("abs(-9223372036854775807 - id) > 0", ()),  # integer overflow
        ("id = ?", (object(),)),  # no type of SQLite
        ("id = ?", (2**63,)),  # more than 64 bits
        ("task = ?", ("\ud800",)),  # half of a character
        ("task = '\ud800'", ()),
        ("zeroblob(2000000000) is null", ()),  # more than SQLite computes with
        ("load_extension('x')", ()),
        ("task = 'pick", ()),
        ("task = 'a' collate nosuch", ()),
    ],
)
def test_a_condition_that_cannot_be_computed_is_the_callers_mistake(path: Path, condition: str, values) -> None:
    with Reader(path) as reader:
        with pytest.raises(StoreError) as caught:
            list(reader.episodes(condition, values))
        assert type(caught.value) is StoreError
        assert "repair" not in str(caught.value)
        assert "disk" not in str(caught.value)


@pytest.mark.parametrize("sql", ["select nope from episodes", "select 1 from nowhere", "select", "select \ud800"])
def test_a_wrong_query_is_the_callers_mistake(path: Path, sql: str) -> None:
    with Reader(path) as reader, pytest.raises(StoreError) as caught:
        reader.catalog.select(sql)
    assert type(caught.value) is StoreError


def test_a_long_condition_is_cut_in_its_error(path: Path) -> None:
    with Reader(path) as reader, pytest.raises(StoreError) as caught:
        reader.episodes("(" * 5000 + "task = 'pick")
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("number", [0, -1, 2**63, 2**70, -(2**70)])
def test_no_episode_has_an_id_outside_of_64_bits(path: Path, number: int) -> None:
    with Reader(path) as reader, pytest.raises(StoreError, match=f"there is no episode {number}; see"):
        reader.read(number)
    with Store.open(path) as store:
        for edit in (store.delete, store.restore):
            with pytest.raises(StoreError, match=f"there is no episode {number}; see"):
                edit([number])


def test_an_error_whose_text_speaks_of_something_else_is_told_by_its_code(catalog: Catalog) -> None:
    """Texts that once decided: what stands in a name or a value is not SQLite's word."""
    drop(catalog, "commits")
    with pytest.raises(DamageError, match="the catalog is damaged"):  # our SQL is right, so the table is missing
        catalog.last_commit()
    with pytest.raises(StoreError, match="did you mean 'labels'"):
        catalog.episodes("label = 'the disk is full, no such table, malformed'")


def drop(catalog: Catalog, table: str) -> None:
    with closing(sqlite3.connect(catalog.path)) as db, db:
        db.execute(f"drop table {table}")
    db.close()


def test_a_missing_column_is_damage_and_not_the_conditions_fault(path: Path) -> None:
    with closing(sqlite3.connect(path / CATALOG_FILE)) as db, db:
        db.execute("alter table episodes rename column labels to etiquettes")
    db.close()
    (path / "catalog.seal").unlink()
    with (
        Reader(path) as reader,
        pytest.raises(DamageError, match=r"the catalog is damaged .*; run `understudy repair`"),
    ):
        list(reader.episodes("success = 1"))


def test_text_that_is_not_utf8_is_damage(path: Path) -> None:
    with closing(sqlite3.connect(path / CATALOG_FILE)) as db, db:
        db.execute("update episodes set task = cast(x'ff' as text) where id = 2")
    db.close()
    (path / "catalog.seal").unlink()
    with Reader(path) as reader, pytest.raises(DamageError, match="the catalog is damaged"):
        list(reader.episodes())


def test_a_damaged_name_that_sqlite_quotes_is_damage(path: Path) -> None:
    """Python's sqlite3 cannot decode SQLite's message then."""
    with closing(sqlite3.connect(path / CATALOG_FILE)) as db, db:
        db.execute("pragma writable_schema = on")
        db.execute(
            "update sqlite_master set name = cast(x'6dee7461' as text), sql = 'create tabel' where name = 'meta'"
        )
    db.close()
    (path / "catalog.seal").unlink()
    for use in (lambda: Store.open(path), lambda: Reader(path)):
        with pytest.raises(DamageError, match=r"the catalog is damaged \(.*\); run `understudy repair`"):
            use()
    assert not verify(path).ok
    assert repair(path).after.ok


def test_a_closed_catalog_says_so(path: Path) -> None:
    with Reader(path) as reader:
        pass
    with pytest.raises(StoreClosedError, match=r"read after close\(\); open the store again"):
        reader.last_commit()


def test_a_locked_catalog_names_the_other_process(catalog: Catalog) -> None:
    other = sqlite3.connect(catalog.path, isolation_level=None)
    other.execute("begin immediate")
    catalog._db.execute("pragma busy_timeout = 0")
    with (
        pytest.raises(StoreFailedError, match="another process holds the catalog's lock"),
        catalog.transaction(write=True),
    ):
        pass
    other.close()


def test_what_is_no_catalog(tmp_path: Path) -> None:
    with pytest.raises(StoreFormatError, match="not an Understudy store"):
        Catalog.open(tmp_path / CATALOG_FILE)
    (tmp_path / CATALOG_FILE).write_bytes(b"a text, and not a database at all" * 100)
    with pytest.raises(DamageError, match="run `understudy repair`"):
        Catalog.open(tmp_path / CATALOG_FILE)
    sqlite3.connect(tmp_path / "empty.sqlite").close()
    (tmp_path / "empty.sqlite").touch()
    with pytest.raises(DamageError, match="run `understudy repair`"):
        Catalog.open(tmp_path / "empty.sqlite")

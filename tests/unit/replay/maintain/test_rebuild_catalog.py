"""Rebuild: a new catalog lists what the segments hold, and what of the old one could be read."""

from dataclasses import replace
from pathlib import Path

import pytest

from understudy.core import EpisodeInfo
from understudy.replay import Reader, Store, verify
from understudy.replay.format.catalog import Catalog
from understudy.replay.format.paths import CATALOG_FILE, SEAL_FILE, segment_path
from understudy.replay.format.segment import read_layout
from understudy.replay.maintain.rebuild_catalog import RecoveredCatalog, rebuild_catalog


@pytest.fixture
def known(path: Path) -> RecoveredCatalog:
    (path / SEAL_FILE).unlink()
    return RecoveredCatalog(trusted=False, layouts={1: read_layout(segment_path(path, 1))})


def test_everything_is_found_in_the_segments(path: Path, known: RecoveredCatalog) -> None:
    with Reader(path) as reader:
        before = {record.id: record for record in reader.episodes()}
        store_id, last_commit = reader.catalog.store_id, reader.last_commit()
    damaged = rebuild_catalog(path, known)
    assert damaged.name.startswith("damaged-")
    assert (damaged / CATALOG_FILE).exists()
    assert verify(path).ok
    with Reader(path) as reader:
        assert reader.catalog.store_id == store_id
        assert reader.last_commit() == last_commit + 1  # readers see that something has changed
        for record in reader.episodes():
            old = before.pop(record.id)
            assert record == replace(old, changed=record.changed, ended_at=record.ended_at)
        assert before == {}
        assert reader.catalog.writers()[0].last_seq == 3


def test_edits_of_the_old_catalog_are_kept(path: Path, known: RecoveredCatalog) -> None:
    with Store.open(path) as store:
        store.delete([2])
        store.label([3], {"good": "yes"})
    catalog = Catalog.open(path / CATALOG_FILE)
    known.episodes = {record.id: record for record in catalog.episodes()}
    known.last_commit = catalog.last_commit()
    catalog.close()
    (path / SEAL_FILE).unlink()
    rebuild_catalog(path, known)
    with Reader(path) as reader:
        assert [record.id for record in reader.episodes()] == [1, 3, 4]
        assert reader.record(3).info.labels["good"] == "yes"
        assert reader.last_commit() == known.last_commit + 1


def test_rows_without_records_are_an_episode_of_a_lost_writer(path: Path, known: RecoveredCatalog) -> None:
    layout = known.layouts[1]
    with segment_path(path, 1).open("r+b") as stream:
        stream.seek(layout.heap_offset)
        stream.write(b"\xa5" * 8)  # the checksum of the first record
    rebuild_catalog(path, known)
    with Reader(path) as reader:
        record = reader.record(1)
        assert (record.num_steps, record.info) == (5, EpisodeInfo())
        names = {writer.id: writer.name for writer in reader.catalog.writers()}
        assert names[record.writer] == "lost/1"

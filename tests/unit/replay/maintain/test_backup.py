"""Backup: a second store with the same content, independent of the first."""

import sys
from pathlib import Path

import pytest
from tests.writing import write_episode

from understudy.core import StoreError
from understudy.core.examples import CANONICAL
from understudy.replay import Reader, Store, compact, verify
from understudy.replay.maintain.backup import backup


@pytest.mark.parametrize("linked", [True, False])
@pytest.mark.parametrize("name", CANONICAL)
def test_a_backup_is_a_store_of_its_own(name: str, linked: bool, tmp_path: Path, monkeypatch) -> None:
    if not linked:  # as across file systems
        monkeypatch.setattr(sys.modules["understudy.replay.maintain.backup"], "_link", lambda source, copy: False)
    spec, episode = CANONICAL[name]()

    def write(store: Store) -> None:
        writer = store.writer("w", spec)
        write_episode(writer, episode)

    with Store.open(tmp_path / "store", segment_bytes=30_000) as store:
        write(store)
        write(store)
        backup(store, tmp_path / "copy")
        store.delete([1, 2])
        compact(store, min_dead=0.0)
        write(store)  # the store goes on, and the copy stays as it was
        with pytest.raises(StoreError, match="a backup is made in a new directory, and this exists"):
            backup(store, tmp_path / "copy")
    assert verify(tmp_path / "copy").ok
    with Reader(tmp_path / "copy") as reader:
        assert [record.id for record in reader.episodes()] == [1, 2]
        assert reader.read(2).equals(episode)
    with Store.open(tmp_path / "copy") as copy:
        write(copy)
    assert verify(tmp_path / "copy").ok
    with Reader(tmp_path / "store") as reader:
        assert [record.id for record in reader.episodes()] == [3]
    assert verify(tmp_path / "store").ok

"""Backup: a second store with the same content, independent of the first."""

import sys
from pathlib import Path

import pytest
from tests.writing import write_episode

from understudy.core import StoreError
from understudy.core.examples import CANONICAL
from understudy.replay import Reader, Store, compact, verify
from understudy.replay.format.paths import parameters_path
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


@pytest.mark.parametrize("linked", [True, False])
def test_the_newest_parameters_are_part_of_it(linked: bool, tmp_path: Path, monkeypatch) -> None:
    if not linked:
        monkeypatch.setattr(sys.modules["understudy.replay.maintain.backup"], "_link", lambda source, copy: False)
    with Store.open(tmp_path / "store") as store:
        for version in (7, 8):
            file = parameters_path(store.path, version)
            file.parent.mkdir(exist_ok=True)
            file.write_bytes(b"weights %d" % version)
        (file.parent / f"{file.name}.new").write_bytes(b"unfinished")
        backup(store, tmp_path / "copy")
    (found,) = (tmp_path / "copy" / "parameters").iterdir()
    assert found == parameters_path(tmp_path / "copy", 8)
    assert found.read_bytes() == b"weights 8"


def test_a_version_that_is_replaced_meanwhile_is_not_missed(tmp_path: Path, monkeypatch) -> None:
    module = sys.modules["understudy.replay.maintain.backup"]
    with Store.open(tmp_path / "store") as store:
        old, new = (parameters_path(store.path, version) for version in (1, 2))
        old.parent.mkdir()
        old.write_bytes(b"old")

        def replaced_meanwhile(source: Path, copy: Path) -> bool:
            if source == old:
                new.write_bytes(b"new")
                old.unlink()
            return False

        monkeypatch.setattr(module, "_link", replaced_meanwhile)
        backup(store, tmp_path / "copy")
    assert [file.read_bytes() for file in (tmp_path / "copy" / "parameters").iterdir()] == [b"new"]

"""Compaction: rows of deleted episodes leave the disk, all others stay as they were."""

import threading
from pathlib import Path

import pytest
from tests.writing import write_episode

from understudy.core import (
    StoreError,
)
from understudy.core.examples import random_episode, robot_spec, small_spec
from understudy.replay import Reader, Store, compact, verify
from understudy.replay.format.paths import segment_files


def write(store: Store, name: str, spec, *episodes) -> None:
    writer = store.writer(name, spec)
    for episode in episodes:
        write_episode(writer, episode)


def test_deleting_is_soft_until_compaction(tmp_path: Path) -> None:
    spec = robot_spec(16)
    episodes = [random_episode(spec, 10, n) for n in range(8)]
    with Store.open(tmp_path / "store", segment_bytes=40_000) as store, Reader(tmp_path / "store") as reader:
        write(store, "w", spec, *episodes)
        assert store.delete([2, 3, 4]) == 3
        assert store.delete([2]) == 0
        assert [record.id for record in reader.episodes()] == [1, 5, 6, 7, 8]
        assert reader.read(2).equals(episodes[1])  # still there for who asks by name
        assert store.restore([2]) == 1
        size = sum(file.stat().st_blocks for file in segment_files(store.path))
        report = compact(store, min_dead=0.0)
        assert report.episodes_purged == 2
        assert report.bytes_freed > 0
        assert sum(file.stat().st_blocks for file in segment_files(store.path)) < size
        for n in (0, 1, 4, 5, 6, 7):
            assert reader.read(n + 1).equals(episodes[n])
        with pytest.raises(StoreError, match="removed by compaction"):
            reader.read(3)
        with pytest.raises(StoreError, match="removed by compaction; import it again"):
            store.restore([3])
        with pytest.raises(StoreError, match="there is no episode 99"):
            store.delete([99])
    assert verify(tmp_path / "store").ok


def test_compaction_leaves_segments_alone_that_are_live_enough(tmp_path: Path) -> None:
    spec = small_spec()
    with Store.open(tmp_path / "store") as store:
        write(store, "w", spec, *[random_episode(spec, 10, n) for n in range(10)])
        store.delete([1])
        assert compact(store, min_dead=0.5).segments_removed == 0
        assert compact(store, min_dead=0.05).segments_removed == 1
        with pytest.raises(StoreError, match="min_dead: expected a fraction from 0 to 1, got 2"):
            compact(store, min_dead=2)


def test_compaction_keeps_the_commit_that_brought_the_rows(tmp_path: Path) -> None:
    spec = small_spec()
    with Store.open(tmp_path / "store") as store:
        write(store, "w", spec, *[random_episode(spec, 3, n) for n in range(4)])
        before = {int(s["episode"]): int(s["commit_id"]) for s in store.catalog.spans()}
        store.delete([2])
        compact(store, min_dead=0.0)
        after = {int(s["episode"]): int(s["commit_id"]) for s in store.catalog.spans()}
    assert after == {episode: commit for episode, commit in before.items() if episode != 2}


def test_one_compaction_or_retention_at_a_time(path: Path) -> None:
    with Store.open(path) as store:
        store.delete([1])
        with store.maintenance_lock:
            waiting = threading.Thread(target=compact, args=(store,), kwargs={"min_dead": 0.0})
            waiting.start()
            waiting.join(0.05)
            assert waiting.is_alive()
            write(store, "v", small_spec(), random_episode(small_spec(), 3, 9))  # writers continue
            assert len(list(store.catalog.episodes("purged"))) == 0
        waiting.join()
        assert len(list(store.catalog.episodes("purged"))) == 1
    assert verify(path).ok

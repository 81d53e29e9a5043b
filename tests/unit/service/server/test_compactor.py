"""Compaction of a served store: on request and by a schedule, beside a sampler, and the space really comes back."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from tests.waiting import wait_for
from tests.writing import write_episode

from understudy.core import RefusedError, StoreError, WireError
from understudy.core.examples import random_episode, robot_spec, small_spec
from understudy.replay import EVERYTHING, Budget, Reader, Retention, Sampler, Store, compact
from understudy.replay.format.paths import segment_files
from understudy.service import Remote, Server, ServerConfig

TOKEN = "0123456789abcdef"


def deleted_files_held_open() -> list[str]:
    found = []
    for link in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            found.append(str(link.readlink()))
    return [path for path in found if "safetensors" in path and path.endswith("(deleted)")]


def fill(store: Store, num_episodes: int = 6) -> None:
    writer = store.writer("w", robot_spec(20))
    for seed in range(num_episodes):
        write_episode(writer, random_episode(robot_spec(20), 20, seed))


def test_a_sampler_gives_back_what_compaction_removed(tmp_path: Path) -> None:
    """Retention and compaction beside a live sampler, in another process or this one."""
    with Store.open(tmp_path / "store", segment_bytes=100_000) as store:
        fill(store)
        with Sampler(tmp_path / "store", EVERYTHING, batch_size=64, seed=1) as sampler:
            for _ in range(5):
                sampler.follow()
                for _ in range(5):
                    sampler.sample()
                store.retain(Retention(correction=Budget(max_steps=60)))
                before = len(segment_files(tmp_path / "store"))
                assert compact(store, min_dead=0.0).segments_removed > 0
                assert len(segment_files(tmp_path / "store")) < before
                assert deleted_files_held_open() == []  # though the sampler has not followed yet
                sampler.follow()
                sampler.sample()
                assert deleted_files_held_open() == []
                fill(store)


def test_a_reader_of_another_process_closes_them_when_it_follows(tmp_path: Path) -> None:
    with Store.open(tmp_path / "store", segment_bytes=100_000) as store, Reader(tmp_path / "store") as reader:
        fill(store)
        reader.follow()
        for record in reader.episodes():
            reader.read(record.id)
        held = reader.num_open_segments
        store.delete([1, 2, 3])
        compact(store, min_dead=0.0)
        assert reader.num_open_segments == held
        reader.follow()
        assert 0 < reader.num_open_segments < held
        assert reader.read(5).equals(random_episode(robot_spec(20), 20, 4))


def test_an_operator_asks_a_server(serve: Callable[..., Server], remote_to: Callable[..., Remote]) -> None:
    server = serve(token=TOKEN)
    fill(server.store)
    with pytest.raises(RefusedError, match="token is missing or wrong"):
        remote_to(server).compact()
    remote = remote_to(server, token=TOKEN)
    sampler = remote.sampler(EVERYTHING, batch_size=16, seed=1)
    sampler.sample()
    server.store.delete([1, 2])
    (preview,) = remote.compact(preview=True).values()
    assert preview == {"rows": 6 * 21, "dead_rows": 2 * 21, "deleted": 2, "over_budget": 0}
    (report,) = remote.compact(min_dead=0.0, max_steps={"correction": 60}).values()
    assert (report["episodes_purged"], report["segments_removed"]) == (3, 1)
    assert report["bytes_freed"] > 0
    assert deleted_files_held_open() == []
    wait_for(lambda: set(sampler.sample().episode.tolist()) <= {4, 5, 6})  # some batches were drawn ahead
    with pytest.raises(WireError, match="max_steps: expected numbers by kind"):
        remote.compact(max_steps={"other": 3})
    with pytest.raises(StoreError, match="min_dead: expected a fraction"):
        remote.compact(min_dead=7.0)
    sampler.close()


def test_a_schedule_keeps_the_disk_flat(serve: Callable[..., Server], remote_to: Callable[..., Remote]) -> None:
    server = serve(compact_every_s=0.05, retention=Retention(correction=Budget(max_steps=60)))
    fill(server.store)
    with Reader(server.store.path) as reader:
        wait_for(lambda: [record.id for record in reader.episodes()] == [4, 5, 6])
        # How many are purged depends on when the turns came: a segment with few dead rows is left as it is.
        wait_for(lambda: list(reader.episodes("purged")))
    write_episode(server.store.writer("w", small_spec()), random_episode(small_spec(), 5, 9))  # it still takes steps
    remote_to(server).status()
    assert server.failure is None


def test_a_schedule_is_a_time() -> None:
    with pytest.raises(RefusedError, match="compact_every_s: expected a time above 0 or None, got -1"):
        ServerConfig(compact_every_s=-1)

"""Several shards behind one list of addresses: real servers, one of which goes for good."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.writing import write_episode

from understudy.core import RefusedError, StoreError
from understudy.core.examples import random_episode, small_spec
from understudy.replay import EVERYTHING, Reader, Store
from understudy.service import OutboxConfig, RemoteWriter, Server, ServerConfig, connect
from understudy.service.client.sharded_sampler import split

SPEC = small_spec()


@pytest.fixture
def shards(tmp_path: Path) -> Iterator[list[Server]]:
    with contextlib.ExitStack() as undo:
        stores = [undo.enter_context(Store.open(tmp_path / f"shard-{number}")) for number in range(3)]
        yield [undo.enter_context(Server(store, ServerConfig(port=0))) for store in stores]


def put(writer: RemoteWriter, seed: int, steps: int = 20) -> None:
    episode = random_episode(SPEC, steps, seed)
    write_episode(writer, episode)


def rows(server: Server) -> list[tuple[int, int]]:
    """(seed of the episode, reward) of each step of a shard, the last observations as 0."""
    with Reader(server.store.path) as reader:
        found = []
        for record in reader.episodes():
            _, columns = reader.rows(record.id)
            found += [(int(record.info.seed or 0), float(reward)) for reward in columns["reward"]]
        return found


def test_writers_are_shared_out_and_each_keeps_to_its_shard(shards: list[Server]) -> None:
    with connect([s.address for s in shards]) as remote:
        homes = Counter(remote.shard_order(f"actor-{number}")[0] for number in range(3000))
        assert all(800 < count < 1200 for count in homes.values())
        for number in range(6):
            with remote.writer(f"actor-{number}", SPEC) as writer:
                for seed in range(3):
                    put(writer, seed)
                assert writer.wait_delivered(20)
                assert writer.delivery.address == remote.shard_order(writer.name)[0]
        assert sum(total["episodes"] for s in remote.status().values() for total in s["totals"]) == 18


def test_a_writer_moves_when_its_shard_is_gone_for_good(shards: list[Server], tmp_path: Path) -> None:
    addresses = [s.address for s in shards]
    with connect(addresses) as remote:
        order = remote.shard_order("arm")
        home, second = (shards[addresses.index(name)] for name in order[:2])
        config = OutboxConfig(failover_after_s=0.5)
        with remote.writer("arm", SPEC, spool=tmp_path / "spool", commit_steps=5, config=config) as writer:
            put(writer, 1)
            writer.begin(seed=2)
            episode = random_episode(SPEC, 20, 2)
            steps = list(episode.steps())
            for step in steps[:10]:
                writer.append(step)
            assert writer.wait_delivered(20)
            home.stop()
            for step in steps[10:]:
                writer.append(step)
            writer.end(episode.last_observation)
            put(writer, 3)
            assert writer.wait_delivered(30)
            assert writer.delivery.address == second.address
            put(writer, 4)
            assert writer.wait_delivered(30)
        before, after = rows(home), rows(second)
        assert len(before) == 21 + 10
        assert len(after) == 11 + 21 + 21  # the rest of episode 2 is an episode of its own
        assert not set(before) & set(after) - {(2, 0.0)}
        with Reader(second.store.path) as reader:
            assert [r.num_rows for r in reader.episodes()] == [11, 21, 21]
        # A new process with the same spool goes on at the new place.
        with remote.writer("arm", SPEC, spool=tmp_path / "spool", config=config) as writer:
            put(writer, 5)
            assert writer.wait_delivered(30)


def test_without_move_after_a_writer_waits(shards: list[Server], tmp_path: Path) -> None:
    addresses = [s.address for s in shards]
    with connect(addresses) as remote:
        home = shards[addresses.index(remote.shard_order("arm")[0])]
        home.stop()
        writer = remote.writer("arm", SPEC, spool=tmp_path / "spool")
        put(writer, 1)
        assert not writer.wait_delivered(1.5)
        assert writer.delivery.recorded == 21
        writer.close(0.1)


def test_a_sharded_batch_is_drawn_from_all_in_proportion(shards: list[Server]) -> None:
    sizes = {shards[0].address: 10, shards[1].address: 30, shards[2].address: 0}
    for server, steps in zip(shards, sizes.values(), strict=True):
        if steps:
            with connect(server.address) as one, one.writer("w", SPEC) as writer:
                put(writer, steps, steps)
    with connect(list(sizes)) as remote:
        sampler = remote.sharded_sampler(EVERYTHING, batch_size=40, seed=1)
        assert sampler.follow() == 40
        drawn = Counter()
        for _ in range(50):
            batch = sampler.sample()
            assert len(batch) == 40
            drawn.update(batch.policy_version.tolist())
        per_step = np.array(list(drawn.values()))
        first = sum(count for version, count in drawn.items() if version < 300)
        assert abs(first / (50 * 40) - 0.25) < 0.05
        assert per_step.sum() == 2000
        state = sampler.state()
        wanted = [sampler.sample().reward for _ in range(3)]
        sampler.close()
        again = remote.sharded_sampler(EVERYTHING, batch_size=40, seed=1)
        again.restore(state)
        for reward in wanted:
            assert np.array_equal(again.sample().reward, reward)
        again.close()


def test_split_is_a_draw_by_mass() -> None:
    counts = np.array([split(100, [1, 3, 0], seed=1, batch=number) for number in range(400)])
    assert (counts.sum(1) == 100).all()
    assert (counts[:, 2] == 0).all()
    assert abs(counts[:, 0].mean() - 25) < 1
    assert split(100, [1, 3, 0], seed=1, batch=7) == counts[7].tolist()
    with pytest.raises(StoreError, match="nothing to draw on any server"):
        split(10, [0, 0], seed=1, batch=0)


def test_one_sampler_for_several_servers_is_refused(shards: list[Server]) -> None:
    with connect([s.address for s in shards]) as remote, pytest.raises(RefusedError, match="sharded_sampler"):
        remote.sampler(EVERYTHING, batch_size=4)


def test_addresses_are_checked() -> None:
    for wrong in ("", "localhost", ","):
        with pytest.raises(RefusedError, match="expected host:port"):
            connect(wrong)
    started = time.monotonic()
    connect("127.0.0.1:1,127.0.0.1:2").close()
    assert time.monotonic() - started < 1

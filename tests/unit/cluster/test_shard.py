"""Shards on a real Ray: opened again where their disk is; waited for; lost, and that is said."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.unit.cluster.conftest import MEMORY
from tests.writing import write_episode

from understudy.cluster.config import ClusterConfig, ShardsConfig
from understudy.cluster.ray_session import ClusterError, connected
from understudy.cluster.shard_supervisor import BOOK, ShardKeeper
from understudy.core.examples import random_episode, small_spec
from understudy.service import connect

pytestmark = pytest.mark.xdist_group("ray")  # they share one Ray

AWAY_S = 6.0
PATIENCE_S = 60.0
TOKEN = "a token that is long enough"


def until(keeper: ShardKeeper, true: Callable[[], bool]) -> None:
    while not true():
        keeper.step()
        time.sleep(0.05)


def test_a_shard_is_waited_for_and_then_looked_for(tmp_path: Path, ray_cluster: Any, address: str) -> None:
    """All nodes see one disk here, so the store is found on another node; until its directory is gone."""
    place = ClusterConfig(
        shards=ShardsConfig(cpus=0, resources='{"disk": 1}'), shard_away_s=AWAY_S, room_s=120.0, silent_s=3.0
    )

    def node() -> Any:
        return ray_cluster.add_node(num_cpus=0, resources={"disk": 1}, object_store_memory=MEMORY)

    first = node()
    with connected(address, place):
        keeper = ShardKeeper(tmp_path, place, token=TOKEN, loopback=True)
        keeper.start()
        outside = connect(keeper.addresses["shard-0"], token=TOKEN)
        writer = outside.writer("outside", small_spec(), spool=tmp_path / "spool")
        write_episode(writer, random_episode(small_spec(), 20, 1))
        assert writer.wait_delivered(PATIENCE_S)
        before, book = keeper.shards_now()[0], (tmp_path / BOOK).read_text()
        second = node()
        seen = time.time()
        ray_cluster.remove_node(first, allow_graceful=False)
        until(keeper, lambda: not keeper.up)
        until(keeper, lambda: keeper.up and keeper.shards_now()[0].node != before.node)
        assert time.time() - seen > AWAY_S
        assert (tmp_path / BOOK).read_text() == book  # the same store, under the same name
        assert [event.what for event in keeper.events][-1] == "shard back"
        third = node()
        ray_cluster.remove_node(second, allow_graceful=False)
        until(keeper, lambda: not keeper.up)
        shutil.rmtree(before.path)
        until(keeper, lambda: keeper.up)
        assert any(event.what == "shard lost" and before.path in event.text for event in keeper.events)
        assert keeper.addresses["shard-0"] == before.address
        write_episode(writer, random_episode(small_spec(), 20, 2))
        assert writer.wait_delivered(PATIENCE_S)  # a writer outside goes on with the shard that took its place
        writer.close()
        outside.close()
        keeper.close()
        lost = json.loads(book)["shard-0"]["store"]
        following = ShardKeeper(tmp_path, place, token=TOKEN, loopback=True)
        following.start()
        following.close()
        assert json.loads((tmp_path / BOOK).read_text())["shard-0"]["replaces"] == [lost]  # the next driver knows too
        shutil.rmtree(before.path)
        again = ShardKeeper(tmp_path, place, token=TOKEN, loopback=True)
        with pytest.raises(ClusterError, match="no node has it; start Ray on the node with that disk"):
            again.start()
        again.close()
    ray_cluster.remove_node(third, allow_graceful=False)

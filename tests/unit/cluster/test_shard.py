"""Shards on a real Ray: opened again where their disk is; waited for; lost, and reported."""

from __future__ import annotations

import json
import shutil
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.unit.cluster.conftest import MEMORY
from tests.writing import write_episode

from understudy.cluster.config import ClusterConfig, ShardsConfig
from understudy.cluster.ray_session import ClusterError, ray_session
from understudy.cluster.roles.shard import ShardProcess
from understudy.cluster.shard_supervisor import SHARDS_FILE, ShardSupervisor
from understudy.core.examples import random_episode, small_spec
from understudy.durable.checked_json import to_checked_json
from understudy.replay import Store
from understudy.selftest.faulty_proxy import free_port
from understudy.service import connect
from understudy.web.errors import ListenError

pytestmark = pytest.mark.xdist_group("ray")  # they share one Ray

AWAY_S = 6.0
PATIENCE_S = 60.0
TOKEN = "a token that is long enough"


def step_until(shards: ShardSupervisor, condition: Callable[[], bool]) -> None:
    while not condition():
        shards.step()
        time.sleep(0.05)


@pytest.mark.nightly  # a long fault run; test_offpolicy.py kills a shard in every run
def test_a_shard_is_waited_for_and_then_looked_for(tmp_path: Path, ray_cluster: Any, address: str) -> None:
    """All nodes see one disk here, so the store is found on another node; until its directory is gone."""
    config = ClusterConfig(
        shards=ShardsConfig(cpus=0, resources='{"disk": 1}'),
        shard_node_timeout_s=AWAY_S,
        placement_timeout_s=120.0,
        heartbeat_timeout_s=3.0,
    )

    def node() -> Any:
        return ray_cluster.add_node(num_cpus=0, resources={"disk": 1}, object_store_memory=MEMORY)

    first = node()
    with ray_session(address, config):
        shards = ShardSupervisor(tmp_path, config, token=TOKEN, loopback=True)
        shards.open_all()
        outside = connect(shards.addresses["shard-0"], token=TOKEN)
        writer = outside.writer("outside", small_spec(), spool=tmp_path / "spool")
        write_episode(writer, random_episode(small_spec(), 20, 1))
        assert writer.wait_delivered(PATIENCE_S)
        before, book = shards.statuses()[0], (tmp_path / SHARDS_FILE).read_text()
        second = node()
        seen = time.time()
        ray_cluster.remove_node(first, allow_graceful=False)
        step_until(shards, lambda: not shards.all_running)
        step_until(shards, lambda: shards.all_running and shards.statuses()[0].node != before.node)
        assert time.time() - seen > AWAY_S
        assert (tmp_path / SHARDS_FILE).read_text() == book  # the same store, under the same name
        assert [event.what for event in shards.events][-1] == "shard back"
        third = node()
        ray_cluster.remove_node(second, allow_graceful=False)
        step_until(shards, lambda: not shards.all_running)
        shutil.rmtree(before.path)
        step_until(shards, lambda: shards.all_running)
        assert any(event.what == "shard lost" and before.path in event.text for event in shards.events)
        assert shards.addresses["shard-0"] == before.address
        write_episode(writer, random_episode(small_spec(), 20, 2))
        assert writer.wait_delivered(PATIENCE_S)  # a writer outside goes on with the shard that took its place
        writer.close()
        outside.close()
        shards.close()
        lost = json.loads(book)["shard-0"]["store"]
        following = ShardSupervisor(tmp_path, config, token=TOKEN, loopback=True)
        following.open_all()
        following.close()
        assert json.loads((tmp_path / SHARDS_FILE).read_text())["shard-0"]["replaces"] == [
            lost
        ]  # the next driver knows too
        shutil.rmtree(before.path)
        again = ShardSupervisor(tmp_path, config, token=TOKEN, loopback=True)
        with pytest.raises(ClusterError, match="no node has it; start Ray on the node with that disk"):
            again.open_all()
        again.close()
    ray_cluster.remove_node(third, allow_graceful=False)


def test_a_shard_whose_port_is_taken_takes_another_unless_the_user_chose_it(tmp_path: Path) -> None:
    port = free_port()
    with socket.create_server(("127.0.0.1", port)):
        chosen = ShardProcess("shard-0", str(tmp_path / "chosen"), "127.0.0.1", port, TOKEN, any_port=False)
        with pytest.raises(ListenError, match=f"cannot listen on 127.0.0.1:{port} .*; is another server there?"):
            chosen.open(None, ())
        Store.open(tmp_path / "chosen").close()  # nobody holds it
        shard = ShardProcess("shard-1", str(tmp_path / "any"), "127.0.0.1", port, TOKEN, any_port=True)
        info = shard.open(None, ())
        try:
            assert info.address != f"127.0.0.1:{port}"
            client = connect(info.address, token=TOKEN)
            assert [one["store"] for one in client.status().values()] == [info.store]
            client.close()
        finally:
            shard._undo.close()
    again = ShardProcess("shard-1", str(tmp_path / "any"), "127.0.0.1", port, TOKEN, any_port=True)
    try:
        assert again.open(info.store, ()).address == f"127.0.0.1:{port}"
    finally:
        again._undo.close()


@pytest.mark.parametrize(
    ("old", "new", "text"), [("/shard-1", "/shard-3", "does not match its checksum"), ("{", "[", "is not JSON")]
)
def test_a_damaged_map_of_shards_is_refused(old: str, new: str, text: str, tmp_path: Path) -> None:
    config = ClusterConfig(shards=ShardsConfig(num=2))
    records = {f"shard-{index}": {"path": f"/data/shard-{index}", "store": "s"} for index in range(2)}
    file = tmp_path / SHARDS_FILE
    file.write_bytes(to_checked_json(records))
    ShardSupervisor(tmp_path, config, token=TOKEN, loopback=True)
    file.write_text(file.read_text().replace(old, new, 1))
    with pytest.raises(ClusterError, match=f"{SHARDS_FILE}: {text}.*; restore it"):
        ShardSupervisor(tmp_path, config, token=TOKEN, loopback=True)
    file.write_text(json.dumps(records))  # as earlier versions wrote it
    ShardSupervisor(tmp_path, config, token=TOKEN, loopback=True)

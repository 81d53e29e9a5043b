"""Publishing: all servers get a version under the same number, and those that miss it are named."""

from __future__ import annotations

import socket
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from understudy.core import UnavailableError
from understudy.replay import Store
from understudy.service import Server, ServerConfig, connect
from understudy.service.client import publish
from understudy.service.client.publish import Publisher


def weights(seed: int, size: int = 1000) -> dict[str, object]:
    rng = np.random.default_rng(seed)
    return {"actor": {"w": rng.normal(size=size).astype(np.float32), "b": rng.normal(size=3)}, "step": np.int64(seed)}


def port_of(server: Server) -> int:
    return int(server.address.rpartition(":")[2])


def test_all_shards_have_the_same_version(tmp_path: Path) -> None:
    with (
        Store.open(tmp_path / "a") as one,
        Store.open(tmp_path / "b") as two,
        Server(one, ServerConfig(port=0)) as a,
        Server(two, ServerConfig(port=0)) as b,
    ):
        for server, num_versions in (a, 1), (b, 3):  # so that they begin at different numbers
            with connect(server.address) as alone:
                for seed in range(num_versions):
                    alone.publish(weights(seed))
        for order in ([a.address, b.address], [b.address, a.address]):
            with connect(order) as remote:
                version = remote.publish(weights(4))
                assert {s["parameters_version"] for s in remote.status().values()} == {version}
        assert version == 5


def test_a_shard_that_misses_a_version_is_named_and_gets_the_next_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publish, "PROBE_TIMEOUT_S", 60.0)  # one that is back may be slow
    with Store.open(tmp_path / "a") as one, Store.open(tmp_path / "b") as two, Server(one, ServerConfig(port=0)) as a:
        with Server(two, ServerConfig(port=0)) as b:
            port = port_of(b)
            remote = connect([f"a={a.address}", f"b={b.address}"])
            assert remote.publish(weights(1)) == 1
            assert remote.unpublished == frozenset()
        assert remote.publish(weights(2)) == 2
        assert remote.unpublished == {"b"}
        with Server(two, ServerConfig(port=port)):
            remote.wait_until_reachable(lambda text: None)
            assert remote.publish(weights(3)) == 3
            assert remote.unpublished == frozenset()
            assert {status["parameters_version"] for status in remote.status().values()} == {3}
        remote.close()


def test_servers_that_do_not_answer_are_asked_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Machines that were switched off: nothing refuses a connection there."""
    monkeypatch.setattr(publish, "CONNECT_TIMEOUT_S", 2.0)
    with ExitStack() as stack:
        silent = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(10)]
        store = stack.enter_context(Store.open(tmp_path / "store"))
        server = stack.enter_context(Server(store, ServerConfig(port=0)))
        addresses = [f"127.0.0.1:{one.getsockname()[1]}" for one in silent]
        remote = stack.enter_context(connect([*addresses, server.address]))
        start_s = time.monotonic()
        assert remote.publish(weights(1)) == 1
        took_s = time.monotonic() - start_s
    assert len(remote.unpublished) == 10
    assert 2.0 <= took_s < 18.0  # and not ten times two


def test_without_any_server_publishing_raises() -> None:
    with (
        connect("a=127.0.0.1:1,b=127.0.0.1:2") as remote,
        pytest.raises(UnavailableError, match="none of a, b took the parameters; are they running"),
    ):
        remote.publish(weights(1))


def test_a_removed_shard_no_longer_counts_as_one_that_missed_a_version() -> None:
    publisher = Publisher()
    publisher.unpublished = frozenset({"a", "b"})
    publisher.forget("a")
    assert publisher.unpublished == {"b"}

"""ParameterStore: each version has its own number, survives a restart, and is sent whole or not at all."""

from __future__ import annotations

import numpy as np
import pytest

from understudy.core import StoreError, WireError
from understudy.replay import Store
from understudy.service import Remote, Server, ServerConfig, connect
from understudy.service.client.publish import publish
from understudy.service.wire.message import pieces
from understudy.service.wire.parameters import encode_parameters
from understudy.service.wire.protocol import PUBLISH, to_json


def weights(seed: int, size: int = 1000) -> dict[str, object]:
    rng = np.random.default_rng(seed)
    return {"actor": {"w": rng.normal(size=size).astype(np.float32), "b": rng.normal(size=3)}, "step": np.int64(seed)}


def port_of(server: Server) -> int:
    return int(server.address.rpartition(":")[2])


def test_versions_go_on_after_a_restart_and_the_newest_is_still_there(store: Store) -> None:
    with Server(store, ServerConfig(port=0)) as first, connect(first.address) as remote:
        assert remote.publish(weights(1)) == 1
        assert remote.publish(weights(2)) == 2
        port = port_of(first)
    with Server(store, ServerConfig(port=port)) as second, connect(second.address) as remote:
        with remote.parameters() as subscription:
            found = subscription.wait(timeout_s=10)
            assert found is not None
            assert (found.version, int(found.tree["step"])) == (2, 2)
        assert remote.publish(weights(3)) == 3
    assert len(list((store.path / "parameters").iterdir())) == 1  # the newest alone


def test_a_publication_that_breaks_off_is_never_seen(remote: Remote, server: Server) -> None:
    remote.publish(weights(1))
    with remote.parameters() as subscription:
        found = subscription.wait(timeout_s=10)
        connection = next(iter(remote._connections.values()))
        parts = list(pieces(encode_parameters({"w": np.ones(3_000_000, np.float32)}, {}, bfloat16=False)))
        with pytest.raises(WireError, match="middle of a version"):
            connection.upload(PUBLISH, [to_json({"version": None}), *parts[:-2]], timeout_s=10)
        assert subscription.wait(found, timeout_s=0.5) is None
        assert remote.publish(weights(2)) == 2
        newer = subscription.wait(found, timeout_s=10)
        assert newer is not None
        assert int(newer.tree["step"]) == 2


def test_a_version_that_was_changed_on_its_way_is_refused(remote: Remote) -> None:
    connection = next(iter(remote._connections.values()))
    parts = list(pieces(encode_parameters({"w": np.ones(1000, np.float32)}, {}, bfloat16=False)))
    spoilt = bytearray(parts[1])
    spoilt[100] ^= 1
    with pytest.raises(WireError, match="damaged on its way"):
        connection.upload(PUBLISH, [to_json({"version": None}), parts[0], bytes(spoilt)], timeout_s=10)


def test_an_older_version_is_refused(remote: Remote) -> None:
    remote.publish(weights(1))
    connection = next(iter(remote._connections.values()))
    with pytest.raises(StoreError, match="version: 1 is published already, got 1; publish newer ones only"):
        publish(connection, encode_parameters(weights(2), {}, bfloat16=False), 1, 10.0)


def test_a_damaged_file_is_not_sent_and_its_number_not_used_again(store: Store) -> None:
    with Server(store, ServerConfig(port=0)) as server, connect(server.address) as remote:
        remote.publish(weights(1))
    (path,) = (store.path / "parameters").iterdir()
    content = bytearray(path.read_bytes())
    content[-20] ^= 1
    path.write_bytes(content)
    with Server(store, ServerConfig(port=0)) as server, connect(server.address) as remote:
        with remote.parameters() as subscription:
            assert subscription.wait(timeout_s=0.5) is None
        assert remote.publish(weights(2)) == 2


def test_too_many_bytes_are_refused_before_they_are_taken(store: Store) -> None:
    config = ServerConfig(port=0, max_parameters_bytes=10_000)
    with Server(store, config) as server, connect(server.address) as remote:
        with pytest.raises(WireError, match="expected a message of at most 10000 bytes, got 8000008"):
            remote.publish({"w": np.zeros(1_000_000)})
        assert remote.publish({"w": np.zeros(100)}) == 1

"""Parameters: versioned, whole, latest wins; over a real server."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
import pytest

from understudy.core import RefusedError, StoreError, WireError
from understudy.core import tree as trees
from understudy.replay import Store
from understudy.service import Remote, Server, ServerConfig, connect
from understudy.service.wire.message import pieces
from understudy.service.wire.protocol import PUBLISH, to_json


def weights(seed: int, size: int = 1000) -> dict[str, object]:
    rng = np.random.default_rng(seed)
    return {"actor": {"w": rng.normal(size=size).astype(np.float32), "b": rng.normal(size=3)}, "step": np.int64(seed)}


def port_of(server: Server) -> int:
    return int(server.address.rpartition(":")[2])


def test_a_version_arrives_bit_equal_with_what_was_said_of_it(remote: Remote) -> None:
    version = remote.publish(weights(1), metadata={"update": "500"})
    with remote.parameters() as subscription:
        found = subscription.wait(timeout_s=10)
    assert found is not None
    assert found.version == version == 1
    assert found.metadata == {"update": "500"}
    assert trees.equal(found.tree, trees.map_leaves(np.asarray, weights(1)))


def test_bfloat16_halves_the_bytes_of_floats_and_leaves_the_rest(remote: Remote) -> None:
    remote.publish({"w": np.float32([1.0, 1 / 3, -2.5e-8]), "n": np.arange(3)}, bfloat16=True)
    with remote.parameters() as subscription:
        found = subscription.wait(timeout_s=10)
    assert found is not None
    assert found.tree["w"].tolist() == [1.0, 0.333984375, -2.5029294192790985e-08]  # 1.6796875 * 2**-26
    assert found.tree["w"].dtype == np.float32
    assert found.tree["n"].tolist() == [0, 1, 2]


def test_a_late_reader_has_the_latest_within_a_second(remote: Remote) -> None:
    for seed in range(5):
        remote.publish(weights(seed))
    started = time.monotonic()
    with remote.parameters() as subscription:
        found = subscription.wait(timeout_s=10)
    assert found is not None
    assert found.version == 5
    assert time.monotonic() - started < 1.0


def test_readers_see_whole_versions_in_rising_order(remote: Remote, server: Server) -> None:
    seen: dict[int, list[int]] = {number: [] for number in range(3)}
    last = 30

    def read(number: int) -> None:
        with connect(server.address) as own, own.parameters() as subscription:
            found = None
            while found is None or found.version < last:
                found = subscription.wait(found, timeout_s=20)
                assert found is not None
                assert len(set(found.tree["w"].tolist())) == 1, "half of one version and half of another"
                seen[number].append(found.version)

    threads = [threading.Thread(target=read, args=(number,)) for number in seen]
    for thread in threads:
        thread.start()
    for number in range(last):
        remote.publish({"w": np.full(1_000_000, number, np.float32)})
    for thread in threads:
        thread.join(30)
    for versions in seen.values():
        assert versions == sorted(set(versions))
        assert versions[-1] == last


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


def test_a_subscriber_outlives_the_server(store: Store) -> None:
    with Server(store, ServerConfig(port=0)) as first:
        port = port_of(first)
        remote = connect(first.address)
        subscription = remote.parameters()
        remote.publish(weights(1))
        found = subscription.wait(timeout_s=10)
    time.sleep(0.2)
    assert subscription.latest is found
    with Server(store, ServerConfig(port=port)):
        remote.publish(weights(2))
        newer = subscription.wait(found, timeout_s=10)
        assert newer is not None
        assert newer.version == 2
        subscription.close()
        remote.close()


def test_a_subscriber_of_another_store_is_not_left_with_old_parameters(tmp_path: Path) -> None:
    with Store.open(tmp_path / "a") as store, Server(store, ServerConfig(port=0)) as server:
        port = port_of(server)
        remote = connect(server.address)
        subscription = remote.parameters()
        for seed in range(3):
            remote.publish(weights(seed))
        found = subscription.wait(timeout_s=10)
        while found is None or found.version < 3:
            found = subscription.wait(found, timeout_s=10)
    with Store.open(tmp_path / "b") as store, Server(store, ServerConfig(port=port)):
        remote.publish(weights(9))  # version 1 of this store
        newer = subscription.wait(found, timeout_s=10)
        assert newer is not None
        assert (newer.version, int(newer.tree["step"])) == (1, 9)
        subscription.close()
        remote.close()


def test_a_publication_that_breaks_off_is_never_seen(remote: Remote, server: Server) -> None:
    remote.publish(weights(1))
    with remote.parameters() as subscription:
        found = subscription.wait(timeout_s=10)
        connection = next(iter(remote._connections.values()))
        from understudy.service.parameters import encode_parameters

        parts = list(pieces(encode_parameters({"w": np.ones(3_000_000, np.float32)}, {}, bfloat16=False)))
        with pytest.raises(WireError, match="middle of a version"):
            connection.upload(PUBLISH, [to_json({"version": None}), *parts[:-2]], timeout_s=10)
        assert subscription.wait(found, timeout_s=0.5) is None
        assert remote.publish(weights(2)) == 2
        newer = subscription.wait(found, timeout_s=10)
        assert newer is not None
        assert int(newer.tree["step"]) == 2


def test_a_version_that_was_changed_on_its_way_is_refused(remote: Remote) -> None:
    from understudy.service.parameters import encode_parameters

    connection = next(iter(remote._connections.values()))
    parts = list(pieces(encode_parameters({"w": np.ones(1000, np.float32)}, {}, bfloat16=False)))
    spoilt = bytearray(parts[1])
    spoilt[100] ^= 1
    with pytest.raises(WireError, match="changed on its way"):
        connection.upload(PUBLISH, [to_json({"version": None}), parts[0], bytes(spoilt)], timeout_s=10)


def test_an_older_version_is_refused(remote: Remote) -> None:
    from understudy.service.parameters import encode_parameters, publish

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
        with pytest.raises(WireError, match="10000 is the most here"):
            remote.publish({"w": np.zeros(1_000_000)})
        assert remote.publish({"w": np.zeros(100)}) == 1


def test_all_shards_have_the_same_version(tmp_path: Path) -> None:
    with (
        Store.open(tmp_path / "a") as one,
        Store.open(tmp_path / "b") as two,
        Server(one, ServerConfig(port=0)) as a,
        Server(two, ServerConfig(port=0)) as b,
    ):
        with connect(a.address) as first:
            first.publish(weights(1))  # so that they begin at different numbers
        with connect([a.address, b.address]) as remote:
            version = remote.publish(weights(2))
            assert version == 2
            assert {s["parameters_version"] for s in remote.status().values()} == {2}


@pytest.mark.parametrize(("tree", "text"), [({}, "at least one array"), (np.zeros(3), "give it a name")])
def test_what_is_no_tree_of_arrays_is_refused(remote: Remote, tree: object, text: str) -> None:
    with pytest.raises(StoreError, match=text):
        remote.publish(tree)


def test_a_wrong_token_is_told_to_whoever_waits(store: Store) -> None:
    with (
        Server(store, ServerConfig(port=0, token="a" * 16)) as server,
        connect(server.address, token="b") as remote,
        remote.parameters() as subscription,
        pytest.raises(RefusedError, match="token is missing or wrong"),
    ):
        subscription.wait(timeout_s=10)


def test_a_subscriber_takes_no_more_than_it_wants(remote: Remote) -> None:
    remote.publish({"w": np.zeros(1000)})
    with remote.parameters(max_bytes=1000) as subscription:
        assert subscription.wait(timeout_s=1.0) is None
        assert "1000 is the most here" in str(subscription.problem)

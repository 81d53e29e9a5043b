"""Subscription: versions arrive whole, the newest wins, and none is older than the one before; over a real server."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from tests.waiting import wait_for

from understudy.core import RefusedError
from understudy.core import tree as trees
from understudy.replay import Store
from understudy.service import Remote, Server, ServerConfig, connect
from understudy.service.wire.message import from_json, pack, pieces
from understudy.service.wire.parameters import encode_parameters, encode_version
from understudy.service.wire.protocol import SERVICE, SUBSCRIBE


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


@pytest.mark.serial
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
    last = 10

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
        wait_for(lambda: "expected a message of at most 1000 bytes" in str(subscription.problem))
        assert subscription.latest is None


# ---- a server that answers anything


@contextmanager
def answering(streams: list[list[bytes]]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A server that gives each subscription the next of these streams, and the last one open; with what was asked."""
    asked: list[dict[str, Any]] = []
    ended = threading.Event()

    def subscribe(request: bytes, context: Any) -> Iterator[bytes]:
        asked.append(from_json(request))
        yield from streams[min(len(asked), len(streams)) - 1]
        if len(asked) >= len(streams):
            ended.wait()

    server = grpc.server(ThreadPoolExecutor(4))
    handler = grpc.unary_stream_rpc_method_handler(subscribe)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {SUBSCRIBE: handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}", asked
    finally:
        ended.set()
        server.stop(None)


def version(number: int) -> list[bytes]:
    return [*pieces(encode_parameters(weights(number), {}, bfloat16=False)), encode_version(number, "s")]


def unusable(said: str, *names: str) -> list[bytes]:
    """A whole message that is no version, as servers before this check stored and sent it."""
    return list(pieces(pack({"said": said}, {name: np.zeros(3, np.float32) for name in names})))


UNUSABLE: dict[str, list[bytes]] = {
    "broken metadata": [*unusable("{", "w"), encode_version(2, "s")],
    "metadata of a list": [*unusable("[1]", "w"), encode_version(2, "s")],
    "an array that is a dict": [*unusable("{}", "a", "a/b"), encode_version(2, "s")],
}
BROKEN: dict[str, list[bytes]] = {
    "noise": [b"\x00" * 100],
    "no number": [*version(2)[:-1], b"{}"],
    "a cut version": version(2)[:-2],
    "an empty message": [b""],
    "text": [b"\xff\xfe"],
}


@pytest.mark.parametrize("kind", UNUSABLE)
def test_a_version_that_cannot_be_used_is_passed_over(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.WARNING),
        answering([[*version(1), *UNUSABLE[kind], *version(3)], []]) as (address, asked),
        connect(address) as remote,
        remote.parameters() as subscription,
    ):
        wait_for(lambda: subscription.latest is not None and subscription.latest.version == 3, 30)
        assert subscription.num_unusable == 1
        assert subscription.problem is None
        assert "parameters: version 2: " in caplog.text
        assert len(asked) == 1


@pytest.mark.parametrize("kind", UNUSABLE)
def test_a_version_that_cannot_be_used_is_named_and_not_asked_for_again(kind: str) -> None:
    with (
        answering([[*version(1), *UNUSABLE[kind]], []]) as (address, asked),
        connect(address) as remote,
        remote.parameters() as subscription,
    ):
        wait_for(lambda: len(asked) == 2, 30)
        assert asked[1] == {"have": 2, "store": "s"}
        assert str(subscription.problem).startswith("version 2: ")
        latest = subscription.latest
        assert latest is not None
        assert latest.version == 1


@pytest.mark.parametrize("kind", BROKEN)
def test_a_stream_that_makes_no_sense_is_begun_again(kind: str) -> None:
    with (
        answering([version(1), BROKEN[kind], BROKEN[kind], version(3)]) as (address, _),
        connect(address) as remote,
        remote.parameters() as subscription,
    ):
        wait_for(lambda: subscription.latest is not None and subscription.latest.version == 3, 30)
        assert subscription.problem is None


def test_a_subscriber_that_was_refused_tries_again(store: Store) -> None:
    with Server(store, ServerConfig(port=0, token="a" * 16)) as server:
        port = port_of(server)
        remote = connect(server.address, token="b" * 16)
        subscription = remote.parameters()
        with pytest.raises(RefusedError, match="token is missing or wrong"):
            subscription.wait(timeout_s=30)
    with Server(store, ServerConfig(port=port, token="b" * 16)):
        remote.publish(weights(1))
        wait_for(lambda: subscription.latest is not None, 30)
        assert subscription.wait(timeout_s=30) is not None
        subscription.close()
        remote.close()

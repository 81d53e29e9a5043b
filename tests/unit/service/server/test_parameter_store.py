"""ParameterStore: each version has its own number, survives a restart, and is sent whole or not at all."""

from __future__ import annotations

import logging
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from tests.waiting import wait_for

from understudy.cli import main
from understudy.core import StoreError, UnavailableError, WireError
from understudy.durable import files
from understudy.replay import Store, backup
from understudy.replay.format.paths import parameters_path
from understudy.service import Remote, Server, ServerConfig, connect
from understudy.service.client.publish import publish
from understudy.service.wire.message import pack, pieces, to_json
from understudy.service.wire.parameters import encode_parameters
from understudy.service.wire.protocol import PUBLISH


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


def test_a_damaged_file_is_not_sent_and_its_number_not_used_again(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    with Server(store, ServerConfig(port=0)) as server, connect(server.address) as remote:
        remote.publish(weights(1))
    (path,) = (store.path / "parameters").iterdir()
    content = bytearray(path.read_bytes())
    assert main(["verify", str(store.path)]) == 0
    for damaged in (content[:-20], content[:-20] + bytes([content[-20] ^ 1]) + content[-19:]):
        path.write_bytes(damaged)
        assert main(["verify", str(store.path)]) == 1
        assert f"parameters: {path}: damaged (" in capsys.readouterr().out.replace("\n", "")
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


# ---- uploads that are slow, stalled or many


@contextmanager
def stalled_upload(server: Server, num_pieces: int = 2) -> Iterator[Callable[[], Any]]:
    """A learner that hangs in the middle of a publication; gives the function that returns its answer or raises."""
    released, sent = threading.Event(), threading.Event()
    parts = list(pieces(encode_parameters({"w": np.ones(1_000_000, np.float32)}, {}, bfloat16=False)))

    def messages() -> Iterator[bytes]:
        yield to_json({"version": None})
        yield from parts[:num_pieces]
        sent.set()
        released.wait()

    with connect(server.address) as own, ThreadPoolExecutor(1) as pool:
        connection = next(iter(own._connections.values()))
        answer = pool.submit(connection.upload, PUBLISH, messages(), timeout_s=None)
        assert sent.wait(30)
        try:
            yield lambda: answer.result(60)
        finally:
            released.set()


def test_while_one_is_uploaded_the_last_complete_version_is_sent_and_others_are_published(
    server: Server, remote: Remote
) -> None:
    remote.publish(weights(1))
    with stalled_upload(server) as answer, remote.parameters() as subscription:
        found = subscription.wait(timeout_s=30)
        assert found is not None
        assert (found.version, int(found.tree["step"])) == (1, 1)
        assert remote.publish(weights(2), timeout_s=30) == 2
        newer = subscription.wait(found, timeout_s=30)
        assert newer is not None
        assert (newer.version, int(newer.tree["step"])) == (2, 2)
    with pytest.raises(WireError, match="middle of a version"):
        answer()
    assert remote.publish(weights(3)) == 3


def test_a_stalled_upload_is_ended(store: Store) -> None:
    with Server(store, ServerConfig(port=0, publish_timeout_s=2.0)) as server, stalled_upload(server) as answer:
        with pytest.raises(UnavailableError, match=r"no piece of the version came for 2 s; publish it again"):
            answer()
        with connect(server.address) as remote:
            assert remote.publish(weights(1)) == 1


def test_all_uploads_together_have_a_limit(store: Store) -> None:
    config = ServerConfig(port=0, max_parameters_bytes=5_000_000)  # two stalled uploads hold three pieces each
    with Server(store, config) as server, connect(server.address) as remote:
        with stalled_upload(server, 4), stalled_upload(server, 4):
            with pytest.raises(UnavailableError, match="receives too many versions at once; publish this one again"):
                remote.publish({"w": np.zeros(4_900_000, np.uint8)})
            assert remote.publish({"w": np.zeros(1_000_000, np.uint8)}) == 1
        assert remote.publish({"w": np.zeros(4_900_000, np.uint8)}) == 2


def test_two_learners_at_once_get_two_numbers(server: Server, remote: Remote) -> None:
    def publish_many(seed: int) -> list[int]:
        with connect(server.address) as own:
            return [own.publish(weights(seed)) for _ in range(5)]

    with ThreadPoolExecutor(3) as pool:
        numbers = [number for found in pool.map(publish_many, range(3)) for number in found]
    assert sorted(numbers) == list(range(1, 16))


# ---- versions that nobody could use


def with_names(metadata: dict[str, str], names: list[str]) -> list[bytes]:
    return list(pieces(pack(metadata, {name: np.zeros(3, np.float32) for name in names})))


def with_bad_flag() -> list[bytes]:
    """A message whose checksum is right, with a flag of 2."""
    buffers = [bytes(buffer) for buffer in pack({"said": "{}"}, {"on": np.zeros(2, np.bool_)})]
    content = buffers[0] + b"\x00\x02"
    check = struct.pack("<Q", xxhash.xxh3_64_intdigest(content))
    return [buffers[0], b"\x00\x02" + check]


MALFORMED: dict[str, tuple[list[bytes], str]] = {
    "broken metadata": (with_names({"said": "{"}, ["w"]), "metadata: expected a JSON object of texts, got '{'"),
    "metadata of a list": (
        with_names({"said": "[1]"}, ["w"]),
        r"metadata: expected a JSON object of texts, got '\[1\]'",
    ),
    "deep metadata": (with_names({"said": "[" * 5000}, ["w"]), "metadata: expected a JSON object of texts"),
    "a number as metadata": (with_names({"said": '{"a": 1}'}, ["w"]), "metadata/a: expected text, got int"),
    "an array that is a dict": (with_names({"said": "{}"}, ["a", "a/b"]), "a: expected an array or a dict of arrays"),
    "no name": (with_names({"said": "{}"}, [""]), "expected a name of 1 to 64 parts, got ''"),
    "a deep tree": (with_names({"said": "{}"}, ["a/" * 100 + "b"]), "expected a name of 1 to 64 parts"),
    "nothing": (with_names({"said": "{}"}, []), "expected at least one array, got none"),
    "a flag of 2": (with_bad_flag(), "on: expected flags of 0 or 1, got 2"),
}


@pytest.mark.parametrize("kind", MALFORMED)
def test_what_no_subscriber_could_use_is_refused(kind: str, remote: Remote) -> None:
    parts, text = MALFORMED[kind]
    connection = next(iter(remote._connections.values()))
    with remote.parameters() as subscription:
        assert remote.publish(weights(1)) == 1
        with pytest.raises(WireError, match=text):
            connection.upload(PUBLISH, [to_json({"version": None}), *parts], timeout_s=30)
        assert remote.publish(weights(2)) == 2
        found = subscription.wait(timeout_s=30)
        while found is not None and found.version < 2:
            found = subscription.wait(found, timeout_s=30)
        assert found is not None
        assert subscription.problem is None


@pytest.mark.parametrize("kind", [kind for kind in MALFORMED if kind != "a number as metadata"])
def test_one_that_an_older_server_stored_is_not_sent(kind: str, store: Store, caplog: pytest.LogCaptureFixture) -> None:
    path = parameters_path(store.path, 7)
    path.parent.mkdir()
    path.write_bytes(b"".join(MALFORMED[kind][0]))
    with caplog.at_level(logging.ERROR), Server(store, ServerConfig(port=0)) as server:
        assert f"{path}: this version of the parameters is damaged and is not sent" in caplog.text
        with connect(server.address) as remote, remote.parameters() as subscription:
            assert remote.publish(weights(8)) == 8
            found = subscription.wait(timeout_s=30)
            assert found is not None
            assert found.version == 8


def test_metadata_that_is_not_text_is_read_as_text_from_an_older_store(store: Store) -> None:
    path = parameters_path(store.path, 7)
    path.parent.mkdir()
    path.write_bytes(b"".join(with_names({"said": '{"a": 1, "b": "x"}'}, ["w"])))
    with Server(store, ServerConfig(port=0)) as server, connect(server.address) as remote:
        with remote.parameters() as subscription:
            found = subscription.wait(timeout_s=30)
        assert found is not None
        assert (found.version, found.metadata) == (7, {"a": "1", "b": "x"})


# ---- what a crash or a restore leaves


def test_an_older_whole_version_is_sent_only_with_a_message(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    for number in (6, 7):  # as a crash leaves them, before the older one is removed
        path = parameters_path(store.path, number)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"".join(pieces(encode_parameters(weights(number), {}, bfloat16=False))))
    with path.open("r+b") as stream:
        stream.truncate(100)
    (path.parent / f"{path.name}.new").write_bytes(b"unfinished")
    with caplog.at_level(logging.ERROR), Server(store, ServerConfig(port=0)) as server:
        assert "version 6 is sent instead, which is older, until the next is published" in caplog.text
        with connect(server.address) as remote, remote.parameters() as subscription:
            found = subscription.wait(timeout_s=30)
            assert found is not None
            assert (found.version, int(found.tree["step"])) == (6, 6)
            assert remote.publish(weights(8)) == 8
    assert [file.name for file in path.parent.iterdir()] == ["000000000008.safetensors"]


def test_a_number_that_a_client_has_is_not_used_again(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    store_id = store.catalog.store_id
    with Server(store, ServerConfig(port=0)) as server, connect(server.address) as remote:
        connection = next(iter(remote._connections.values()))
        parts = list(pieces(encode_parameters(weights(1), {}, bfloat16=False)))
        hello = {"version": None, "have": 10, "store": store_id}
        assert connection.upload(PUBLISH, [to_json(hello), *parts], timeout_s=30)["version"] == 11
        assert "a client has version 10 of the parameters, and this store knows versions up to 0" in caplog.text
        hello = {"version": None, "have": 100, "store": "another"}
        assert connection.upload(PUBLISH, [to_json(hello), *parts], timeout_s=30)["version"] == 12


@contextmanager
def restored(store: Store, path: Path, port: int) -> Iterator[Server]:
    """The store's machine is gone: its backup is served at the same address."""
    store.close()
    with Store.open(path) as copy, Server(copy, ServerConfig(port=port)) as server:
        yield server


@pytest.mark.parametrize("learner", ["the same", "a new one"])
def test_after_a_restore_versions_go_on_where_actors_and_learner_are(learner: str, tmp_path: Path) -> None:
    store = Store.open(tmp_path / "store")
    with ExitStack() as cleanup:
        with Server(store, ServerConfig(port=0)) as server:
            remote = cleanup.enter_context(connect(server.address))
            subscription = cleanup.enter_context(remote.parameters())
            for seed in range(5):
                remote.publish(weights(seed))
                if seed == 2:
                    backup(store, tmp_path / "backup")
            wait_for(lambda: subscription.latest is not None and subscription.latest.version == 5)
            port = port_of(server)
        with restored(store, tmp_path / "backup", port) as server:
            with connect(server.address) as late, late.parameters() as found:
                newest = found.wait(timeout_s=60)
                assert newest is not None
                assert (newest.version, int(newest.tree["step"])) == (3, 2)  # the last that the backup has
            publisher = remote
            if learner == "a new one":
                publisher = cleanup.enter_context(connect(server.address))
                wait_for(lambda: server.parameters.version == 5)  # the actor has connected again
            assert publisher.publish(weights(100)) == 6
            wait_for(lambda: subscription.latest is not None and subscription.latest.version == 6)
            assert subscription.latest is not None
            assert int(subscription.latest.tree["step"]) == 100


def test_a_second_backup_continues_after_the_first(tmp_path: Path) -> None:
    versions, path = [], tmp_path / "store"
    for number in range(3):
        with (
            Store.open(path) as store,
            Server(store, ServerConfig(port=0)) as server,
            connect(server.address) as remote,
        ):
            versions += [remote.publish(weights(number)) for _ in range(2)]
            path = tmp_path / f"backup-{number}"
            backup(store, path)
    assert versions == [1, 2, 3, 4, 5, 6]


def test_the_first_version_is_on_disk_with_the_name_of_its_directory(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[Path] = []
    sync = files.sync_directory
    monkeypatch.setattr(files, "sync_directory", lambda path: (synced.append(path), sync(path)))
    with Server(store, ServerConfig(port=0)) as server, connect(server.address) as remote:
        remote.publish(weights(1))
        remote.publish(weights(2))
    assert store.path in synced  # else a power cut could remove `parameters`, and versions would begin again

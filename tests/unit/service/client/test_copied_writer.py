"""Two clients with one incarnation, as after a copy of a disk or of a virtual machine: nobody is told a lie."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
from tests.writing import Collector, write_episode

from understudy.core import CopiedError
from understudy.core.examples import random_episode, small_spec
from understudy.replay import Reader, Writer, verify
from understudy.service import OutboxConfig, Remote, RemoteWriter, Server
from understudy.service.client.outbox import Outbox
from understudy.service.client.spool import Spool, SpoolLog
from understudy.service.wire.chunks import encode_chunk
from understudy.service.wire.message import to_json
from understudy.service.wire.protocol import (
    ERROR_KEY,
    VERSION,
    WRITE,
    method,
)

SPEC = small_spec()
INCARNATION = "ab" * 16
Serve = Callable[..., Server]
To = Callable[..., Remote]


def messages(*seeds: int, commit_steps: int = 4) -> list[tuple[bytes, int]]:
    """The chunks of a writer's episodes with these seeds, and how many rows each has."""
    collector = Collector()
    writer = Writer(collector, "arm", INCARNATION, SPEC, commit_steps=commit_steps)
    for seed in seeds:
        write_episode(writer, random_episode(SPEC, 10, seed), seed=seed)
    return [(b"".join(encode_chunk(c.seq, c.columns, c.parts)), c.num_rows) for c in collector.chunks]


def send(server: Server, incarnation: str, chunks: list[bytes]) -> tuple[list[int], str]:
    """What a client without a spool is told: the chunks that were acknowledged, and the name of an error."""
    hello = {"version": VERSION, "writer": "arm", "incarnation": incarnation, "spec": SPEC.to_json()}
    acknowledged: list[int] = []
    with grpc.insecure_channel(server.address) as channel:
        try:
            for answer in channel.stream_stream(method(WRITE))(iter([to_json(hello), *chunks]), timeout=60):
                said = json.loads(answer)
                acknowledged += [said["seq"]] if "seq" in said else []
        except grpc.RpcError as error:
            return acknowledged, str(dict(error.trailing_metadata() or ()).get(ERROR_KEY))
    return acknowledged, ""


def log_left_behind(place: Path, *seeds: int, without: int = 0) -> None:
    """The spool of a process that died; its first chunks were delivered."""
    spool = Spool(place)
    log = spool.begin("arm", INCARNATION, SPEC)
    for seq, (message, num_rows) in enumerate(messages(*seeds)):
        log.put(seq, [message], num_rows)
    log.acknowledge(without - 1)
    spool.close()


def seeds_in(place: Path) -> list[int | None]:
    assert verify(place).ok
    with Reader(place) as reader:
        return sorted(record.info.seed or 0 for record in reader.episodes("state = 'ended'"))


def writer_of(remote: Remote, log: SpoolLog, spool: Spool) -> RemoteWriter:
    """A live writer that begins with the given log."""
    outbox = Outbox("arm", spool, log, remote._choose_shard, OutboxConfig())
    return RemoteWriter(outbox, "arm", log.incarnation, SPEC, commit_steps=4)


def write_on(writer: RemoteWriter) -> None:
    """Write until an error comes."""
    while True:
        write_episode(writer, random_episode(SPEC, 10, 3), seed=3)
        writer.wait_delivered(60)


def test_rows_of_the_original_are_refused_when_a_copy_was_faster(serve: Serve, remote_to: To, tmp_path: Path) -> None:
    server = serve()
    writer = remote_to(server).writer("arm", SPEC, spool=tmp_path / "spool", commit_steps=4)
    write_episode(writer, random_episode(SPEC, 10, 1), seed=1)
    assert writer.wait_delivered(60)
    copied = messages(1, 2)
    num_common = len(messages(1))
    seqs = list(range(num_common, len(copied)))
    assert send(server, writer.incarnation, [message for message, _ in copied[num_common:]]) == (seqs, "")
    with pytest.raises(CopiedError, match=r"a copy of this writer is alive.*the next writer with this spool"):
        write_on(writer)
    assert writer.delivery.delivered == 11
    with pytest.raises(CopiedError):
        writer.close()
    with remote_to(server).writer("arm", SPEC, spool=tmp_path / "spool") as after:
        assert after.wait_delivered(60)
    assert set(seeds_in(tmp_path / "store")) == {1, 2, 3}


def test_a_raw_client_hears_that_its_chunk_is_another(serve: Serve) -> None:
    server = serve()
    ours, theirs = ([message for message, _ in messages(*seeds)] for seeds in ((1, 2), (1, 3)))
    assert send(server, INCARNATION, ours)[1] == ""
    assert send(server, INCARNATION, ours) == (list(range(len(ours))), "")  # again, as after a lost answer
    assert send(server, INCARNATION, theirs) == ([0, 1, 2], "CopiedError")


def test_a_live_writer_stops_when_it_hears_of_chunks_that_it_never_made(
    serve: Serve, remote_to: To, tmp_path: Path
) -> None:
    server = serve()
    send(server, INCARNATION, [message for message, _ in messages(1, 2)])
    spool = Spool(tmp_path / "spool")
    writer = writer_of(remote_to(server), spool.begin("arm", INCARNATION, SPEC), spool)
    with pytest.raises(CopiedError, match="has chunks up to 5 of the same incarnation, and they are not those of this"):
        write_on(writer)
    assert writer.delivery.delivered == 0
    with pytest.raises(CopiedError):
        writer.close()


def test_copies_of_one_spool_are_delivered_once(serve: Serve, remote_to: To, tmp_path: Path) -> None:
    server = serve()
    log_left_behind(tmp_path / "one", 1, 2)
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    for name in ("one", "two"):
        with remote_to(server).writer("arm", SPEC, spool=tmp_path / name) as writer:
            assert writer.wait_delivered(60)
    assert seeds_in(tmp_path / "store") == [1, 2]


@pytest.mark.parametrize("num_delivered", [0, 2])
@pytest.mark.parametrize("others", [(3,), (3, 4, 5, 6, 7, 8)], ids=["a little further", "far ahead"])
def test_a_spool_whose_copy_went_another_way_is_delivered(
    serve: Serve,
    remote_to: To,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    others: tuple[int, ...],
    num_delivered: int,
) -> None:
    """The server has other chunks under the same numbers, so ours go under another name; none is left out."""
    server = serve()
    log_left_behind(tmp_path / "one", 1, *others)
    log_left_behind(tmp_path / "two", 1, 2, without=num_delivered)
    with remote_to(server).writer("arm", SPEC, spool=tmp_path / "one") as writer:
        assert writer.wait_delivered(60)
    with remote_to(server).writer("arm", SPEC, spool=tmp_path / "two") as writer, caplog.at_level(logging.WARNING):
        assert writer.wait_delivered(60)
    found = seeds_in(tmp_path / "store")
    assert {2, *others} <= set(found)
    assert found.count(2) == 1
    assert "its rows are sent as 'arm~" in caplog.text

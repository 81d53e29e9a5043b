"""Outbox and RemoteWriter: a control loop that never waits for a network, and steps that arrive all the same."""

from __future__ import annotations

import inspect
import logging
import math
import random
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.waiting import wait_for
from tests.writing import write_episode

from understudy.core import (
    ArraySpec,
    BacklogError,
    DamageError,
    DeliveryError,
    FencedError,
    Jpeg,
    RefusedError,
    Spec,
    Step,
    StepSpec,
    StoreClosedError,
    UnderstudyError,
)
from understudy.core.examples import CANONICAL, robot_spec, small_spec
from understudy.durable import files
from understudy.replay import Reader, Store, Writer, verify
from understudy.replay.format.chunk import Chunk
from understudy.replay.format.encoded_columns import encoded_chunk
from understudy.selftest.faulty_proxy import Proxy, free_port
from understudy.service import OutboxConfig, Remote, RemoteWriter, Server, ServerConfig, connect
from understudy.service.client import spool as spool_module
from understudy.service.client import write_stream as session
from understudy.service.client.outbox import MAX_HELD_CHUNKS

SPEC = small_spec()
Serve = Callable[..., Server]
To = Callable[..., Remote]


def free_address() -> str:
    """An address at which nobody listens."""
    return f"127.0.0.1:{free_port()}"


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


def step(episode: int, index: int, *, last: bool = False) -> Step:
    """A step whose observation says which it is."""
    return Step(observation=row(episode, index), action=np.zeros(2, np.float32), reward=0.0, terminated=last)


def row(episode: int, index: int) -> np.ndarray[Any, Any]:
    return np.array([episode, index, 0, 0], np.float32)


def live(writer: Writer, indices: range, *, life: int = 0, last: bool = False) -> None:
    """Append these steps; with `last`, the last one is that of its episode."""
    for index in indices:
        writer.append(step(life, index, last=last and index == indices[-1]))


def stored_rows(place: Path) -> list[tuple[int, int]]:
    """The rows of a store by what they say; no row has a neighbour that it did not have."""
    found = []
    with Reader(place) as reader:
        for record in reader.episodes("num_rows > 0"):
            ids = [(int(a), int(b)) for a, b in reader.rows(record.id)[1]["observation"][:, :2]]
            assert ids == [(ids[0][0], ids[0][1] + offset) for offset in range(len(ids))]
            found += ids
    assert len(set(found)) == len(found)
    assert verify(place).ok
    return found


def error_of_append(writer: Writer, steps: Iterable[Step]) -> UnderstudyError:
    """What a control loop gets in the end; nothing in it waits for the server, so that may come a little later."""
    for each in steps:
        try:
            writer.append(each)
        except UnderstudyError as error:
            return error
        time.sleep(0.005)
    raise AssertionError("no error came")


# ---- a writer like the local one


def test_it_is_used_like_the_local_writer() -> None:
    assert issubclass(RemoteWriter, Writer)
    for name in ("begin", "append", "end", "cut", "flush"):
        assert inspect.signature(getattr(RemoteWriter, name)) == inspect.signature(getattr(Writer, name))
    local = dict(inspect.signature(Store.writer).parameters)
    remote = inspect.signature(Remote.writer).parameters
    del local["background"], local["overflow"]  # a remote one has threads always, and an OutboxConfig
    assert {name: remote[name] for name in local} == local


@pytest.mark.parametrize("spooled", [True, False], ids=["spool", "memory"])
@pytest.mark.parametrize("name", CANONICAL)
def test_what_arrives_is_what_a_local_writer_stores(
    serve: Serve, remote_to: To, tmp_path: Path, name: str, spooled: bool
) -> None:
    spec, episode = CANONICAL[name]()
    steps = list(episode.steps())
    commit_steps = 7 if len(steps) < 100 else 500
    server = serve()

    def use(writer: Writer) -> None:
        write_episode(writer, episode)
        writer.begin(task="given up", seed=3)
        writer.append(steps[0])
        writer.append(steps[0]) if len(steps) > 1 else None
        writer.flush()
        writer.cut(episode.last_observation, success=False, labels={"why": "knocked over"})
        writer.begin()
        writer.cut()

    with Store.open(tmp_path / "local") as store:
        use(store.writer("actor", spec, commit_steps=commit_steps))
    with remote_to(server).writer(
        "actor", spec, commit_steps=commit_steps, spool=tmp_path / "spool" if spooled else None
    ) as writer:
        use(writer)
        assert writer.wait_delivered(20)
    with Reader(tmp_path / "local") as local, Reader(tmp_path / "store") as remote:
        ours, theirs = list(local.episodes()), list(remote.episodes())
        assert len(ours) == 2
        assert [(r.state, r.num_rows, r.info, r.num_bytes) for r in theirs] == [
            (r.state, r.num_rows, r.info, r.num_bytes) for r in ours
        ]
        assert remote.read(theirs[0].id).equals(episode)
        assert all(remote.read(a.id).equals(local.read(b.id)) for a, b in zip(theirs, ours, strict=True))


def test_what_is_where_can_be_seen(serve: Serve, remote_to: To, tmp_path: Path) -> None:
    server = serve()
    with remote_to(server).writer("actor", SPEC, spool=tmp_path / "spool", commit_steps=5) as writer:
        writer.begin()
        live(writer, range(7))
        assert writer.num_uncommitted >= 2
        assert writer.wait_delivered(10)
        assert writer.num_uncommitted == 0
        found = writer.delivery
        assert (found.queued, found.recorded, found.delivered, found.dropped, found.refused) == (0, 0, 7, 0, 0)
        assert (found.connected, found.address, found.problem) == (True, server.address, None)
        assert found.last_commit == server.store.last_commit
        assert not list((tmp_path / "spool").glob("*/*.safetensors"))


# ---- a server that is away


@pytest.mark.parametrize("spooled", [True, False], ids=["spool", "memory"])
def test_without_a_server_append_does_not_wait_and_the_steps_come_later(
    serve: Serve, remote_to: To, tmp_path: Path, spooled: bool
) -> None:
    address = free_address()
    episode = CANONICAL["long"]()[1]
    times_s = []
    with remote_to(address).writer(
        "actor", SPEC, spool=tmp_path / "spool" if spooled else None, config=OutboxConfig(queue_steps=10_000)
    ) as writer:
        writer.begin(episode.info)
        for each in episode.steps():
            started = time.monotonic()
            writer.append(each)
            times_s.append(time.monotonic() - started)
        writer.end(episode.last_observation)
        assert sorted(times_s)[-10] < 0.5  # the machine may stand still, but not at each of its 60 commits
        writer.flush()
        wait_for(lambda: writer.delivery.problem)
        found = writer.delivery
        assert (found.queued, found.recorded, found.delivered, found.connected) == (0, 3001, 0, False)
        assert found.problem is not None
        assert f"{address}: unavailable: " in found.problem
        assert "is `understudy serve` running there?" in found.problem
        assert not writer.wait_delivered(0.05)
        serve(port=port_of(address))
        assert writer.wait_delivered(20)
        assert writer.delivery.delivered == 3001
    with Reader(tmp_path / "store") as reader:
        assert [reader.read(record.id).equals(episode) for record in reader.episodes()] == [True]


def test_a_server_that_dies_and_comes_back_costs_nothing(remote_to: To, tmp_path: Path, cleanup: ExitStack) -> None:
    address = free_address()
    writer = cleanup.enter_context(remote_to(address).writer("actor", SPEC, spool=tmp_path / "spool", commit_steps=3))
    for life in range(4):
        with Store.open(tmp_path / "store") as store, Server(store, ServerConfig(port=port_of(address))):
            wait_for(lambda: writer.delivery.connected)
            writer.begin(seed=life)
            for index in range(20):
                writer.append(step(life, index, last=index == 19))
                if index == 11 and life % 2:
                    assert writer.wait_delivered(10)
        writer.end(row(life, 20))
        wait_for(lambda: not writer.delivery.connected)
    with Store.open(tmp_path / "store") as store, Server(store, ServerConfig(port=port_of(address))):
        assert writer.wait_delivered(20)
    assert stored_rows(tmp_path / "store") == [(life, index) for life in range(4) for index in range(21)]


def test_closing_without_a_spool_says_what_is_lost(remote_to: To) -> None:
    writer = remote_to(free_address()).writer("actor", SPEC)
    writer.begin()
    live(writer, range(60))
    started = time.monotonic()
    with pytest.raises(
        DeliveryError, match=r"'actor': closed with 60 rows that the server does not have \(.*\); wait longer, or use a"
    ):
        writer.close(timeout_s=0.2)
    assert time.monotonic() - started < 5
    with pytest.raises(StoreClosedError, match="writer 'actor' is closed; make a new one"):
        writer.flush()


def test_closing_twice_is_closing_once(remote_to: To, tmp_path: Path) -> None:
    with remote_to(free_address()).writer("actor", SPEC, spool=tmp_path / "spool") as writer:
        writer.begin()
        writer.append(step(0, 0))
        writer.close(timeout_s=0.1)
        started = time.monotonic()
    assert time.monotonic() - started < 2.0


def test_what_a_spool_holds_the_next_writer_delivers_first(serve: Serve, remote_to: To, tmp_path: Path) -> None:
    address = free_address()
    for life in range(3):
        writer = remote_to(address).writer("actor", SPEC, spool=tmp_path / "spool", commit_steps=4)
        writer.begin(seed=life)
        live(writer, range(10), life=life)
        writer.close(timeout_s=0.05)  # an episode that stays open: a crash, as far as the next can tell
    with remote_to(address).writer("actor", SPEC, spool=tmp_path / "spool") as writer:
        assert writer.delivery.recorded == 30
        serve(port=port_of(address))
        writer.begin(seed=3)
        writer.append(step(3, 0, last=True))
        writer.end(row(3, 1))
        assert writer.wait_delivered(20)
    assert stored_rows(tmp_path / "store") == [
        *((life, index) for life in range(3) for index in range(10)),
        (3, 0),
        (3, 1),
    ]
    with Reader(tmp_path / "store") as reader:
        assert [record.state for record in reader.episodes()] == ["cut", "cut", "cut", "ended"]
    assert len(list((tmp_path / "spool").glob("*/*.safetensors"))) == 0


# ---- a queue that is full

FULL = {"queue_steps": 10, "spool_bytes": 1}  # one chunk is recorded, and then nothing until it is delivered


def start_full(writer: RemoteWriter, num_rows: int = 15) -> None:
    """One chunk of 5 rows in the spool and two in the queue."""
    writer.begin()
    live(writer, range(5))
    writer.flush()
    live(writer, range(5, num_rows))
    assert (writer.delivery.queued, writer.delivery.recorded) == (num_rows - 5, 5)


def test_block_waits_and_then_says_what_to_do(serve: Serve, remote_to: To, tmp_path: Path) -> None:
    address = free_address()
    config = OutboxConfig(overflow="block", block_timeout_s=0.3, **FULL)
    with remote_to(address).writer("actor", SPEC, spool=tmp_path / "spool", commit_steps=5, config=config) as writer:
        start_full(writer)
        wait_for(lambda: writer.delivery.problem)
        live(writer, range(15, 19))
        for refused, index in enumerate((19, 20, 21), 1):  # the first of them is kept, the others are not taken
            started = time.monotonic()
            with pytest.raises(
                BacklogError,
                match=r"writer 'actor': the queue is full with 10 steps after 0.3 s of waiting \(127.0.0.1:.*\); "
                r"5 are in the spool. Wait for it, or choose another overflow",
            ):
                writer.append(step(0, index))
            assert time.monotonic() - started > 0.25
            assert writer.delivery.refused == refused
        serve(port=port_of(address))
        wait_for(lambda: writer.delivery.delivered == 15)
        live(writer, range(22, 30), last=True)
        writer.end(row(0, 30))
        assert writer.wait_delivered(10)
        assert writer.delivery.dropped == 0
    assert stored_rows(tmp_path / "store") == [(0, index) for index in range(31) if index not in (20, 21)]
    with Reader(tmp_path / "store") as reader:
        assert [(r.state, r.info.labels) for r in reader.episodes()] == [
            ("cut", {}),
            ("ended", {"steps_missing_before": "2"}),
        ]


@pytest.mark.parametrize(
    ("codec", "reason"),
    [(Jpeg(), "camera frames come faster than this machine encodes and writes them"), (None, "the disk is slow")],
)
def test_block_blames_the_encoders_or_the_disk_while_the_spool_has_room(
    remote_to: To, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, codec: Jpeg | None, reason: str
) -> None:
    go_on = threading.Event()

    def encode_slowly(chunk: Chunk) -> Chunk:
        go_on.wait(30)
        return encoded_chunk(chunk)

    monkeypatch.setattr("understudy.service.client.outbox.encoded_chunk", encode_slowly)
    spec = StepSpec(observation=Spec(ArraySpec(shape=(16, 16, 3), dtype="uint8", codec=codec)), action=SPEC.action)
    config = OutboxConfig(queue_steps=5, block_timeout_s=0.2)
    frame = np.zeros((16, 16, 3), np.uint8)
    remote = remote_to(free_address())
    with remote.writer("arm", spec, spool=tmp_path / "spool", commit_steps=5, config=config) as writer:
        writer.begin()

        def fill() -> None:
            for _ in range(20):
                writer.append(Step(observation=frame, action=np.zeros(2, np.float32), reward=0.0))

        with pytest.raises(BacklogError, match=rf"5 steps after 0.2 s of waiting \({reason}\); 0 are in the spool"):
            fill()
        go_on.set()
        wait_for(lambda: writer.delivery.queued == 0)


def test_block_goes_on_as_soon_as_there_is_room(serve: Serve, remote_to: To, tmp_path: Path) -> None:
    server = serve()
    config = OutboxConfig(overflow="block", block_timeout_s=20.0, **FULL)
    with remote_to(server).writer("actor", SPEC, spool=tmp_path / "spool", commit_steps=5, config=config) as writer:
        writer.begin()
        live(writer, range(300), last=True)
        writer.end(row(0, 300))
        assert writer.wait_delivered(20)
    assert stored_rows(tmp_path / "store") == [(0, index) for index in range(301)]


@pytest.mark.parametrize("overflow", ["drop_newest", "drop_oldest"])
def test_what_is_dropped_is_counted_and_said(
    serve: Serve, remote_to: To, tmp_path: Path, caplog: pytest.LogCaptureFixture, overflow: Any
) -> None:
    address = free_address()
    config = OutboxConfig(overflow=overflow, block_timeout_s=30.0, **FULL)
    caplog.set_level(logging.WARNING, "understudy.service")
    with remote_to(address).writer("actor", SPEC, spool=tmp_path / "spool", commit_steps=5, config=config) as writer:
        start_full(writer)
        started = time.monotonic()
        live(writer, range(15, 40))
        assert time.monotonic() - started < config.block_timeout_s  # it never waits
        assert (writer.delivery.dropped, writer.delivery.queued, writer.delivery.refused) == (25, 10, 0)
        said = [text for text in caplog.messages if "dropped" in text]
        assert said == [
            f"writer 'actor': the queue is full; {n} rows dropped so far (overflow={overflow})" for n in (5, 10, 20)
        ]
        serve(port=port_of(address))
        wait_for(lambda: writer.delivery.delivered == 15)
        live(writer, range(40, 45), last=True)
        writer.end(row(0, 45))
        assert writer.wait_delivered(10)
        assert writer.delivery.dropped == 25
    lost = range(15, 40) if overflow == "drop_newest" else range(5, 30)
    assert stored_rows(tmp_path / "store") == [(0, index) for index in range(46) if index not in lost]
    with Reader(tmp_path / "store") as reader:
        assert [(r.state, r.info.labels) for r in reader.episodes()] == [
            ("cut", {}),
            ("ended", {"steps_missing_before": "25"}),
        ]


# ---- each option changes something


def rows_until_backlog(writer: RemoteWriter) -> int:
    writer.begin()
    live(writer, range(5))
    writer.flush()
    for index in range(5, 1000):
        try:
            writer.append(step(0, index))
        except BacklogError:
            return index - 4  # those behind the first chunk, this one included, which is kept
    raise AssertionError("no end came")


ROW_BYTES = sum(leaf.row_bytes for leaf in SPEC.columns.values())


@pytest.mark.parametrize(
    ("limit", "taken"),
    [
        ({"queue_steps": 1}, 10),
        ({"queue_steps": 10}, 15),
        ({"queue_steps": 30}, 35),
        ({"queue_bytes": 10 * ROW_BYTES}, 15),
    ],
)
def test_the_queue_has_room_for_so_much(remote_to: To, cleanup: ExitStack, limit: dict[str, int], taken: int) -> None:
    config = OutboxConfig(**limit, spool_bytes=1, block_timeout_s=0.0)
    writer = remote_to(free_address()).writer("actor", SPEC, commit_steps=5, config=config)
    cleanup.callback(close_quietly, writer)
    assert rows_until_backlog(writer) == taken


def test_spool_bytes(remote_to: To, cleanup: ExitStack) -> None:
    recorded = {}
    for spool_bytes in (1, 10_000, 20_000):
        config = OutboxConfig(queue_steps=5, spool_bytes=spool_bytes, block_timeout_s=0.5)
        writer = remote_to(free_address()).writer("actor", SPEC, commit_steps=5, config=config)
        cleanup.callback(close_quietly, writer)
        rows_until_backlog(writer)
        recorded[spool_bytes] = writer.delivery.recorded
    assert recorded[1] == 5
    assert 5 < recorded[10_000] < recorded[20_000] < 200


@pytest.mark.serial
@pytest.mark.parametrize("block_timeout_s", [0.0, 1.5])
def test_block_s(remote_to: To, cleanup: ExitStack, block_timeout_s: float) -> None:
    config = OutboxConfig(block_timeout_s=block_timeout_s, **FULL)
    writer = remote_to(free_address()).writer("actor", SPEC, commit_steps=5, config=config)
    cleanup.callback(close_quietly, writer)
    start_full(writer)
    live(writer, range(15, 19))
    started = time.monotonic()
    with pytest.raises(BacklogError):
        writer.append(step(0, 19))
    assert block_timeout_s <= time.monotonic() - started < block_timeout_s + 1.4


@pytest.mark.parametrize("failover_after_s", [0.3, None])
def test_move_after_s(
    serve: Serve, remote_to: To, tmp_path: Path, cleanup: ExitStack, failover_after_s: float | None
) -> None:
    """To the shard that is there, from one that is not."""
    server = serve()
    dead = free_address()
    remote = remote_to(f"{dead},{server.address}")
    name = next(name for name in map(str, range(100)) if remote.shard_order(name)[0] == dead)
    writer = remote.writer(name, SPEC, spool=tmp_path / "spool", config=OutboxConfig(failover_after_s=failover_after_s))
    cleanup.callback(close_quietly, writer)
    writer.begin()
    live(writer, range(10), last=True)
    writer.end(row(0, 10))
    assert writer.wait_delivered(10.0 if failover_after_s else 1.5) == (failover_after_s is not None)
    if failover_after_s is not None:
        assert writer.delivery.address == server.address
        assert stored_rows(tmp_path / "store") == [(0, index) for index in range(11)]


def test_options_that_cannot_be_are_refused() -> None:
    for wrong in ({"queue_steps": 0}, {"queue_bytes": 0}, {"spool_bytes": 0}, {"block_timeout_s": -1.0}):
        with pytest.raises(
            BacklogError,
            match="outbox: expected queue_steps, queue_bytes and spool_bytes from 1 and block_timeout_s from 0",
        ):
            OutboxConfig(**wrong)  # type: ignore[arg-type]
    for seconds in (-1.0, math.inf, math.nan):
        with pytest.raises(BacklogError, match="expected spool_after_s from 0, got"):
            OutboxConfig(spool_after_s=seconds)
    with pytest.raises(BacklogError, match="overflow: expected block, drop_newest or drop_oldest, got 'drop'"):
        OutboxConfig(overflow="drop")  # type: ignore[arg-type]
    for address in ("", "localhost", "a:1,b"):
        with pytest.raises(
            RefusedError, match="addresses: expected host:port or name=host:port, or several with commas"
        ):
            connect(address)


def close_quietly(writer: RemoteWriter) -> None:
    with suppress(UnderstudyError):
        writer.close(timeout_s=0.0)


# ---- chunks that the server acknowledges before they are recorded


def recorded_files(spool: Path) -> list[str]:
    return sorted(path.name for path in spool.glob("*/*.safetensors"))


@pytest.fixture
def behind_proxy(serve: Serve, cleanup: ExitStack) -> Proxy:
    """Between the writer and a server; frozen, it lets nobody see the difference to a server that is slow."""
    return cleanup.enter_context(Proxy(port_of(serve().address)))


def connected_writer(remote: Remote, spool: Path | None, **options: Any) -> RemoteWriter:
    writer = remote.writer("actor", SPEC, spool=spool, commit_steps=5, config=OutboxConfig(**options))
    writer.begin()
    wait_for(lambda: writer.delivery.connected)
    return writer


@pytest.mark.parametrize(("spool_after_s", "written"), [(0.0, 4), (60.0, 0)])
def test_spool_after_s_decides_what_a_server_that_answers_costs_the_disk(
    serve: Serve, remote_to: To, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spool_after_s: float, written: int
) -> None:
    created = []
    create = files.create_durably
    monkeypatch.setattr(spool_module, "create_durably", lambda *a: (created.append(a[0]), create(*a)))
    writer = connected_writer(remote_to(serve()), tmp_path / "spool", spool_after_s=spool_after_s)
    for first in range(0, 20, 5):
        live(writer, range(first, first + 5))
        assert writer.wait_delivered(10)
    writer.close()
    assert len(created) == written
    assert stored_rows(tmp_path / "store") == [(0, index) for index in range(20)]


@pytest.mark.parametrize("spool_after_s", [0.3, 60.0])
def test_what_the_server_does_not_acknowledge_in_time_is_recorded(
    remote_to: To, behind_proxy: Proxy, tmp_path: Path, spool_after_s: float
) -> None:
    spool = tmp_path / "spool"
    with connected_writer(remote_to(behind_proxy.address), spool, spool_after_s=spool_after_s) as writer:
        behind_proxy.freeze(on=True)
        live(writer, range(10))
        if spool_after_s < 1:
            wait_for(lambda: writer.delivery.recorded == 10)
            assert len(recorded_files(spool)) == 2
            assert (writer.delivery.queued, writer.num_uncommitted) == (0, 0)
        else:
            wait_for(lambda: writer.delivery.queued == 10)
            time.sleep(1.0)
            assert (recorded_files(spool), writer.delivery.recorded, writer.num_uncommitted) == ([], 0, 10)
        behind_proxy.heal()
        assert writer.wait_delivered(20)
        assert recorded_files(spool) == []
    assert stored_rows(tmp_path / "store") == [(0, index) for index in range(10)]


def test_flush_does_not_wait_for_a_server_that_is_slow(remote_to: To, behind_proxy: Proxy, tmp_path: Path) -> None:
    spool = tmp_path / "spool"
    with connected_writer(remote_to(behind_proxy.address), spool, spool_after_s=60.0) as writer:
        behind_proxy.freeze(on=True)
        live(writer, range(13))
        writer.flush()
        assert len(recorded_files(spool)) == 3
        assert (writer.delivery.recorded, writer.num_uncommitted) == (13, 0)
        behind_proxy.heal()
        assert writer.wait_delivered(20)
    assert stored_rows(tmp_path / "store") == [(0, index) for index in range(13)]


def test_what_is_held_is_recorded_when_the_server_goes_away_or_the_writer_is_closed(
    remote_to: To, behind_proxy: Proxy, tmp_path: Path
) -> None:
    writer = connected_writer(remote_to(behind_proxy.address), tmp_path / "a", spool_after_s=60.0)
    behind_proxy.freeze(on=True)
    live(writer, range(5))
    wait_for(lambda: writer.delivery.queued == 5)
    behind_proxy.refuse(on=True)
    behind_proxy.cut()
    wait_for(lambda: writer.delivery.recorded == 5)
    assert len(recorded_files(tmp_path / "a")) == 1
    behind_proxy.heal()
    assert writer.wait_delivered(20)
    behind_proxy.freeze(on=True)
    live(writer, range(5, 12))
    wait_for(lambda: writer.delivery.queued == 5)
    writer.close(timeout_s=0.5)
    assert len(recorded_files(tmp_path / "a")) == 2
    behind_proxy.heal()
    with remote_to(behind_proxy.address).writer("actor", SPEC, spool=tmp_path / "a") as successor:
        assert successor.wait_delivered(20)
    assert stored_rows(tmp_path / "store") == [(0, index) for index in range(12)]


def test_only_a_few_chunks_are_held(remote_to: To, behind_proxy: Proxy, tmp_path: Path) -> None:
    """The others wait in the queue, whose size is known."""
    with connected_writer(
        remote_to(behind_proxy.address), tmp_path / "spool", spool_after_s=60.0, queue_steps=10, block_timeout_s=0.0
    ) as writer:
        behind_proxy.freeze(on=True)
        for number in range(MAX_HELD_CHUNKS):
            live(writer, range(5 * number, 5 * number + 5))
            wait_for(lambda: writer._outbox._log.num_held == number + 1)  # noqa: B023
        more = range(5 * MAX_HELD_CHUNKS, 5 * MAX_HELD_CHUNKS + 14)
        live(writer, more)
        with pytest.raises(BacklogError, match=r"10 steps .*the server has not acknowledged what it was sent"):
            live(writer, range(more.stop, more.stop + 1))
        behind_proxy.heal()
        wait_for(lambda: writer._outbox._queued_rows == 0)
        assert writer.wait_delivered(20)


# ---- a process that was replaced, or is not let in


def test_a_process_that_was_replaced_is_told_and_loses_nothing_it_recorded(
    serve: Serve, remote_to: To, tmp_path: Path
) -> None:
    server = serve()
    old = remote_to(server).writer("arm", SPEC, spool=tmp_path / "old", commit_steps=5)
    old.begin(seed=0)
    live(old, range(5))
    assert old.wait_delivered(10)
    new = remote_to(server).writer("arm", SPEC, spool=tmp_path / "new", commit_steps=5)
    new.begin(seed=1)
    new.append(step(1, 0, last=True))
    new.end(row(1, 1))
    assert new.wait_delivered(10)
    error = error_of_append(old, (step(0, index) for index in range(5, 2000)))
    assert isinstance(error, FencedError)
    assert re.search(
        r"writer 'arm'.* was replaced by a newer process of the same name.*\(\d+ rows that were recorded and not "
        r"delivered stay in .*old/00000001-.*; the next writer with this spool delivers them\)",
        str(error),
    )
    close_quietly(old)
    recorded = old.delivery.recorded
    assert recorded >= 5
    new.close()
    with remote_to(server).writer("arm", SPEC, spool=tmp_path / "old") as third:
        assert third.wait_delivered(10)
        assert third.delivery.delivered == recorded
    assert stored_rows(tmp_path / "store") == [
        *((0, index) for index in range(5)),
        (1, 0),
        (1, 1),
        *((0, index) for index in range(5, 5 + recorded)),
    ]
    names = {writer.name for writer in server.store.state.writers.values()}
    assert names == {"arm", f"arm~{old.incarnation[:8]}"}


def test_what_a_dead_process_left_goes_under_a_name_of_its_own(serve: Serve, remote_to: To, tmp_path: Path) -> None:
    server = serve("store")
    old = remote_to(server).writer("arm", SPEC, spool=tmp_path / "old", commit_steps=4)
    old.begin(seed=0)
    live(old, range(10))
    assert old.wait_delivered(10)
    server.stop(0.0)
    server.store.close()
    live(old, range(10, 20))
    old.close(timeout_s=0.05)
    server = serve("store", port=port_of(server.address))
    other = remote_to(server).writer("arm", SPEC)
    other.begin(seed=1)
    other.append(step(1, 0, last=True))
    other.end(row(1, 1))
    assert other.wait_delivered(10)
    other.close()
    with remote_to(server).writer("arm", SPEC, spool=tmp_path / "old") as third:
        assert third.wait_delivered(10)
    assert sorted(stored_rows(tmp_path / "store")) == [*((0, index) for index in range(20)), (1, 0), (1, 1)]
    assert set(server.store.state.writers) == {"arm", f"arm~{old.incarnation[:8]}"}


@pytest.mark.parametrize("token", ["wrong" * 5, None])
def test_the_wrong_token_is_an_error_of_append(serve: Serve, remote_to: To, tmp_path: Path, token: str | None) -> None:
    server = serve(token="right" * 5)
    writer = remote_to(server, token=token).writer("actor", SPEC, spool=tmp_path / "spool", commit_steps=1)
    writer.begin()
    error = error_of_append(writer, (step(9, index) for index in range(2000)))
    assert isinstance(error, RefusedError)
    assert "the token is missing or wrong; pass the one that `understudy serve` was started with" in str(error)
    assert writer.delivery.problem == str(error)
    close_quietly(writer)
    with remote_to(server, token="right" * 5).writer("actor", SPEC, spool=tmp_path / "spool") as writer:
        assert writer.wait_delivered(10)
    assert stored_rows(tmp_path / "store")[:1] == [(9, 0)]


def test_a_chunk_that_the_server_does_not_take_is_an_error_of_append(serve: Serve, remote_to: To) -> None:
    spec = robot_spec(64)
    server = serve(max_message_bytes=100_000)
    writer = remote_to(server).writer("actor", spec, commit_steps=20)
    writer.begin()
    images = {
        "wrist_1": np.zeros((64, 64, 3), np.uint8),
        "wrist_2": np.zeros((64, 64, 3), np.uint8),
        "state": np.zeros(20, np.float32),
    }
    each = Step(observation=images, action=np.zeros(7, np.float32), reward=0.0)
    error = error_of_append(writer, (each for _ in range(2000)))
    assert isinstance(error, RefusedError)
    assert re.search(
        r"chunk 0 has \d+ bytes, and the server takes 100000; lower commit_steps, or raise --max-message-mb", str(error)
    )
    close_quietly(writer)


@pytest.mark.parametrize("at", [-40, 30], ids=["rows", "header"])
@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_damaged_chunk_of_a_spool_is_set_aside_and_the_others_arrive(
    serve: Serve, remote_to: To, tmp_path: Path, number: int, at: int
) -> None:
    address = free_address()
    writer = remote_to(address).writer("actor", SPEC, spool=tmp_path / "spool", commit_steps=4)
    writer.begin()
    live(writer, range(12))
    writer.close(timeout_s=0.05)
    (path,) = (tmp_path / "spool").glob(f"*/{number:08d}.safetensors")
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)
    serve(port=port_of(address))
    with remote_to(address).writer("actor", SPEC, spool=tmp_path / "spool", commit_steps=1) as writer:
        writer.begin()
        live(writer, range(3), life=9)
        assert writer.wait_delivered(60)
        assert (writer.delivery.delivered, writer.delivery.damaged_chunks, writer.delivery.recorded) == (11, 1, 0)
    whole = [(0, index) for index in range(12) if index // 4 != number]
    assert stored_rows(tmp_path / "store") == [*whole, *((9, index) for index in range(3))]
    assert (tmp_path / "spool" / f"damaged-{path.parent.name}" / path.name).read_bytes() == data


@pytest.mark.parametrize("damage", ["cut", "unreadable"])
def test_a_chunk_of_its_own_that_is_damaged_is_an_error_of_waiting(
    serve: Serve, remote_to: To, tmp_path: Path, damage: str
) -> None:
    address = free_address()
    writer = remote_to(address).writer("actor", SPEC, spool=tmp_path / "spool", commit_steps=4)
    writer.begin()
    live(writer, range(12))
    writer.flush()
    (path,) = (tmp_path / "spool").glob("*/00000001.safetensors")
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-1])
    else:
        path.unlink()
        path.symlink_to("/proc/self/mem")  # EIO when it is read, as from a bad sector
    serve(port=port_of(address))
    with pytest.raises(DamageError, match=r"the disk damaged 1 recorded chunks before they were delivered; they are"):
        writer.wait_delivered(60)
    writer.close()
    assert stored_rows(tmp_path / "store") == [(0, index) for index in (*range(4), *range(8, 12))]


# ---- clocks and other stores


def test_clocks_that_jump_change_nothing(
    serve: Serve, remote_to: To, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jumps = random.Random(1)
    monkeypatch.setattr(time, "time", lambda: jumps.choice([-1e9, 0.0, 1.0, 1e9, 4e9, 1e11]))
    address = free_address()
    config = OutboxConfig(block_timeout_s=0.3, **FULL)
    with remote_to(address).writer("actor", SPEC, spool=tmp_path / "spool", commit_steps=5, config=config) as writer:
        start_full(writer)
        live(writer, range(15, 19))
        started = time.monotonic()
        with pytest.raises(BacklogError):
            writer.append(step(0, 19))
        assert time.monotonic() - started > 0.25
        serve(port=port_of(address))
        wait_for(lambda: writer.delivery.delivered == 15)
        for first in range(20, 100, 5):  # a full queue would wait for no more than 0.3 s
            live(writer, range(first, first + 5), last=first == 95)
            assert writer.wait_delivered(60)
        writer.end(row(0, 100))
        assert writer.wait_delivered(60)
    assert stored_rows(tmp_path / "store") == [(0, index) for index in range(101)]


@pytest.mark.parametrize("then", ["the right one", "replaces", "another address", "another process"])
def test_another_store_at_the_same_address_gets_nothing_until_somebody_says_so(
    serve: Serve, remote_to: To, tmp_path: Path, caplog: pytest.LogCaptureFixture, then: str
) -> None:
    """A port that is free may be taken by somebody else's server, also by one that lets this writer in."""
    first = serve("first")
    store, port = first.store.catalog.store_id, port_of(first.address)
    remote = remote_to(f"shard={first.address}")
    writer = remote.writer("actor", SPEC, spool=tmp_path / "spool", commit_steps=5)
    writer.begin(seed=0)
    live(writer, range(13))
    assert writer.wait_delivered(10)
    first.stop(0.0)
    first.store.close()
    live(writer, range(13, 23), last=True)
    writer.end(row(0, 23))
    second = serve("second", port=port)
    wait_for(lambda: "serve this one with" in (writer.delivery.problem or ""))
    assert not writer.wait_delivered(0.5)
    (said,) = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert f"this writer's rows go to {store}" in said
    assert f"`--replaces {store}`" in said
    assert stored_rows(tmp_path / "second") == []
    if then == "another address":
        remote.update_address("shard", serve("third").address)
    elif then == "another process":
        writer.close(0)
        writer = remote_to(f"shard={second.address}").writer("actor", SPEC, spool=tmp_path / "spool")
    else:
        second.stop(0.0)
        second.store.close()
        serve(
            "first" if then == "the right one" else "second", port=port, replaces=(store,) if then == "replaces" else ()
        )
    assert writer.wait_delivered(10)
    writer.close()
    if then == "the right one":
        assert stored_rows(tmp_path / "first") == [(0, index) for index in range(24)]
    else:
        assert stored_rows(tmp_path / "first") == [(0, index) for index in range(13)]
        place = "third" if then == "another address" else "second"
        assert stored_rows(tmp_path / place) == [(0, index) for index in range(13, 24)]
        assert "lacks chunks 0 to 2" in caplog.text


def test_a_server_with_a_store_from_a_backup_gets_what_is_left(
    serve: Serve, remote_to: To, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It has some of this process's chunks, but not the last that were acknowledged."""
    server = serve("first")
    with remote_to(server).writer("actor", SPEC, spool=tmp_path / "spool", commit_steps=5) as writer:
        writer.begin(seed=0)
        live(writer, range(10))
        assert writer.wait_delivered(10)
        server.stop(0.0)
        server.store.close()
        shutil.copytree(tmp_path / "first", tmp_path / "backup")
        server = serve("first", port=port_of(server.address))
        live(writer, range(10, 20))
        assert writer.wait_delivered(10)
        server.stop(0.0)
        live(writer, range(20, 60), last=True)
        writer.flush()
        serve("backup", port=port_of(server.address))
        writer.end(row(0, 60))
        assert writer.wait_delivered(10)
        assert any("lacks chunks 2 to 3" in text for text in caplog.messages)
    assert stored_rows(tmp_path / "backup") == [(0, index) for index in range(61) if not 10 <= index < 20]


def test_a_writer_that_moves_away_and_back_loses_nothing(serve: Serve, remote_to: To, tmp_path: Path) -> None:
    """Each shard has some of its chunks, and neither has all."""
    servers = {place: serve(place) for place in ("a", "b")}
    addresses = {place: server.address for place, server in servers.items()}
    remote = remote_to(",".join(addresses.values()))
    name = next(name for name in map(str, range(100)) if remote.shard_order(name)[0] == addresses["a"])
    config = OutboxConfig(failover_after_s=0.2)
    with remote.writer(name, SPEC, spool=tmp_path / "spool", commit_steps=5, config=config) as writer:
        writer.begin()
        at = 0
        for here, there in (("a", "b"), ("b", "a"), ("a", "b")):
            live(writer, range(at, at + 20))
            at += 20
            assert writer.wait_delivered(10)
            assert writer.delivery.address == addresses[here]
            servers[here].stop(0.0)
            servers[here].store.close()
            if servers[there].failed.is_set():
                servers[there] = serve(there, port=port_of(addresses[there]))
        writer.append(step(0, at, last=True))
        writer.end(row(0, at + 1))
        assert writer.wait_delivered(10)
    found = stored_rows(tmp_path / "a") + stored_rows(tmp_path / "b")
    assert sorted(found) == [(0, index) for index in range(at + 2)]


def test_what_was_queued_when_a_writer_was_fenced_is_recorded_all_the_same(
    serve: Serve, remote_to: To, tmp_path: Path
) -> None:
    server = serve()
    remote = remote_to(server)
    config = OutboxConfig(spool_bytes=1)  # so that a chunk waits in the queue until the one before it is delivered
    old = remote.writer("arm", SPEC, spool=tmp_path / "spool", commit_steps=5, config=config)
    old.begin(seed=1)
    live(old, range(5), life=1)
    assert old.wait_delivered(20)
    server.store.begin_writer("arm", "another process")
    with suppress(FencedError):
        live(old, range(5, 25), life=1)
    with pytest.raises(FencedError):
        old.wait_delivered(20)
    with suppress(FencedError):
        old.close()
    taken = 5 * ((old.delivery.delivered + old.delivery.recorded) // 5)
    with remote.writer("arm", SPEC, spool=tmp_path / "spool") as third:
        assert third.wait_delivered(20)
    with Reader(server.store.path) as reader:
        assert sum(record.num_rows for record in reader.episodes()) == taken
    assert old.delivery.queued == 0


def test_what_only_ends_an_episode_is_waited_for_too(serve: Serve, remote_to: To, tmp_path: Path) -> None:
    server = serve()
    remote = remote_to(server)
    with remote.writer("arm", SPEC, spool=tmp_path / "spool", commit_steps=2) as writer:
        writer.begin(seed=1)
        writer.append(step(1, 0))
        writer.append(step(1, 1))
        assert writer.wait_delivered(20)
        writer.cut()  # a chunk without rows
        assert writer.wait_delivered(20)
        with Reader(server.store.path) as reader:
            assert [record.state for record in reader.episodes()] == ["cut"]


@pytest.mark.parametrize(("bytes_per_s", "delivered"), [(200.0, True), (1e12, False)])
def test_a_slow_link_gets_the_time_that_its_bytes_take(
    bytes_per_s: float, delivered: bool, serve: Serve, remote_to: To, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "ANSWER_TIMEOUT_S", 0.6)
    monkeypatch.setattr(session, "SLOWEST_LINK_BYTES_PER_S", bytes_per_s)
    server = serve()
    with Proxy(port_of(server.address), port=free_port(), seed=1) as proxy:
        writer = remote_to(proxy.address).writer("arm", SPEC)
        writer.begin(seed=1)
        writer.append(step(1, 0))
        assert writer.wait_delivered(20)
        proxy.delay(0.5)  # there and back: more than the answer may take, if the bytes did not count
        writer.append(step(1, 1))
        assert writer.wait_delivered(60.0 if delivered else 4.0) == delivered
        proxy.delay(0.0)
        assert writer.wait_delivered(20)
        writer.close()

"""Objects that were open when a process was forked: they work in the child or say where they belong, and never hang."""

from __future__ import annotations

import gc
import json
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.writing import write_episode

from understudy.core import Step, StoreClosedError, TransitionBatch, UnderstudyError
from understudy.core import tree as trees
from understudy.core.examples import random_episode, random_steps, robot_spec, small_spec
from understudy.processes.forks import unforked
from understudy.replay import EVERYTHING, Mixture, Prefetch, Reader, Sampler, Store, verify
from understudy.replay.sample.batch_source import BatchSource
from understudy.service import Server, ServerConfig, connect
from understudy.service.wire import grpc_forks
from understudy.web.errors import ListenError

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")

CHILD_S = 30  # after which a child that hangs is killed


def in_child(call: Callable[[], Any]) -> Any:
    """What a call says in a forked process; an error of ours is its text."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.alarm(CHILD_S)
        try:
            said = call()
        except UnderstudyError as error:
            said = f"{type(error).__name__}: {error}"
        except BaseException as error:  # noqa: BLE001 (the parent shows it)
            said = f"not ours: {error!r}"
        os.write(write_end, json.dumps(said).encode())
        gc.collect()  # a child may destroy its copies at any time
        os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as pipe:
        said = pipe.read()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, "the child was killed, because it hung"
    return json.loads(said)


def fill(path: Path, *, spec=None, num_episodes: int = 4, writer: str = "w") -> Path:
    with Store.open(path) as store:
        opened = store.writer(writer, spec or small_spec())
        for seed in range(num_episodes):
            write_episode(opened, random_episode(spec or small_spec(), 9, seed))
    return path


def digest(batch: TransitionBatch) -> list[Any]:
    """What tells a batch from others."""
    pixels = [int(np.asarray(leaf, np.float64).sum()) for _, leaf in trees.leaves(batch.observation) if leaf.ndim > 2]
    return [batch.episode.tolist(), batch.index.tolist(), pixels]


def digests(source: BatchSource, count: int = 4) -> list[Any]:
    return [digest(source.sample()) for _ in range(count)]


@pytest.mark.parametrize("used", [False, True])
def test_a_sampler_goes_on_in_a_child_with_the_same_batches(tmp_path: Path, used: bool) -> None:
    path = fill(tmp_path / "store", spec=robot_spec())
    with Reader(path) as reader, Sampler(reader, EVERYTHING, batch_size=8, seed=1) as sampler:
        sampler.follow()
        if used:
            digests(sampler)  # by threads that the child does not have
        for _ in range(2):
            child = in_child(lambda: digests(sampler))
            assert child == digests(sampler)


def test_a_mixture_goes_on_in_a_child(tmp_path: Path) -> None:
    path = fill(tmp_path / "store")
    samplers = {name: Sampler(path, EVERYTHING, batch_size=4, seed=ord(name)) for name in "ab"}
    with Mixture(samplers, {"a": 1, "b": 2}, batch_size=7) as mixture:
        mixture.follow()
        digests(mixture)
        assert in_child(lambda: digests(mixture)) == digests(mixture)


def test_a_child_of_a_child_goes_on(tmp_path: Path) -> None:
    with Sampler(fill(tmp_path / "store"), EVERYTHING, batch_size=4, seed=1) as sampler:
        sampler.follow()
        assert in_child(lambda: in_child(lambda: digests(sampler))) == digests(sampler)


SERVE = """
import sys
from understudy.replay import Store
from understudy.service import Server, ServerConfig
with Store.open(sys.argv[1]) as store, Server(store, ServerConfig(port=0)) as server:
    print(server.address, flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    """Of a server in a process of its own."""
    command = [sys.executable, "-c", SERVE, fill(tmp_path / "served")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        yield server.stdout.readline().strip()
        server.communicate("\n")


def sampled(address: str) -> list[Any]:
    with connect(address) as remote, remote.sampler(EVERYTHING, batch_size=4, seed=1) as sampler:
        sampler.follow()
        return digests(sampler, 2)


@pytest.mark.serial  # in a process without Ray, which keeps gRPC running
def test_a_fork_right_after_the_last_connection_was_closed_may_connect(address: str) -> None:
    """The threads of gRPC end a moment later. A fork in that moment, or the process that it made, once hung."""
    wanted = sampled(address)
    for _ in range(5):
        assert in_child(lambda: sampled(address)) == sampled(address) == wanted


@pytest.mark.serial  # in a process without Ray, which keeps gRPC running
def test_a_fork_after_a_server_was_closed_may_connect(address: str, tmp_path: Path) -> None:
    with Store.open(fill(tmp_path / "store")) as store, Server(store, ServerConfig(port=0)) as server:
        sampled(server.address)
        assert "gRPC, which was in use at the fork, belongs to the process" in in_child(lambda: sampled(address))
    assert in_child(lambda: sampled(address)) == sampled(address)


@pytest.mark.serial  # in a process without Ray, which keeps gRPC running
def test_a_fork_after_a_server_did_not_get_its_port_may_connect(address: str, tmp_path: Path) -> None:
    port = int(address.rpartition(":")[2])
    with Store.open(tmp_path / "store") as store, pytest.raises(ListenError, match="is another server there"):
        Server(store, ServerConfig(port=port)).start()
    assert in_child(lambda: sampled(address)) == sampled(address)


def test_threads_of_another_grpc_do_not_delay_a_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray brings a copy of its own, whose threads have the same names."""
    state = grpc_forks._State()
    owner = in_child  # any object
    monkeypatch.setattr(grpc_forks, "_threads", lambda: frozenset({"17"}))
    state.use(owner)
    state.open.discard(owner)
    state.before_fork()
    assert not state.ran_at_fork
    monkeypatch.setattr(grpc_forks, "_threads", lambda: frozenset({"17", "18"}))
    monkeypatch.setattr(grpc_forks, "SHUTDOWN_WAIT_S", 0.05)
    state.before_fork()
    assert state.ran_at_fork
    monkeypatch.setattr(grpc_forks, "SHUTDOWN_WAIT_S", 60)  # these threads have been waited for
    began = time.monotonic()
    state.before_fork()
    assert state.ran_at_fork
    assert time.monotonic() - began < 5


WRITE = """
import sys
from understudy.core.examples import small_spec
from understudy.replay import Store
with Store.open(sys.argv[1]) as store:
    store.writer("other", small_spec())
    print("open", flush=True)
    sys.stdin.readline()
"""


def test_a_reader_in_a_child_sees_what_was_written_since(tmp_path: Path) -> None:
    """SQLite's log is removed and made anew between the fork and the child's first call."""
    path = fill(tmp_path / "store")
    command = [sys.executable, "-c", WRITE, path]
    other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None
    assert other.stdout.readline() == "open\n"
    reader = Reader(path)
    reader.follow()
    start_read, start_write = os.pipe()
    answer_read, answer_write = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.alarm(CHILD_S)
        os.read(start_read, 1)
        try:
            said: Any = [reader.follow().commit, len(list(reader.episodes())), len(list(reader.read(9).steps()))]
        except BaseException as error:  # noqa: BLE001 (the parent shows it)
            said = repr(error)
        os.write(answer_write, json.dumps(said).encode())
        os._exit(0)
    reader.close()
    other.communicate("\n")
    for number in range(3):
        fill(path, num_episodes=20, writer=f"later-{number}")
    os.write(start_write, b"x")
    os.waitpid(pid, 0)
    with Reader(path) as truth:
        assert json.loads(os.read(answer_read, 10_000)) == [truth.last_commit(), 64, 9]
    for end in (start_read, start_write, answer_read, answer_write):
        os.close(end)


def test_children_that_end_change_nothing_in_a_store_that_is_written(tmp_path: Path) -> None:
    path = tmp_path / "store"

    def use() -> list[str]:
        calls: list[Callable[[], object]] = [writer.flush, lambda: writer.append(steps[0])]
        calls += [lambda: store.delete([1]), store.catalog.last_commit]
        said = []
        for call in calls:
            try:
                call()
            except StoreClosedError as error:
                said.append(str(error))
        store.close()
        store.catalog.__dict__.clear()  # destroys the child's copy of the connection
        return said

    with Store.open(path) as store:
        writer = store.writer("w", small_spec(), commit_steps=5, background=False)
        steps, last = random_steps(small_spec(), 12, 0)
        for episode in range(6):
            writer.begin(task="t")
            for number, step in enumerate(steps):
                writer.append(step)
                if number == 6:
                    said = in_child(use)
                    assert len(said) == 4
                    assert said[0] == (
                        "writer 'w' belongs to the process that this one was forked from; make one of another name "
                        "in this process"
                    )
            writer.end(last)
            assert episode + 1 == len(list(store.catalog.episodes()))
    assert verify(path).ok
    with Reader(path) as reader:
        assert [len(list(reader.read(number).steps())) for number in range(1, 7)] == [12] * 6


def test_a_store_that_another_thread_commits_to_is_copied_unlocked(tmp_path: Path) -> None:
    with Store.open(tmp_path / "store") as store:
        writer = store.writer("w", small_spec())
        with store.commit_lock():
            told: list[Any] = []
            thread = threading.Thread(target=lambda: told.append(in_child(lambda: store.delete([1]))))
            thread.start()
            thread.join()
        assert "the store is closed in this process; open it here" in told[0]
        write_episode(writer, random_episode(small_spec(), 3, 0))


def test_a_store_that_the_parent_writes_is_not_opened_in_a_child(tmp_path: Path) -> None:
    """SQLite would share the state of the parent's connection with it, and that gets stale."""
    path = tmp_path / "store"
    with Store.open(path) as store:
        write_episode(store.writer("w", small_spec()), random_episode(small_spec(), 3, 0))
        with Reader(path) as reader:
            for call in (lambda: Reader(path), reader.last_commit):
                assert in_child(call) == (
                    f"StoreClosedError: {path}: the open store belongs to the process that this one was forked from; "
                    f"start this process with multiprocessing's `spawn` or `forkserver`"
                )
            assert reader.last_commit() == store.last_commit
    assert in_child(lambda: Reader(path).last_commit()) > 0


def test_a_prefetch_says_that_its_thread_is_elsewhere(tmp_path: Path) -> None:
    sampler = Sampler(fill(tmp_path / "store"), EVERYTHING, batch_size=4, seed=1)
    sampler.follow()
    with sampler, Prefetch(sampler) as batches:
        next(batches)
        assert in_child(lambda: next(batches) and None) == (
            "StoreClosedError: Prefetch: its thread belongs to the process that this one was forked from; make a "
            "sampler and a Prefetch in this process"
        )
        assert in_child(batches.close) is None
        next(batches)


def test_a_sampler_that_a_thread_draws_from_is_copied_whole(tmp_path: Path) -> None:
    """Forks at any moment of the drawing thread; each child's copy goes on with whole batches."""
    path = fill(tmp_path / "store", spec=robot_spec())
    with Sampler(path, EVERYTHING, batch_size=8, seed=1) as plain:
        plain.follow()
        expected = digests(plain, 100)
    sampler = Sampler(path, EVERYTHING, batch_size=8, seed=1)
    sampler.follow()
    with sampler, Prefetch(sampler) as batches:
        next(batches)
        for _ in range(8):
            number, found = in_child(lambda: [sampler.num_batches, digests(sampler, 2)])
            assert found == expected[number : number + 2]
            next(batches)


def test_a_fork_waits_for_the_threads_inside(tmp_path: Path) -> None:
    inside, leave = threading.Event(), threading.Event()
    order: list[str] = []

    def work() -> None:
        with unforked, unforked:
            inside.set()
            leave.wait()
            with unforked:  # may enter again, while a fork waits for it
                order.append("left")

    thread = threading.Thread(target=work)
    thread.start()
    inside.wait()
    threading.Timer(0.05, leave.set).start()
    with unforked:  # a thread does not wait for itself
        assert in_child(lambda: [*order, "child"]) == ["left", "child"]
    thread.join()
    with unforked:
        pass


def test_garbage_may_be_collected_by_the_thread_that_forks(tmp_path: Path) -> None:
    """A catalog that nobody closed is then closed in the middle of a fork."""
    open_readers, connections = [Reader(fill(tmp_path / "store"))], []

    def fork() -> None:
        connections.append(open_readers[0].catalog._db)
        unforked.before_fork()
        open_readers.clear()
        gc.collect()
        unforked.after_fork()

    thread = threading.Thread(target=fork, daemon=True)
    thread.start()
    thread.join(CHILD_S)
    assert not thread.is_alive()
    with pytest.raises(sqlite3.ProgrammingError, match="closed"):
        connections[0].execute("select 1")


def test_clients_say_that_they_belong_to_the_parent(tmp_path: Path) -> None:
    fill(tmp_path / "store")
    with (
        Store.open(tmp_path / "store") as store,
        Server(store, ServerConfig(port=0)) as server,
        connect(server.address) as remote,
        remote.sampler(EVERYTHING, batch_size=4, seed=1) as sampler,
        remote.sharded_sampler(EVERYTHING, batch_size=4, seed=1) as sharded,
        remote.parameters() as subscription,
        remote.writer("r", small_spec(), spool=tmp_path / "spool") as writer,
    ):
        writer.begin(task="t")
        steps, last = random_steps(small_spec(), 3, 0)
        calls: dict[str, Callable[[], Any]] = {
            "sampler": lambda: sampler.sample() and None,
            "sharded": lambda: sharded.sample() and None,
            "subscription": lambda: subscription.wait() and None,
            "append": lambda: writer.append(steps[0]),
            "flush": writer.flush,
            "status": lambda: remote.status() and None,
            "connect": lambda: connect(server.address).status() and None,
        }
        digests(sampler), digests(sharded), append_all(writer, steps[:2])

        def said() -> dict[str, str]:
            found = {}
            for name, call in calls.items():
                try:
                    found[name] = repr(call())
                except StoreClosedError as error:
                    found[name] = str(error)
            for closeable in (sampler, sharded, subscription, remote):
                closeable.close()
            server.stop()
            return found

        for name, text in in_child(said).items():
            assert "belongs to the process that this one was forked from" in text, name
            assert "make one of another name" in text or "`spawn` or `forkserver`" in text, name
        digests(sampler), digests(sharded), append_all(writer, steps[2:])
        writer.end(last)
        assert writer.wait_delivered(60)
        assert len(list(store.catalog.episodes())) == 5


def test_garbage_of_grpc_is_not_collected_in_a_child(tmp_path: Path) -> None:
    """A server that was stopped waits, when it is destroyed, for a thread that is only in the parent."""
    gc.disable()
    try:
        with Store.open(tmp_path / "store") as store:
            for _ in range(3):
                with Server(store, ServerConfig(port=0)) as server, connect(server.address) as remote:
                    remote.status()
                del server, remote
        assert isinstance(in_child(gc.collect), int)
    finally:
        gc.enable()


def append_all(writer: Any, steps: list[Step]) -> None:
    for step in steps:
        writer.append(step)


def test_a_sampler_that_resizes_goes_on_in_a_child_while_its_cache_is_filled(tmp_path: Path) -> None:
    path = fill(tmp_path / "store", spec=robot_spec())
    with Sampler(path, EVERYTHING, batch_size=8, seed=1, resize=(32, 32)) as sampler:
        sampler.follow()  # from here on, threads fill
        child = in_child(lambda: digests(sampler))
        assert child == digests(sampler)
        assert sampler.wait_for_frames(60)
        assert in_child(lambda: digests(sampler)) == digests(sampler)

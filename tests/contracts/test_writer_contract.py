"""The contract of Writer: a store's own, and remote ones to real servers on loopback, give the same episodes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.writing import write_episode

from understudy.core import EpisodeError, EpisodeInfo, SpecError, Step, StepSpec, StoreClosedError
from understudy.core import tree as trees
from understudy.core.examples import CANONICAL, random_episode, random_steps, small_spec
from understudy.replay import EVERYTHING, Reader, Store, Writer, verify
from understudy.replay.format.records import EpisodeRecord
from understudy.service import Remote, RemoteWriter, Server, ServerConfig, connect

SPEC = small_spec()
STEPS, LAST = random_steps(SPEC, 9, 1, human=False)
KINDS = {  # number of servers, and whether there is a spool
    "Store.writer": (0, False),
    "RemoteWriter": (1, False),
    "RemoteWriter with a spool": (1, True),
    "RemoteWriter to two shards": (2, True),
}


class Stores:
    """One or two stores, their servers if the writers are remote ones, and the writers."""

    def __init__(self, directory: Path, stack: ExitStack, num_servers: int, *, spool: bool):
        self._directory, self._stack, self._spool = directory, stack, spool
        self.stores = [stack.enter_context(Store.open(directory / f"store-{n}")) for n in range(max(num_servers, 1))]
        self.remote: Remote | None = None
        self._num_spools = 0
        if num_servers:
            servers = [stack.enter_context(Server(store, ServerConfig(port=0))) for store in self.stores]
            addresses = [f"shard-{n}={server.address}" for n, server in enumerate(servers)]
            self.remote = stack.enter_context(connect(addresses))

    def writer(self, name: str = "arm", spec: StepSpec = SPEC, **options: Any) -> Writer:
        if self.remote is None:
            return self.stores[0].writer(name, spec, **options)
        if self._spool:
            self._num_spools += 1
            options = {"spool": self._directory / f"spool-{self._num_spools}", **options}
        writer = self.remote.writer(name, spec, **options)
        self._stack.enter_context(suppress(StoreClosedError))  # the test closed it, and appended to it afterwards
        self._stack.callback(writer.close)
        return writer

    def settle(self, *writers: Writer) -> None:
        """Wait until all that was appended is in a store."""
        for writer in writers:
            writer.flush()
            assert not isinstance(writer, RemoteWriter) or writer.wait_delivered(60)

    def close(self, writer: Writer) -> None:
        """Close the writer; a local one has the life of its store."""
        writer.close() if isinstance(writer, RemoteWriter) else self.stores[0].close()

    def readers(self) -> Iterator[Reader]:
        for store in self.stores:
            with Reader(store.path) as reader:
                yield reader

    def records(self) -> list[EpisodeRecord]:
        """Of all episodes, in the order of each writer."""
        found = [record for reader in self.readers() for record in reader.episodes()]
        return sorted(found, key=lambda record: (record.info.actor or "", record.number))

    def episodes(self) -> dict[str, Any]:
        """All episodes by their task."""
        return {r.info.task: reader.read(r.id) for reader in self.readers() for r in reader.episodes()}


@pytest.fixture(params=KINDS)
def stores(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Stores]:
    num_servers, spool = KINDS[request.param]
    with ExitStack() as stack:
        yield Stores(tmp_path, stack, num_servers, spool=spool)


def outbox_threads() -> int:
    return sum(thread.name in ("record:arm", "send:arm") for thread in threading.enumerate())


def append(writer: Writer, steps: list[Step]) -> None:
    for step in steps:
        writer.append(step)


# ---- episodes


@pytest.mark.parametrize("name", [name for name in CANONICAL if name != "long"])
def test_what_is_written_is_read(stores: Stores, name: str) -> None:
    spec, episode = CANONICAL[name]()
    writer = stores.writer(spec=spec, commit_steps=4)
    write_episode(writer, episode)
    stores.settle(writer)
    (record,) = stores.records()
    assert (record.state, record.number, record.num_rows) == ("ended", 0, len(episode) + 1)
    assert record.info == episode.info
    assert stores.episodes()[episode.info.task].equals(episode)


def test_several_episodes_of_several_writers(stores: Stores) -> None:
    episodes = {f"task-{n}": random_episode(SPEC, 3 + 2 * n, n) for n in range(6)}
    writers = [stores.writer(f"arm-{n}", commit_steps=4, flush_each_episode=n == 0) for n in range(2)]
    for number, (task, episode) in enumerate(episodes.items()):
        write_episode(writers[number % 2], episode, task=task, actor=f"arm-{number % 2}")
    stores.settle(*writers)
    assert [(record.info.actor, record.number, record.state) for record in stores.records()] == [
        (f"arm-{arm}", number, "ended") for arm in range(2) for number in range(3)
    ]
    found = stores.episodes()
    for task, episode in episodes.items():
        assert found[task].equals(replace(episode, info=found[task].info))
    assert all(verify(store.path).ok for store in stores.stores)


@pytest.mark.parametrize("commit_steps", [4, 50])  # the beginning is committed before the end, or with it
def test_the_attributes_of_the_end_are_added_to_those_of_the_beginning(stores: Stores, commit_steps: int) -> None:
    writer = stores.writer(commit_steps=commit_steps)
    assert writer.begin(EpisodeInfo(task="pick", seed=7), labels={"a": "1"}) == 0
    append(writer, STEPS)
    writer.end(LAST, success=True, labels={"b": "2"})
    stores.settle(writer)
    (record,) = stores.records()
    assert record.info == EpisodeInfo(task="pick", seed=7, labels={"a": "1", "b": "2"}, success=True)
    assert writer.begin() == 1
    append(writer, STEPS[:1])
    writer.cut()
    stores.settle(writer)
    assert {record.info.actor for record in stores.records()} == {
        None,
        "arm",
    }  # without an EpisodeInfo, the writer's name


def test_the_callers_buffers_may_be_used_again(stores: Stores) -> None:
    writer = stores.writer(commit_steps=3)
    observation, action = np.zeros(4, np.float32), np.zeros(2, np.float32)
    writer.begin(task="reuse")
    for number in range(8):
        observation[:], action[:] = number, -number
        writer.append(Step(observation=observation, action=action, reward=0.0, terminated=number == 7))
    observation[:] = 8
    writer.end(observation)
    observation[:] = action[:] = np.nan
    stores.settle(writer)
    episode = stores.episodes()["reuse"]
    assert [step.observation[0] for step in episode.steps()] == list(range(8))
    assert [step.action[0] for step in episode.steps()] == [-number for number in range(8)]
    assert episode.last_observation[0] == 8


def test_a_cut_episode_keeps_its_steps(stores: Stores) -> None:
    writer = stores.writer(commit_steps=4)
    for task, last in (("with", LAST), ("without", None)):
        writer.begin(task=task)
        append(writer, STEPS[:6])
        writer.cut(last, success=False)
    writer.begin(task="nothing")
    writer.cut()  # without a step there is no episode
    stores.settle(writer)
    assert [(r.info.task, r.state, r.num_rows, r.info.success) for r in stores.records()] == [
        ("with", "cut", 7, False),
        ("without", "cut", 6, False),
    ]
    found = stores.episodes()
    assert {task: len(episode) for task, episode in found.items()} == {"with": 6, "without": 5}
    assert trees.equal(found["with"].last_observation, LAST)
    assert trees.equal(found["without"].last_observation, STEPS[5].observation)


def test_flush_commits_an_open_episode_which_then_continues(stores: Stores) -> None:
    writer = stores.writer(commit_steps=50)
    writer.begin(task="long")
    append(writer, STEPS[:4])
    assert writer.num_uncommitted == 4
    stores.settle(writer)
    assert writer.num_uncommitted == 0
    (record,) = stores.records()
    assert (record.state, record.num_rows) == ("open", 4)
    append(writer, STEPS[4:])
    writer.end(LAST)
    stores.settle(writer)
    (record,) = stores.records()
    assert (record.state, record.num_rows) == ("ended", 10)
    assert [s.observation.tobytes() for s in stores.episodes()["long"].steps()] == [
        s.observation.tobytes() for s in STEPS
    ]


# ---- refusals


def test_calls_in_the_wrong_order_are_refused_and_change_nothing(stores: Stores) -> None:
    writer = stores.writer()
    calls: list[Callable[[], Any]] = [lambda: writer.append(STEPS[0]), lambda: writer.end(LAST), lambda: writer.cut()]
    for call in calls:
        with pytest.raises(EpisodeError, match=r"writer 'arm': .* outside an episode; call begin\(\) first"):
            call()
    writer.begin(task="one")
    with pytest.raises(EpisodeError, match=r"episode 0 is still open; call end\(\) or cut\(\) first"):
        writer.begin()
    append(writer, STEPS[:-1])
    with pytest.raises(EpisodeError, match="neither terminated nor truncated"):
        writer.end(LAST)
    writer.append(STEPS[-1])
    with pytest.raises(EpisodeError, match=r"call end\(\) with the last observation"):
        writer.append(STEPS[0])
    writer.end(LAST)
    stores.settle(writer)
    assert [(record.state, record.num_rows) for record in stores.records()] == [("ended", 10)]


def test_a_step_that_does_not_fit_is_refused_and_changes_nothing(stores: Stores) -> None:
    writer = stores.writer(commit_steps=2)
    writer.begin(task="one")
    append(writer, STEPS[:3])
    with pytest.raises(SpecError, match=r"observation: expected float32 \[4\], got float32 \[5\]"):
        writer.append(replace(STEPS[3], observation=np.zeros(5, np.float32)))
    append(writer, STEPS[3:])
    with pytest.raises(SpecError, match="observation"):
        writer.end(np.zeros(5, np.float32))
    writer.end(LAST)
    stores.settle(writer)
    assert [(record.state, record.num_rows) for record in stores.records()] == [("ended", 10)]


def test_a_refused_writer_does_not_replace_the_running_one(stores: Stores, tmp_path: Path) -> None:
    writer = stores.writer(commit_steps=2)
    writer.begin(task="one")
    append(writer, STEPS[:5])
    stores.settle(writer)
    threads = outbox_threads()
    with pytest.raises(EpisodeError, match="commit_steps: expected at least 1, got 0"):
        stores.writer(commit_steps=0)
    assert not (tmp_path / "spool-2").exists()
    assert outbox_threads() == threads
    append(writer, STEPS[5:])
    writer.end(LAST)
    stores.settle(writer)
    assert [(record.state, record.num_rows) for record in stores.records()] == [("ended", 10)]


# ---- one after the other


def test_a_new_writer_of_the_same_name_adds_its_own_episodes(stores: Stores) -> None:
    for number in range(2):
        writer = stores.writer("arm")
        write_episode(writer, random_episode(SPEC, 4, number), task=f"task-{number}", actor="arm")
        stores.settle(writer)
    assert {record.info.task: record.number for record in stores.records()} == {"task-0": 0, "task-1": 0}
    assert len({record.writer for record in stores.records()}) == 2


def test_close_may_be_called_twice_and_then_all_is_refused(stores: Stores) -> None:
    writer = stores.writer()
    write_episode(writer, random_episode(SPEC, 4, 1))
    stores.settle(writer)
    stores.close(writer)
    stores.close(writer)
    writer.begin()
    append(writer, STEPS[:1])
    with pytest.raises(StoreClosedError, match="closed"):
        writer.flush()
    assert len(stores.records()) == 1


def test_a_server_counts_what_a_reader_finds(stores: Stores) -> None:
    writers = [stores.writer(f"arm-{n}") for n in range(3)]
    for number, writer in enumerate(writers):
        write_episode(writer, random_episode(SPEC, 3 + number, number))
    stores.settle(*writers)
    found = [list(reader.episodes()) for reader in stores.readers()]
    assert sum(map(len, found)) == 3
    if stores.remote is not None:
        status = stores.remote.status([EVERYTHING]).values()
        assert [shard["episodes"]["everything"] for shard in status] == [len(records) for records in found]
        steps = [sum(record.num_steps for record in records) for records in found]
        assert [shard["steps"]["everything"] for shard in status] == steps
        assert [shard["commit"] for shard in status] == [store.last_commit for store in stores.stores]

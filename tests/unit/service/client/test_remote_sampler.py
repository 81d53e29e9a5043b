"""Remote sampling: the same batches as beside the store, from a real server."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from tests.waiting import wait_for
from tests.writing import write_episode

from understudy.core import RefusedError, Resize, Source, SpecError, StepSpec, StoreError, UnavailableError, WireError
from understudy.core import tree as trees
from understudy.core.examples import nested_spec, random_episode, robot_spec, small_spec, text_spec
from understudy.replay import (
    DEMO,
    EVERYTHING,
    ONLINE,
    Clause,
    Fifo,
    Mixture,
    Prefetch,
    Prioritized,
    Reader,
    Sampler,
    Sequences,
    Store,
    Transitions,
    Uniform,
    UniformEpisodes,
    View,
)
from understudy.service import Remote, RemoteSampler, Server, ServerConfig, connect
from understudy.service.server.sample_stream import SampleStream
from understudy.service.wire.batches import view_from_json, view_to_json
from understudy.service.wire.message import from_json, to_json
from understudy.service.wire.protocol import SAMPLE


def fill(store: Store, spec: StepSpec, *, episodes: int = 5, steps: int = 20, name: str = "a") -> None:
    writer = store.writer(name, spec)
    for seed in range(episodes):
        episode = random_episode(spec, steps, seed)
        write_episode(writer, episode)


def assert_same(a: Any, b: Any) -> None:
    for item in fields(a):
        mine, theirs = (dict(trees.leaves(getattr(batch, item.name), item.name)) for batch in (a, b))
        assert mine.keys() == theirs.keys()
        for path, leaf in mine.items():
            other = theirs[path]
            assert (leaf.dtype, leaf.shape) == (other.dtype, other.shape), path
            if leaf.dtype == object:
                assert all(np.array_equal(leaf[i], other[i]) for i in np.ndindex(leaf.shape)), path
            else:
                assert np.array_equal(leaf, other), path


SHAPES = [
    Transitions(),
    Transitions(num_steps=3, discount=0.9),
    Transitions(stack=2),
    Sequences(length=5),
    Sequences(length=4, first_observation_only=True),
    Sequences(length=3, padded=False),
]


@pytest.mark.parametrize("selector", [Uniform, UniformEpisodes, Fifo])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("spec", [robot_spec(16), nested_spec()], ids=["images", "nested"])
def test_batches_are_those_of_a_sampler_beside_the_store(
    store: Store, remote: Remote, spec: StepSpec, shape: Any, selector: Any
) -> None:
    fill(store, spec)
    with Reader(store.path) as reader:
        here = Sampler(reader, EVERYTHING, batch_size=8, seed=3, shape=shape, selector=selector())
        here.follow()
        with remote.sampler(EVERYTHING, batch_size=8, seed=3, shape=shape, selector=selector()) as there:
            for _ in range(3):
                assert_same(here.sample(), there.sample())
                assert here.state() == there.state()
                assert here.last_record == there.last_record
            assert len(there) == there.follow()
        here.close()


def test_text_and_ragged_fields_travel(store: Store, remote: Remote) -> None:
    fill(store, text_spec())
    with Reader(store.path) as reader, remote.sampler(EVERYTHING, batch_size=16, seed=1) as there:
        here = Sampler(reader, EVERYTHING, batch_size=16, seed=1)
        here.follow()
        out = there.make()
        assert_same(here.sample(), there.sample(out))
        assert_same(here.sample(), there.sample(out))
        here.close()


def test_options_of_selectors_travel(store: Store, remote: Remote) -> None:
    fill(store, small_spec())
    with remote.sampler(EVERYTHING, batch_size=50, selector=Uniform(last_steps=20)) as there:
        assert set(there.sample().episode.tolist()) == {5}
    with remote.sampler(EVERYTHING, batch_size=50, selector=UniformEpisodes(from_start=True)) as there:
        assert set(there.sample().index.tolist()) == {0}
    with remote.sampler(EVERYTHING, batch_size=4, selector=Fifo(times=2)) as there:
        assert there.sample().index.tolist() == [0, 0, 1, 1]


def test_ranks_get_their_parts(store: Store, remote: Remote) -> None:
    fill(store, small_spec())
    parts = []
    for rank in range(2):
        with remote.sampler(EVERYTHING, batch_size=9, seed=1, rank=rank, world_size=2) as there:
            parts.append(there.sample().reward)
    with remote.sampler(EVERYTHING, batch_size=9, seed=1) as whole:
        assert np.array_equal(np.concatenate(parts), whole.sample().reward)
    assert [len(part) for part in parts] == [4, 5]


def test_a_learner_may_come_before_the_first_step(store: Store, remote: Remote) -> None:
    with remote.sampler(EVERYTHING, batch_size=8) as there:
        assert there.follow() == 0
        with pytest.raises(StoreError, match="the store is empty; record something"):
            there.sample()
        fill(store, small_spec())
        assert there.follow() == 100
        assert len(there.sample()) == 8


def test_new_steps_are_drawn_without_asking(store: Store, remote: Remote) -> None:
    fill(store, small_spec(), episodes=1)
    with remote.sampler(EVERYTHING, batch_size=64) as there:
        there.sample()
        fill(store, small_spec(), episodes=1, name="b")
        for _ in range(4):  # those that were on their way, and one more
            batch = there.sample()
        assert set(batch.episode.tolist()) == {1, 2}


def test_after_a_restart_of_the_server_the_same_batches_follow(store: Store) -> None:
    fill(store, small_spec())
    with Server(store, ServerConfig(port=0)) as first:
        port = int(first.address.rpartition(":")[2])
        remote = connect(first.address)
        there = remote.sampler(EVERYTHING, batch_size=8, seed=5)
        got = [there.sample().reward for _ in range(3)]
    with Server(store, ServerConfig(port=port)):
        got += [there.sample().reward for _ in range(3)]
        there.close()
        remote.close()
    with Reader(store.path) as reader:
        here = Sampler(reader, EVERYTHING, batch_size=8, seed=5)
        here.follow()
        for reward in got:
            assert np.array_equal(here.sample().reward, reward)
        here.close()


def test_a_state_taken_there_goes_on_here_and_back(store: Store, remote: Remote) -> None:
    fill(store, small_spec())
    with remote.sampler(EVERYTHING, batch_size=8, seed=5) as there:
        there.sample()
        state = there.state()
        second = there.sample()
    with Reader(store.path) as reader:
        here = Sampler(reader, EVERYTHING, batch_size=8)
        here.restore(state)
        assert_same(here.sample(), second)
        state = here.state()
        third = here.sample()
        here.close()
    with remote.sampler(EVERYTHING, batch_size=8) as again:
        again.restore(state)
        assert_same(again.sample(), third)
        with pytest.raises(StoreError, match="restored before it is used"):
            again.restore(state)


def test_a_mixture_of_remote_samplers_is_the_mixture_of_local_ones(store: Store, remote: Remote) -> None:
    fill(store, small_spec())
    weights = {"demo": 1, "online": 3}
    views = {"demo": DEMO, "online": ONLINE}
    with Reader(store.path) as reader:
        here = {name: Sampler(reader, view, batch_size=10, seed=2) for name, view in views.items()}
        there = {name: remote.sampler(view, batch_size=10, seed=2, depth=0) for name, view in views.items()}
        local, distant = (Mixture(samplers, weights, batch_size=10) for samplers in (here, there))
        local.follow()
        distant.follow()
        for _ in range(3):
            assert_same(local.sample(), distant.sample())
        assert local.state() == distant.state()
        for sampler in [*here.values(), *there.values()]:
            sampler.close()


def test_prefetch_takes_a_remote_sampler(store: Store, remote: Remote) -> None:
    fill(store, small_spec())
    with remote.sampler(EVERYTHING, batch_size=8, seed=1) as there, Prefetch(there) as batches:
        first = next(batches).reward.copy()
    with remote.sampler(EVERYTHING, batch_size=8, seed=1) as again:
        assert np.array_equal(again.sample().reward, first)


def test_another_size_while_batches_are_on_their_way_is_refused(store: Store, remote: Remote) -> None:
    fill(store, small_spec())
    with remote.sampler(EVERYTHING, batch_size=8) as there:
        there.sample()
        with pytest.raises(StoreError, match="make the sampler with depth=0"):
            there.sample(size=4)


def test_depth_is_how_many_are_asked_for_ahead(store: Store, remote: Remote, server: Server) -> None:
    fill(store, small_spec())
    with remote.sampler(EVERYTHING, batch_size=8, depth=3) as there:
        there.sample()
        wait_for(lambda: "understudy_batches_sent_total 4.0" in server.metrics.text())


def test_prioritized_is_refused_with_advice(remote: Remote) -> None:
    with pytest.raises(StoreError, match="run the learner on the store's machine"):
        remote.sampler(EVERYTHING, batch_size=8, selector=Prioritized())


def test_what_the_server_refuses_reaches_the_caller(store: Store, remote: Remote) -> None:
    fill(store, small_spec())
    fill(store, robot_spec(16), name="b")
    with remote.sampler(EVERYTHING, batch_size=8) as there, pytest.raises(StoreError, match="holds 2 specs"):
        there.sample()


def test_a_condition_that_fails_with_a_row_fails_for_its_client_alone(
    store: Store, remote: Remote, server: Server
) -> None:
    fill(store, small_spec())
    view = View(name="x", clauses=(Clause(where="json_extract(task, '$.a') = 1"),))
    with (
        remote.sampler(view, batch_size=8) as there,
        pytest.raises(StoreError, match=r"malformed JSON.*; change the"),
    ):
        there.sample()
    with remote.sampler(EVERYTHING, batch_size=8) as there:
        assert there.sample()
    assert not server.failed.is_set()


def test_a_batch_that_is_too_large_is_refused_without_making_it(store: Store, remote: Remote) -> None:
    fill(store, small_spec())
    with remote.sampler(EVERYTHING, batch_size=10**12) as there, pytest.raises(StoreError, match="request fewer"):
        there.follow()


def test_a_dead_server_is_told_after_the_time_out(store: Store) -> None:
    with Server(store, ServerConfig(port=0)) as server:
        address = server.address
    with connect(address) as remote:
        connection = next(iter(remote._connections.values()))
        there = RemoteSampler(connection, EVERYTHING, batch_size=8, timeout_s=5.0)
        with pytest.raises(UnavailableError, match="is `understudy serve` running there"):
            there.follow()


# ---- what a view may ask


@pytest.mark.parametrize(
    "where",
    [
        "1 in (select 1)",
        "exists (with recursive c(x) as (select 1 union all select x + 1 from c) select x from c)",
        "randomblob(1000000000) is null",
        "load_extension('x')",
        "writefile('x', 'y')",
        "1) then 1 else 0 end) from episodes; drop table episodes; --",
        "(values(1))",
        "readfile('/etc/passwd') is null",
        "1) or (select count(*) from sqlite_master",
        "'",
        "\x00",
    ],
)
def test_a_condition_that_does_more_than_ask_is_refused(remote: Remote, where: str) -> None:
    connection = next(iter(remote._connections.values()))
    view = {"name": "x", "clauses": [{"where": where, "sources": [0]}]}
    with pytest.raises(StoreError, match="view 'x'"):
        connection.call("Status", {"views": [view]})


def test_ordinary_conditions_pass() -> None:
    for where in (
        "task = 'select the red block'",
        "lower(task) like '%pick%' and coalesce(success, 0)",
        "json_extract(labels, '$.colour') = 'red'",
        "seed in (1, 2) or init_state between 3 and 5",
    ):
        view = View(name="v", clauses=(Clause(where=where, sources=frozenset({Source.HUMAN})),))
        assert view_from_json(view_to_json(view)) == view
    for view in (DEMO, ONLINE, EVERYTHING):
        assert view_from_json(view_to_json(view)) == view


HELLO = {
    "version": 1,
    "view": view_to_json(EVERYTHING),
    "shape": {"kind": "transitions"},
    "selector": {"kind": "uniform"},
    "batch_size": 4,
    "seed": 0,
    "spec": None,
    "rank": 0,
    "world_size": 1,
    "state": None,
}


@pytest.mark.parametrize(
    "hello",
    [
        {},
        {"batch_size": True},
        {"view": 3},
        {"view": {"name": "x", "clauses": [{"where": "1", "sources": [99]}]}},
        {"shape": {"kind": "transitions", "num_steps": 10**9}},
        {"shape": {"kind": "os.system"}},
        {"selector": {"kind": "uniform", "last_steps": "x"}},
        {"state": {"commit": "x"}},
        {"state": [1]},
        {"seed": -1},
        {"version": 3},
        {"version": "1"},
    ],
)
def test_a_hello_that_makes_no_sense_is_refused(store: Store, remote: Remote, hello: dict[str, Any]) -> None:
    fill(store, small_spec(), episodes=1)
    connection = next(iter(remote._connections.values()))
    sent = {} if not hello else {**HELLO, **hello}
    stream = connection.exchange(SAMPLE, iter([to_json(sent)]))
    with pytest.raises((WireError, StoreError, RefusedError)):
        list(stream)


def test_fields_of_a_newer_client_are_ignored(store: Store, remote: Remote) -> None:
    fill(store, small_spec(), episodes=1)
    connection = next(iter(remote._connections.values()))
    hello = {**HELLO, "version": 2, "tomorrow": {"a": 1}}
    stream = connection.exchange(SAMPLE, iter([to_json(hello), to_json({"size": 4, "part": None, "tomorrow": 1})]))
    assert from_json(next(stream))["version"] == 1
    assert from_json(next(stream))["record"] is not None
    stream.cancel()


def test_a_request_that_makes_no_sense_is_refused(store: Store, remote: Remote) -> None:
    fill(store, small_spec(), episodes=1)
    connection = next(iter(remote._connections.values()))
    for request in ({"size": -1}, {"size": "x"}, {"size": 4, "part": [3, 9]}, {"size": 4, "part": "x"}, {"sise": 4}):
        stream = connection.exchange(SAMPLE, iter([to_json(HELLO), to_json(request)]))
        next(stream)
        with pytest.raises(WireError):
            next(stream)


def test_a_server_resizes_frames_as_a_sampler_beside_the_store_does(store: Store, remote: Remote) -> None:
    fill(store, robot_spec(20))
    for resize in ((8, 8), {"wrist_1": Resize((4, 6), crop=(2, 2, 8, 12))}):
        with (
            Sampler(store.path, EVERYTHING, batch_size=8, seed=3, resize=resize) as here,
            remote.sampler(EVERYTHING, batch_size=8, seed=3, resize=resize, spec=robot_spec(20)) as there,
            remote.sharded_sampler(EVERYTHING, batch_size=8, seed=3, resize=resize) as all_of_them,
        ):
            here.follow()
            batch = here.sample()
            assert batch.observation["wrist_1"].shape[1:3] != (20, 20)
            assert there.spec == here.spec
            assert_same(there.sample(), batch)
            assert_same(all_of_them.sample(), batch)
            assert_same(there.peek(4), here.peek(4))
    assert list((store.path / "derived").glob("*.frames"))  # the server keeps them, too
    with remote.sampler(EVERYTHING, batch_size=8, resize=(32, 32)) as there, pytest.raises(SpecError, match="smaller"):
        there.sample()


def test_an_older_server_that_does_not_resize_is_refused(
    store: Store, remote: Remote, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(store, robot_spec(20))
    status = SampleStream._status
    monkeypatch.setattr(SampleStream, "_status", lambda self: {**status(self), "resize": None})
    with (
        remote.sampler(EVERYTHING, batch_size=8, resize=(8, 8)) as there,
        pytest.raises(RefusedError, match="the server does not resize frames; update it"),
    ):
        there.sample()

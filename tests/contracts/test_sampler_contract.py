"""The contract of BatchSource, for every source of training batches: Sampler, RemoteSampler, ShardedSampler, Mixture.

The remote ones draw from real servers on loopback.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.writing import write_episode

from understudy.core import StepSpec, StoreError, TransitionBatch
from understudy.core.examples import random_episode, robot_spec, small_spec
from understudy.replay import (
    EVERYTHING,
    ONLINE,
    BatchSource,
    Clause,
    EmptyError,
    Fifo,
    Mixture,
    Prefetch,
    Reader,
    Sampler,
    Sequences,
    Store,
    UniformEpisodes,
    View,
    ViewSampler,
)
from understudy.replay.sample.batch_source import BatchStream
from understudy.service import Remote, Server, ServerConfig, ShardedSampler, connect

SPEC = small_spec()
STEPS = 8  # of an episode
NOTHING = View(name="nothing", clauses=(Clause(where="0"),))


class Stores:
    """Two stores, each with a server if one is needed; every second episode goes to the second one."""

    def __init__(self, directory: Path, undo: ExitStack):
        self.undo = undo
        self.stores = [undo.enter_context(Store.open(directory / name)) for name in "ab"]
        self.num_episodes = 0

    @cached_property
    def remote(self) -> Remote:
        servers = [self.undo.enter_context(Server(store, ServerConfig(port=0))) for store in self.stores]
        addresses = [f"{name}={server.address}" for name, server in zip("ab", servers, strict=True)]
        return self.undo.enter_context(connect(addresses))

    def record(self, episodes: int = 1, *, spec: StepSpec = SPEC, kind: str = "practice", shards: int = 2) -> None:
        for _ in range(episodes):
            store = self.stores[self.num_episodes % shards]
            writer = store.writer(f"writer-{self.num_episodes}", spec)
            write_episode(writer, random_episode(spec, STEPS, self.num_episodes), kind=kind)
            self.num_episodes += 1

    def steps(self, num_stores: int) -> Counter[bytes]:
        """All steps, by their observation."""
        found: Counter[bytes] = Counter()
        for store in self.stores[:num_stores]:
            with Reader(store.path) as reader:
                for entry in reader.episodes():
                    found.update(step.observation.tobytes() for step in reader.read(entry.id).steps())
        return found


@pytest.fixture
def undo() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def stores(tmp_path: Path, undo: ExitStack) -> Stores:
    return Stores(tmp_path, undo)


# ---- the sources

Open = Callable[..., BatchSource[Any]]


def local(stores: Stores, view: Any = EVERYTHING, **options: Any) -> Sampler[Any]:
    return Sampler(stores.stores[0].path, view, **{"batch_size": 6, "seed": 5, **options})


def distant(stores: Stores, view: Any = EVERYTHING, **options: Any) -> Any:
    one = stores.undo.enter_context(connect(stores.remote.address_of("a")))
    return one.sampler(view, **{"batch_size": 6, "seed": 5, "depth": 0, **options})


def ahead(stores: Stores, view: Any = EVERYTHING, **options: Any) -> Any:
    return distant(stores, view, depth=2, **options)


def sharded(stores: Stores, view: Any = EVERYTHING, **options: Any) -> ShardedSampler[Any]:
    if "selector" in options:
        selector = options.pop("selector")
        options["selector"] = lambda: selector
    return stores.remote.sharded_sampler(view, **{"batch_size": 6, "seed": 5, **options})


def partly_local(stores: Stores, view: Any = EVERYTHING, **options: Any) -> ShardedSampler[Any]:
    if "selector" in options:
        selector = options.pop("selector")
        options["selector"] = lambda: selector
    directories = {"a": stores.stores[0].path, "b": None}
    return ShardedSampler(stores.remote, view, stores=directories, **{"batch_size": 6, "seed": 5, **options})


def mixed(make: Callable[..., ViewSampler[Any]]) -> Callable[..., Mixture[Any]]:
    """A view without steps, whose share the other gives, and the view that is asked for."""

    def open_mixture(stores: Stores, view: Any = EVERYTHING, **options: Any) -> Mixture[Any]:
        given = {"spec": SPEC, **options}
        batch_size = given.pop("batch_size", 6)
        samplers = {"nothing": make(stores, NOTHING, **given), "all": make(stores, view, **given)}
        return Mixture(samplers, {"nothing": 1, "all": 1}, batch_size=batch_size)

    return open_mixture


ONE_STORE: dict[str, Open] = {
    "Sampler": local,
    "RemoteSampler": distant,
    "RemoteSampler that asks ahead": ahead,
    "Mixture of Samplers": mixed(local),
    "Mixture of RemoteSamplers": mixed(distant),
}
TWO_STORES: dict[str, Open] = {
    "ShardedSampler": sharded,
    "ShardedSampler with a local shard": partly_local,
    "Mixture of ShardedSamplers": mixed(partly_local),
}
SOURCES = {**ONE_STORE, **TWO_STORES}


@pytest.fixture(params=SOURCES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def num_stores(name: str) -> int:
    return 2 if name in TWO_STORES else 1


@pytest.fixture
def make(name: str, stores: Stores) -> Open:
    """Opens a source; it is closed after the test."""

    def opened(**options: Any) -> BatchSource[Any]:
        source = SOURCES[name](stores, **options)
        stores.undo.callback(source.close)
        return source

    return opened


def drawn(source: BatchSource[Any], num_batches: int) -> list[Any]:
    return [source.sample() for _ in range(num_batches)]


def same(one: list[TransitionBatch], two: list[TransitionBatch]) -> bool:
    pairs = zip(one, two, strict=True)
    return all(np.array_equal(a.observation, b.observation) and np.array_equal(a.index, b.index) for a, b in pairs)


def seen(batches: list[TransitionBatch]) -> Counter[bytes]:
    return Counter(observation.tobytes() for batch in batches for observation in batch.observation)


# ---- the suite


def test_every_step_can_be_drawn_and_no_other(make: Open, stores: Stores, num_stores: int) -> None:
    stores.record(4)
    source = make()
    wanted = stores.steps(num_stores)
    assert source.follow() == len(source) == wanted.total()
    batches = drawn(source, 60)
    assert all(len(batch) == source.batch_size == 6 for batch in batches)
    assert seen(batches).keys() == wanted.keys()


@pytest.mark.parametrize("name", [name for name in ONE_STORE if "ahead" not in name])  # shards have a queue each
def test_a_queue_gives_the_multiset_of_all_steps(make: Open, stores: Stores) -> None:
    stores.record(4)
    wanted = stores.steps(1)
    source = make(selector=Fifo(), batch_size=wanted.total() // 2)
    source.follow()
    assert seen(drawn(source, 2)) == wanted
    assert len(source) == 0
    with pytest.raises(StoreError):
        source.sample()


def test_the_seed_and_the_number_of_a_batch_decide_it(make: Open, stores: Stores) -> None:
    stores.record(4)
    one, again, other = make(seed=1), make(seed=1), make(seed=2)
    for source in (one, again, other):
        source.follow()
    first = drawn(one, 4)
    assert same(first, drawn(again, 4))
    assert not same(first, drawn(other, 4))
    assert not same(first, drawn(one, 4))


@pytest.mark.parametrize("selector", [None, UniformEpisodes])
def test_batches_that_are_skipped_change_no_other(make: Open, stores: Stores, selector: Any) -> None:
    stores.record(4)
    options = {} if selector is None else {"selector": selector()}
    plain, skipping = make(**options), make(**options)
    for source in (plain, skipping):
        source.follow()
    wanted = drawn(plain, 9)
    for first, last in ((0, 2), (3, 3), (4, 8)):  # skip `first` to `last` - 1, and draw `last`
        skipping.skip(last - first)
        assert same([skipping.sample()], [wanted[last]])
    assert json.dumps(plain.state()) == json.dumps(skipping.state())


@pytest.mark.parametrize("name", [name for name in ONE_STORE if "ahead" not in name])
def test_steps_of_a_queue_are_skipped(make: Open, stores: Stores) -> None:
    stores.record(4)
    plain, skipping = make(selector=Fifo(), batch_size=3), make(selector=Fifo(), batch_size=3)
    for source in (plain, skipping):
        source.follow()
    wanted = drawn(plain, 4)
    skipping.skip(3)
    assert same([skipping.sample()], wanted[3:])


@pytest.mark.parametrize("name", [name for name in ONE_STORE if "Mixture" not in name])
def test_many_batches_are_skipped_at_once(make: Open, stores: Stores) -> None:
    stores.record(4)
    source, plain = make(), local(stores)
    for each in (source, plain):
        each.follow()
        drawn(each, 2)
        each.skip(100_000)
    assert same([source.sample()], [plain.sample()])
    plain.close()


def test_a_state_is_small_json_that_continues_with_the_next_batch(make: Open, stores: Stores) -> None:
    stores.record(4)
    first = make()
    first.follow()
    drawn(first, 3)
    text = json.dumps(first.state())
    assert len(text) < 1000
    wanted = drawn(first, 4)
    again = make(seed=77)  # the state knows the seed
    again.restore(json.loads(text))
    assert same(drawn(again, 4), wanted)
    assert json.dumps(first.state()) == json.dumps(again.state())


def test_a_source_that_was_used_is_not_restored(make: Open, stores: Stores) -> None:
    stores.record(4)
    source = make()
    source.follow()
    source.sample()
    with pytest.raises(StoreError, match="make a new one"):
        source.restore(source.state())


def test_new_steps_are_drawn_after_follow(make: Open, stores: Stores, num_stores: int) -> None:
    stores.record(2)
    source = make()
    before = source.follow()
    drawn(source, 2)
    stores.record(4)
    drawn(source, 3)  # of which some were requested before
    assert source.follow() == stores.steps(num_stores).total() == before * 3
    drawn(source, 3)
    assert seen(drawn(source, 100)).keys() == stores.steps(num_stores).keys()


def test_a_store_may_be_empty_at_first(make: Open, stores: Stores, num_stores: int) -> None:
    source = make()
    assert source.follow() == len(source) == 0
    with pytest.raises(StoreError):
        source.sample()
    stores.record(4)
    assert source.follow() == stores.steps(num_stores).total()
    assert len(source.sample()) == 6


def test_a_view_without_steps_is_an_error_until_there_are_some(make: Open, stores: Stores) -> None:
    stores.record(2, kind="demonstration")
    source = make(view=ONLINE)
    assert source.follow() == len(source) == 0
    with pytest.raises(StoreError, match="nothing to draw"):
        source.sample()
    stores.record(2)
    assert source.follow() > 0
    assert len(source.sample()) == 6


def test_a_batch_is_written_where_it_is_wanted(make: Open, stores: Stores) -> None:
    stores.record(4)
    one, two = make(), make()
    one.follow()
    two.follow()
    out = one.make()
    assert one.sample(out) is out
    assert same([out], [two.sample()])


def test_prefetch_gives_the_same_batches_and_the_state_of_the_last_one(make: Open, stores: Stores) -> None:
    stores.record(4)
    plain, source = make(), make()
    plain.follow()
    streamed: BatchStream[Any] = source
    with Prefetch(streamed) as batches:
        for _ in range(3):
            assert same([next(batches)], [plain.sample()])
        state = json.loads(json.dumps(batches.state()))
    again = make()
    again.restore(state)
    assert same([again.sample()], [plain.sample()])


def test_other_shapes_and_selectors(make: Open, stores: Stores) -> None:
    stores.record(4)
    source = make(shape=Sequences(length=3), selector=UniformEpisodes(from_start=True))
    source.follow()
    batch = source.sample()
    assert batch.action.shape[:2] == (6, 3)
    assert set(batch.index.tolist()) == {0}


def test_the_name_of_a_view_is_refused_at_once(make: Open) -> None:
    with pytest.raises(StoreError, match=r"view: expected a View such as us\.DEMO, got str 'online'; pass us\.ONLINE"):
        make(view="online")


def test_a_spec_that_the_store_does_not_hold_is_refused(make: Open, stores: Stores) -> None:
    stores.record(4, spec=robot_spec(8))
    with pytest.raises(StoreError, match=r"holds steps of another spec \(action is .*, expected .*\)"):
        make(spec=SPEC).follow()


# ---- samplers of one view

VIEW_SAMPLERS = [name for name in SOURCES if not name.startswith("Mixture")]


@pytest.mark.parametrize("name", VIEW_SAMPLERS)
def test_peek_gives_the_same_steps_and_changes_no_batch(make: Callable[..., Any], stores: Stores) -> None:
    stores.record(4)
    one, two = make(seed=1), make(seed=2)
    one.follow()
    two.follow()
    assert same([one.peek(9)], [two.peek(9)])
    three = make(seed=1)
    three.follow()
    assert same(drawn(one, 2), drawn(three, 2))
    assert (one.num_lost, dict(one.unreachable)) == (0, {})
    assert one.as_of.startswith("commit ")


@pytest.mark.parametrize("name", VIEW_SAMPLERS)
def test_a_part_of_a_larger_batch_is_filled(make: Callable[..., Any], stores: Stores) -> None:
    stores.record(4)
    one, two = make(batch_size=4), make(batch_size=4)
    one.follow()
    two.follow()
    batch = one.shape.make(one.spec, 10)
    batch.reward[:] = -7.0
    one.sample(batch, at=slice(3, 7))
    assert (batch.reward[:3] == -7.0).all()
    assert (batch.reward[7:] == -7.0).all()
    assert np.array_equal(batch.index[3:7], two.sample().index)


def test_without_steps_a_local_source_raises_empty_error(stores: Stores) -> None:
    for open_source in (local, sharded, mixed(local), mixed(sharded)):
        with open_source(stores) as source, pytest.raises(EmptyError):
            source.sample()

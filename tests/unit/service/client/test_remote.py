"""Shards with names: one that comes back elsewhere with its store goes on, each step exactly once; real processes."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from tests.waiting import wait_for
from tests.writing import write_episode

from understudy.core import RefusedError, UnavailableError
from understudy.core.examples import random_episode, small_spec
from understudy.replay import EVERYTHING, Reader, verify
from understudy.selftest.faulty_proxy import Proxy
from understudy.service import OutboxConfig, Remote, RemoteWriter, Server, ServerConfig, Subscription, connect
from understudy.service.client import publish

SPEC = small_spec()
PATIENCE_S = 60.0

SERVER = """
import sys, threading
from understudy.replay import Store
from understudy.service import Server, ServerConfig
with Store.open(sys.argv[1]) as store, Server(store, ServerConfig(port=0)) as server:
    print(server.address, flush=True)
    threading.Event().wait()
"""

WRITER = """
import sys, threading
from understudy.core.examples import random_episode, small_spec
from understudy.service import connect
addresses, spool, first, last = sys.argv[1:]
with connect(addresses) as remote:
    writer = remote.writer("arm", small_spec(), spool=spool, commit_steps=3)
    for seed in range(int(first), int(last)):
        episode = random_episode(small_spec(), 20, seed)
        writer.begin(seed=seed)
        for step in episode.steps():
            writer.append(step)
        writer.end(episode.last_observation)
        writer.flush()
        print(seed, flush=True)
    print(writer.wait_delivered(60), flush=True)
    threading.Event().wait()
"""


class Serving:
    """A process that serves a store, each time at another port."""

    def __init__(self, path: Path, undo: ExitStack):
        self.path = path
        self._undo = undo
        self.address = ""
        self.start()

    def start(self) -> str:
        self._process = run(SERVER, self.path)
        self._undo.callback(end, self._process)
        assert self._process.stdout is not None
        self.address = self._process.stdout.readline().strip()
        assert self.address
        return self.address

    def kill(self) -> None:
        end(self._process)


def run(code: str, *arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", code, *map(str, arguments)], stdout=subprocess.PIPE, text=True)


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[Callable[[str], Serving]]:
    with ExitStack() as undo:
        yield lambda name: Serving(tmp_path / name, undo)


def put(writer: RemoteWriter, seed: int, steps: int = 20) -> None:
    episode = random_episode(SPEC, steps, seed)
    write_episode(writer, episode, seed=seed)


def stored(*paths: Path) -> Counter[tuple[int, bytes]]:
    """How often each row is there: (seed of its episode, what was seen)."""
    seen: Counter[tuple[int, bytes]] = Counter()
    for path in paths:
        with Reader(path) as reader:
            for record in reader.episodes():
                _, columns = reader.rows(record.id)
                seen.update((int(record.info.seed or 0), row.tobytes()) for row in columns["observation"])
        assert verify(path).ok
    return seen


def wanted(seeds: range, steps: int = 20) -> Counter[tuple[int, bytes]]:
    found: Counter[tuple[int, bytes]] = Counter()
    for seed in seeds:
        episode = random_episode(SPEC, steps, seed)
        rows = [step.observation for step in episode.steps()] + [episode.last_observation]
        found.update((seed, np.asarray(row).tobytes()) for row in rows)
    return found


def first_of(writer: str, names: list[str]) -> str:
    """The shard that a writer chooses of these."""
    with connect([f"{name}=127.0.0.1:1" for name in names]) as remote:
        return remote.shard_order(writer)[0]


def writer_at_home(remote: Remote, home: str) -> str:
    """A name whose first shard is `home`."""
    return next(name for name in map(str, range(1000)) if remote.shard_order(name)[0] == home)


# ---- moving


def test_a_killed_shard_comes_back_elsewhere_and_every_step_is_there_once(
    serving: Callable[[str], Serving], tmp_path: Path
) -> None:
    one, two = serving("one"), serving("two")
    with connect(f"shard-0={one.address},shard-1={two.address}") as remote:
        name = writer_at_home(remote, "shard-0")
        config = OutboxConfig(queue_steps=100_000)
        with remote.writer(name, SPEC, spool=tmp_path / "spool", commit_steps=3, config=config) as writer:
            for seed in range(5):
                put(writer, seed)
            assert writer.wait_delivered(PATIENCE_S)
            for seed in range(5, 30):  # many chunks are on their way when it dies
                put(writer, seed)
            one.kill()
            for seed in range(30, 40):
                put(writer, seed)
            assert not writer.wait_delivered(0.5)
            remote.update_address("shard-0", one.start())
            assert writer.wait_delivered(PATIENCE_S)
            assert writer.delivery.address == one.address
            put(writer, 40)
            assert writer.wait_delivered(PATIENCE_S)
    assert stored(one.path) == wanted(range(41))
    assert stored(two.path) == Counter()


def test_the_same_after_the_writer_died_too(serving: Callable[[str], Serving], tmp_path: Path) -> None:
    shards = {"shard-0": serving("one"), "shard-1": serving("two")}

    def places() -> str:
        return ",".join(f"{name}={shard.address}" for name, shard in shards.items())

    with connect(places()) as remote:
        home = remote.shard_order("arm")[0]
    first = run(WRITER, places(), tmp_path / "spool", 0, 10_000)
    try:
        assert first.stdout is not None
        for _ in range(15):
            first.stdout.readline()
        shards[home].kill()
        told = [int(first.stdout.readline()) for _ in range(10)]  # it goes on, into its spool
    finally:
        end(first)
    shards[home].start()
    # A shard more, which a new writer would choose: the spool remembers the name of its own.
    new = next(f"new-{number}" for number in range(1000) if first_of("arm", [*shards, f"new-{number}"]) not in shards)
    shards[new] = serving("three")
    second = run(WRITER, places(), tmp_path / "spool", 20_000, 20_002)
    try:
        assert second.stdout is not None
        assert [second.stdout.readline() for _ in range(3)] == ["20000\n", "20001\n", "True\n"]
    finally:
        end(second)
    paths = {name: shard.path for name, shard in shards.items()}
    found = stored(*paths.values())
    assert set(found.values()) == {1}
    assert not wanted(range(told[-1] + 1)) - found  # all that was recorded is there
    assert not wanted(range(told[-1] + 1)) - stored(paths[home])


def test_without_the_new_address_it_waits_and_moves_nowhere(serving: Callable[[str], Serving], tmp_path: Path) -> None:
    one, two = serving("one"), serving("two")
    with connect(f"a={one.address},b={two.address}") as remote:
        name = writer_at_home(remote, "a")
        writer = remote.writer(name, SPEC, spool=tmp_path / "spool")
        put(writer, 1)
        assert writer.wait_delivered(PATIENCE_S)
        one.kill()
        put(writer, 2)
        assert not writer.wait_delivered(1.5)
        writer.close(0.1)
    assert stored(two.path) == Counter()


def test_samplers_and_subscriptions_go_on_at_the_new_address(serving: Callable[[str], Serving]) -> None:
    one = serving("one")
    with connect(f"shard-0={one.address}") as remote:
        with remote.writer("w", SPEC) as writer:
            put(writer, 1)
        version = remote.publish({"w": np.zeros(3, np.float32)})
        sampler = remote.sampler(EVERYTHING, batch_size=8, seed=1, depth=2)
        again = remote.sampler(EVERYTHING, batch_size=8, seed=1, depth=0)
        with sampler, again, remote.parameters() as subscription:
            expected = [again.sample().reward.copy() for _ in range(4)]
            assert np.array_equal(sampler.sample().reward, expected[0])
            seen = subscription.wait(None, PATIENCE_S)
            assert seen is not None
            assert seen.version == version
            one.kill()
            remote.update_address("shard-0", one.start())
            for reward in expected[1:]:
                assert np.array_equal(sampler.sample().reward, reward)
            assert remote.publish({"w": np.ones(3, np.float32)}) == version + 1
            seen = subscription.wait(seen, PATIENCE_S)
            assert seen is not None
            assert seen.version == version + 1
            assert remote.status()["shard-0"]["parameters_version"] == version + 1


def test_a_live_shard_that_is_moved_is_left_by_its_streams(serve: Callable[..., Server], tmp_path: Path) -> None:
    """No process dies here: the streams must end because the address changed."""
    server = serve("store")
    other = serve("other")
    with connect(f"s={server.address}") as remote, remote.writer("w", SPEC, spool=tmp_path / "spool") as writer:
        put(writer, 1)
        assert writer.wait_delivered(PATIENCE_S)
        remote.update_address("s", other.address)
        put(writer, 2)
        assert writer.wait_delivered(PATIENCE_S)
        assert writer.delivery.address == other.address
    assert {seed for seed, _ in stored(server.store.path)} == {1}
    assert {seed for seed, _ in stored(other.store.path)} == {2}


# ---- forgetting


def test_writers_of_a_forgotten_shard_move_with_all_that_is_not_delivered(
    serving: Callable[[str], Serving], tmp_path: Path
) -> None:
    one, two = serving("one"), serving("two")
    with connect(f"a={one.address},b={two.address}") as remote:
        name = writer_at_home(remote, "a")
        with remote.writer(name, SPEC, spool=tmp_path / "spool", commit_steps=4) as writer:
            put(writer, 1)
            assert writer.wait_delivered(PATIENCE_S)
            one.kill()
            put(writer, 2)
            remote.remove_shard("a")
            assert remote.names == ("b",)
            put(writer, 3)
            assert writer.wait_delivered(PATIENCE_S)
        assert stored(two.path) == wanted(range(2, 4))
        with pytest.raises(RefusedError, match="b: is the only shard"):
            remote.remove_shard("b")
        with pytest.raises(RefusedError, match="a: expected the name of a shard, one of b"):
            remote.update_address("a", "127.0.0.1:1")


# ---- parameters of several shards


def test_publishing_survives_a_shard_that_is_away(
    serving: Callable[[str], Serving], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publish, "PROBE_TIMEOUT_S", PATIENCE_S)  # one that is back may be slow
    shards = {"a": serving("one"), "b": serving("two")}
    places = ",".join(f"{name}={shard.address}" for name, shard in shards.items())
    with connect(places) as remote:
        assert remote.publish({"w": np.zeros(3, np.float32)}) == 1
        with connect(f"a={shards['a'].address}") as alone, alone.parameters() as subscription:
            assert subscription.wait(None, PATIENCE_S) is not None
            shards["a"].kill()
            assert remote.publish({"w": np.zeros(3, np.float32)}) == 2
            assert remote.publish({"w": np.zeros(3, np.float32)}) == 3
            assert remote.unpublished == {"a"}
            assert list(remote.unreachable(timeout_s=PATIENCE_S)) == ["a"]
            address = shards["a"].start()
            remote.update_address("a", address)
            alone.update_address("a", address)
            wait_for(lambda: not remote.unreachable())
            assert remote.publish({"w": np.ones(3, np.float32)}) == 4
            assert not remote.unpublished
            wait_for(lambda: subscription.latest is not None and subscription.latest.version >= 4)
            assert subscription.latest is not None
            assert subscription.latest.version == 4  # the number that the other gave meanwhile is not used again
        for shard in shards.values():
            shard.kill()
        with pytest.raises(UnavailableError, match="none of a, b took the parameters"):
            remote.publish({"w": np.zeros(3, np.float32)})


def test_the_first_publication_has_time_for_a_slow_link(serving: Callable[[str], Serving]) -> None:
    with ExitStack() as proxies:
        links = [Proxy(int(serving(name).address.rpartition(":")[2])) for name in ("one", "two")]
        for link in links:
            proxies.enter_context(link).delay(0.55)  # there and back more than a known server gets
        with connect(f"a={links[0].address},b={links[1].address}") as remote:
            assert remote.publish({"w": np.zeros(3, np.float32)}) == 1
            assert not remote.unpublished


def test_numbers_go_on_after_the_learner_died_while_the_first_shard_is_behind(
    serving: Callable[[str], Serving],
) -> None:
    one, two = serving("one"), serving("two")
    with connect(f"b={two.address}") as remote:
        for _ in range(5):
            remote.publish({"w": np.zeros(3, np.float32)})
    with connect(f"a={one.address},b={two.address}") as remote:
        assert remote.publish({"w": np.zeros(3, np.float32)}) == 6
        assert {name: said["parameters_version"] for name, said in remote.status().items()} == {"a": 6, "b": 6}


def test_a_subscriber_hears_another_shard_when_its_own_is_gone(serving: Callable[[str], Serving]) -> None:
    shards = {"a": serving("one"), "b": serving("two"), "c": serving("three")}
    places = ",".join(f"{name}={shard.address}" for name, shard in shards.items())
    with connect(places) as remote, remote.parameters() as subscription:
        seen = None
        for number, gone in enumerate(["", "a", "b"], 1):
            if gone:
                shards[gone].kill()
            assert remote.publish({"w": np.full(3, number, np.float32)}) == number
            seen = subscription.wait(seen, PATIENCE_S)
            assert seen is not None
            assert seen.version == number
            assert seen.tree["w"][0] == number


def test_what_a_shard_has_missed_is_not_taken_for_news(serving: Callable[[str], Serving]) -> None:
    one, two = serving("one"), serving("two")
    with connect(f"a={one.address}") as first, connect(f"b={two.address}") as second:
        for _ in range(3):
            first.publish({"w": np.zeros(3, np.float32)})
        second.publish({"w": np.zeros(3, np.float32)})
    with connect(f"a={one.address},b={two.address}") as remote:
        order = [remote.connection("a"), remote.connection("b")]
        with Subscription(lambda: order, max_bytes=2**20) as subscription:
            seen = subscription.wait(None, PATIENCE_S)
            assert seen is not None
            assert seen.version == 3
            one.kill()  # it hears the other one now, which is behind
            assert subscription.wait(seen, 3.0) is None
            for _ in range(3):
                with connect(f"b={two.address}") as second:
                    second.publish({"w": np.ones(3, np.float32)})
            seen = subscription.wait(seen, PATIENCE_S)
            assert seen is not None
            assert seen.version == 4


# ---- names


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("=h:1", "expected host:port or name=host:port, or several with commas between, got '=h:1'"),
        ("a=h", "expected host:port or name=host:port, or several with commas between, got 'a=h'"),
        ("http://h:1/", "expected HOST:PORT, without http://, got 'http://h:1/'; pass 'h:1'"),
        ("a=https://h:1", "expected HOST:PORT, without https://, got 'a=https://h:1'; pass 'h:1'"),
        ("a=h:1,a=h:2", "expected each shard once"),
        ("h:1,h:1", "expected each shard once"),
    ],
)
def test_names_are_checked(text: str, complaint: str) -> None:
    with pytest.raises(RefusedError, match=complaint):
        connect(text)


def test_a_shard_without_a_name_has_its_address_for_one() -> None:
    with connect("a=10.0.0.1:7447, 10.0.0.2:7447") as remote:
        assert remote.names == ("a", "10.0.0.2:7447")
        assert remote.address_of("a") == "10.0.0.1:7447"
        assert remote.address_of("10.0.0.2:7447") == "10.0.0.2:7447"


def test_a_spool_that_knows_an_address_finds_the_shard_that_got_a_name(
    serve: Callable[..., Server], tmp_path: Path
) -> None:
    servers = [serve(f"s{number}") for number in range(2)]
    addresses = [server.address for server in servers]
    with connect(addresses) as remote:
        home = remote.shard_order("arm")[0]
        writer = remote.writer("arm", SPEC, spool=tmp_path / "spool")
        put(writer, 1)
        assert writer.wait_delivered(PATIENCE_S)
        server = servers[addresses.index(home)]
        server.stop(0.0)
        put(writer, 2)
        assert writer.wait_recorded(PATIENCE_S)
        writer.close(0.1)
    back = Server(server.store, ServerConfig(port=int(home.rpartition(":")[2]))).start()
    try:
        away = 1 - addresses.index(home)  # of names that it would choose the other one of
        pairs = ([f"{number}", f"{number}-"] for number in range(1000))
        names = next(pair for pair in pairs if first_of("arm", pair) == pair[away])
        named = [f"{name}={address}" for name, address in zip(names, addresses, strict=True)]
        with connect(named) as remote, remote.writer("arm", SPEC, spool=tmp_path / "spool") as writer:
            assert writer.wait_delivered(PATIENCE_S)
    finally:
        back.stop(0.0)
    assert {seed for seed, _ in stored(server.store.path)} == {1, 2}

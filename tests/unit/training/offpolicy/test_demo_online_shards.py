"""The demo/online mixture over shards: what one store would give, in proportion over several, without dead ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.unit.training.offpolicy.test_demo_online_mixture import followed, open_mixture, record
from tests.waiting import wait_for

from understudy.core import StoreError, TransitionBatch
from understudy.core.examples import robot_spec
from understudy.replay import Mixture, Store
from understudy.service import Remote, Server, ServerConfig, connect
from understudy.service.client import sharded_sampler
from understudy.training.offpolicy.demo_online_mixture import Shards


class Shard:
    """A store and its server, which can go away and come back elsewhere."""

    def __init__(self, path: Path, undo: ExitStack):
        self.path = path
        self.store = undo.enter_context(Store.open(path))
        undo.callback(self.stop)
        self.start()

    def start(self) -> str:
        self._server = Server(self.store, ServerConfig(port=0)).start()
        self.address = self._server.address
        return self.address

    def stop(self) -> None:
        self._server.stop(2.0)


@pytest.fixture
def undo() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def shard(undo: ExitStack, tmp_path: Path) -> Callable[[str], Shard]:
    return lambda name: Shard(tmp_path / name, undo)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that stop a server: long enough for one that is only busy."""
    monkeypatch.setattr(sharded_sampler, "ANSWER_TIMEOUT_S", 6.0)
    monkeypatch.setattr(sharded_sampler, "RETRY_S", 0.1)


def connected(undo: ExitStack, **shards: Shard) -> Remote:
    return undo.enter_context(connect([f"{name}={shard.address}" for name, shard in shards.items()]))


def opened(undo: ExitStack, place: Path | Shards, **options: Any) -> Mixture[TransitionBatch]:
    mixture = open_mixture(place, **options)
    undo.callback(mixture.close)
    return mixture


def recorded(mixture: Mixture[TransitionBatch]) -> int:
    """Steps of experience that there ever were, with those on lost shards."""
    online = mixture.samplers["online"]
    return len(online) + online.num_lost


def same(one: Mixture[TransitionBatch], two: Mixture[TransitionBatch], number: int = 20) -> bool:
    """Whether two give the same from now on."""
    drawn = list(zip(one.sample_many(number), two.sample_many(number), strict=True))
    return all(np.array_equal(a.observation, b.observation) and np.array_equal(a.reward, b.reward) for a, b in drawn)


# ---- one shard


@pytest.mark.parametrize("here", [True, False])
def test_one_shard_gives_what_its_store_gives(here: bool, shard: Callable[[str], Shard], undo: ExitStack) -> None:
    one = shard("one")
    record(one.store, kind="practice", value=1.0, human=True)
    record(one.store, kind="demonstration", value=2.0)
    places = Shards(remote=connected(undo, a=one), local={"a": one.path} if here else {})
    plain, sharded = opened(undo, one.path), opened(undo, places)
    assert followed(plain) == followed(sharded) == (14, 10)
    for a, b in zip(plain.samplers.values(), sharded.samplers.values(), strict=True):
        assert np.array_equal(a.peek(7).observation, b.peek(7).observation)
    drawn = [mixture.samplers["demo"].sample(size=5).observation for mixture in (plain, sharded)]
    assert np.array_equal(*drawn)
    assert same(plain, sharded)
    record(one.store, kind="practice", value=3.0)
    assert followed(plain) == followed(sharded) == (14, 20)
    assert same(plain, sharded)


@pytest.mark.parametrize("here", [True, False])
def test_the_state_of_one_place_is_gone_on_with_at_another(
    here: bool, shard: Callable[[str], Shard], undo: ExitStack
) -> None:
    one = shard("one")
    record(one.store, kind="practice", value=1.0)
    record(one.store, kind="demonstration", value=2.0)
    remote = connected(undo, a=one)
    ways = [Shards(remote=remote, local={"a": one.path}), Shards(remote=remote)]
    first = opened(undo, ways[here])
    first.follow()
    list(first.sample_many(5))
    again = opened(undo, ways[not here])
    again.restore(first.state())
    assert recorded(again) == 10
    first.follow()
    again.follow()
    assert same(first, again)


# ---- several


def three(shard: Callable[[str], Shard], undo: ExitStack) -> tuple[dict[str, Shard], Remote, Shards]:
    """10, 30 and 20 steps of practice, whose rewards are 1, 2 and 3; the last two shards are elsewhere."""
    shards = {name: shard(name) for name in "abc"}
    for number, (one, episodes) in enumerate(zip(shards.values(), (2, 6, 4), strict=True), 1):
        record(one.store, kind="practice", value=float(number), episodes=episodes)
    remote = connected(undo, **shards)
    return shards, remote, Shards(remote=remote, local={"a": shards["a"].path})


def shares(mixture: Mixture[TransitionBatch], number: int = 60) -> list[float]:
    rewards = np.concatenate([batch.reward.copy() for batch in mixture.sample_many(number)])
    return [float(np.mean(rewards == value)) for value in (1.0, 2.0, 3.0)]


def test_every_step_of_all_shards_is_drawn_alike(shard: Callable[[str], Shard], undo: ExitStack) -> None:
    shards, _, places = three(shard, undo)
    mixture = opened(undo, places, batch_size=50)
    assert followed(mixture) == (0, 60)
    assert mixture.num_steps["online"] == 60
    assert shares(mixture) == pytest.approx([1 / 6, 3 / 6, 2 / 6], abs=0.03)
    record(shards["c"].store, kind="practice", value=3.0, episodes=12)
    assert followed(mixture) == (0, 120)
    assert shares(mixture) == pytest.approx([1 / 12, 3 / 12, 8 / 12], abs=0.03)
    assert len(mixture.samplers["online"].peek(30)) == 30
    seen = np.concatenate([batch.observation.copy() for batch in mixture.sample_many(200)])
    assert len(np.unique(seen, axis=0)) == 20 * 5  # each; the last shard has four episodes twice


def test_demonstrations_may_be_in_a_store_here_or_on_the_shards(
    shard: Callable[[str], Shard], undo: ExitStack, tmp_path: Path
) -> None:
    one, two = shard("one"), shard("two")
    record(one.store, kind="practice", value=1.0)
    record(two.store, kind="demonstration", value=2.0)
    remote = connected(undo, a=one, b=two)
    with Store.open(tmp_path / "own") as own:
        record(own, kind="demonstration", value=3.0)
        record(own, kind="practice", value=4.0)
    on_shards = opened(undo, Shards(remote=remote))
    assert followed(on_shards) == (10, 10)
    assert sorted(set(on_shards.sample().reward.tolist())) == [1.0, 2.0]
    both = opened(undo, Shards(remote=remote, own=tmp_path / "own"))
    assert followed(both) == (20, 20)
    assert {reward for batch in both.sample_many(20) for reward in batch.reward.tolist()} == {1.0, 2.0, 3.0, 4.0}
    elsewhere = opened(undo, Shards(remote=remote), demos=tmp_path / "own")
    assert followed(elsewhere) == (10, 10)
    assert {reward for batch in elsewhere.sample_many(20) for reward in batch.reward.tolist()} == {1.0, 3.0}


def test_the_state_of_several_is_enough_to_go_on(shard: Callable[[str], Shard], undo: ExitStack) -> None:
    shards, remote, _ = three(shard, undo)
    here = {name: one.path for name, one in shards.items()}
    first = opened(undo, Shards(remote=remote, local=here))
    first.follow()
    list(first.sample_many(7))
    state = first.state()
    wanted = [batch.observation.copy() for batch in first.sample_many(5)]
    record(shards["b"].store, kind="practice", value=5.0)
    again = opened(undo, Shards(remote=remote, local=here))
    again.restore(state)
    for batch, observation in zip(again.sample_many(5), wanted, strict=True):
        assert np.array_equal(batch.observation, observation)


def test_a_run_that_was_begun_in_one_process_goes_on_with_shards(
    shard: Callable[[str], Shard], undo: ExitStack, tmp_path: Path
) -> None:
    own, one = undo.enter_context(Store.open(tmp_path / "own")), shard("one")
    record(own, kind="practice", value=1.0)
    record(own, kind="demonstration", value=2.0)
    plain = opened(undo, tmp_path / "own")
    plain.follow()
    list(plain.sample_many(5))
    again = opened(undo, Shards(remote=connected(undo, a=one), own=tmp_path / "own"))
    again.restore(plain.state())
    assert followed(again) == (10, 10)
    assert {r for batch in again.sample_many(5) for r in batch.reward.tolist()} == {1.0, 2.0}


def test_steps_of_another_kind_on_a_shard_are_refused_by_name(shard: Callable[[str], Shard], undo: ExitStack) -> None:
    one = shard("one")
    record(one.store, kind="practice")
    mixture = opened(undo, Shards(remote=connected(undo, a=one)), spec=robot_spec(8))
    with pytest.raises(StoreError, match=r"^a: holds steps of another spec \(action is .*, expected .*\)"):
        mixture.follow()


# ---- unreachable and lost


@pytest.mark.usefixtures("impatient")
def test_a_shard_that_is_away_is_done_without_until_it_is_back_elsewhere(
    shard: Callable[[str], Shard], undo: ExitStack
) -> None:
    shards, remote, places = three(shard, undo)
    mixture = opened(undo, places, batch_size=50)
    mixture.follow()
    shards["b"].stop()
    assert shares(mixture)[1] == 0.0  # in the middle of a batch, too
    assert list(mixture.unreachable) == ["b"]
    assert followed(mixture) == (0, 60)  # its steps are not gone
    assert shares(mixture) == pytest.approx([1 / 3, 0, 2 / 3], abs=0.05)
    saved = mixture.state()
    remote.update_address("b", shards["b"].start())
    wait_for(lambda: (mixture.follow(), not mixture.unreachable)[1])
    assert shares(mixture) == pytest.approx([1 / 6, 3 / 6, 2 / 6], abs=0.05)
    shards["b"].stop()  # one that goes on meanwhile knows of them, too
    again = opened(undo, places, batch_size=50)
    again.restore(saved)
    assert followed(again) == (0, 60)
    assert shares(again)[1] == 0.0


@pytest.mark.usefixtures("impatient")
def test_if_no_other_has_steps_it_is_waited_for(shard: Callable[[str], Shard], undo: ExitStack) -> None:
    one, two = shard("one"), shard("two")
    record(one.store, kind="practice", value=1.0)
    remote = connected(undo, a=one, b=two)
    told: list[str] = []

    def waiting(text: str) -> None:
        told.append(text)
        if len(told) == 3:
            remote.update_address("a", one.start())

    mixture = opened(undo, Shards(remote=remote), on_wait=waiting)
    assert followed(mixture) == (0, 10)
    one.stop()
    assert set(mixture.sample().reward.tolist()) == {1.0}
    assert set(told) == {"waiting for a"}
    assert len(told) >= 3


@pytest.mark.usefixtures("impatient")
def test_a_lost_shard_is_dropped_with_a_sentence_and_its_steps_still_count(
    shard: Callable[[str], Shard], undo: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    shards, remote, places = three(shard, undo)
    mixture = opened(undo, places, batch_size=50)
    mixture.follow()
    before = mixture.state()
    shards["b"].stop()
    remote.remove_shard("b")
    assert followed(mixture) == (0, 30)
    assert "b: is lost, and with it 30 steps of view online that were learned from; continuing with a, c" in caplog.text
    assert recorded(mixture) == 60
    assert shares(mixture) == pytest.approx([1 / 3, 0, 2 / 3], abs=0.05)
    record(shards["c"].store, kind="practice", value=3.0)
    mixture.follow()
    again = opened(undo, places, batch_size=50)
    again.restore(mixture.state())
    again.follow()
    assert (again.num_steps["online"], recorded(again)) == (40, 70)
    with pytest.raises(StoreError, match="b: the checkpoint counts on this shard, and there are a, c; connect to it"):
        opened(undo, places).restore(before)
    declared = opened(undo, Shards(remote=remote, local=places.local, lost=frozenset({"b"})))
    declared.restore(before)
    assert recorded(declared) == 60


@pytest.mark.usefixtures("impatient")
def test_when_all_experience_is_lost_demonstrations_give_all(
    shard: Callable[[str], Shard], undo: ExitStack, tmp_path: Path
) -> None:
    one, two = shard("one"), shard("two")
    record(one.store, kind="practice", value=1.0)
    with Store.open(tmp_path / "demos") as demos:
        record(demos, kind="demonstration", value=2.0)
    remote = connected(undo, a=one, b=two)

    def waiting(text: str) -> None:
        remote.remove_shard("a")

    mixture = opened(undo, Shards(remote=remote), demos=tmp_path / "demos", on_wait=waiting)
    assert followed(mixture) == (10, 10)
    one.stop()
    assert set(mixture.sample().reward.tolist()) == {2.0}
    assert recorded(mixture) == 10


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("here", [True, False])
def test_an_empty_store_in_place_of_a_lost_one_is_begun_anew(
    here: bool, shard: Callable[[str], Shard], undo: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    one, two = shard("one"), shard("two")
    record(one.store, kind="practice", value=1.0)
    record(two.store, kind="practice", value=2.0, episodes=4)
    remote = connected(undo, a=one, b=two)
    mixture = opened(undo, Shards(remote=remote, local={"a": one.path}))
    mixture.follow()
    list(mixture.sample_many(5))
    before = mixture.state()
    two.stop()
    new = shard("new")
    remote.update_address("b", new.address)
    while mixture.unreachable or followed(mixture) != (0, 10):
        pass
    assert "b: has another store, and 20 steps of view online that were learned from are lost" in caplog.text
    assert (mixture.num_steps["online"], recorded(mixture)) == (10, 30)
    record(new.store, kind="practice", value=3.0)
    assert followed(mixture) == (0, 20)
    assert {reward for batch in mixture.sample_many(10) for reward in batch.reward.tolist()} == {1.0, 3.0}
    assert recorded(mixture) == 40
    # Whoever goes on from a checkpoint of before finds out, too; and from one of after.
    for state, lived in ((before, 40), (mixture.state(), 40)):
        places = Shards(remote=remote, local={"a": one.path, "b": new.path} if here else {"a": one.path})
        again = opened(undo, places)
        again.restore(state)
        again.follow()
        again.follow()
        assert (again.num_steps["online"], recorded(again)) == (20, lived)

"""Batches of RLPD: exact shares, whatever is there; another kind of steps is refused; the state is enough to go on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from understudy.core import Source, StoreError
from understudy.core.examples import random_tree, robot_spec, small_spec
from understudy.core.step import Step
from understudy.replay import Store, Transitions
from understudy.training.offpolicy.demo_online_batches import Batches

SPEC = small_spec()


def live(
    store: Store, *, kind: str, episodes: int = 2, length: int = 5, value: float = 0.0, human: bool = False
) -> None:
    rng = np.random.default_rng(int(value))
    writer = store.writer(f"{kind}-{value}", SPEC)
    for _ in range(episodes):
        writer.begin(kind=kind, split="train", success=True)
        for step in range(length):
            writer.append(
                Step(
                    observation=random_tree(SPEC.observation, rng),
                    action=random_tree(SPEC.action, rng),
                    reward=value,
                    terminated=step == length - 1,
                    truncated=False,
                    source=Source.HUMAN if human and step < 2 else Source.POLICY,
                )
            )
        writer.end(random_tree(SPEC.observation, rng), success=True)


def open_batches(path: Path, **options: object) -> Batches:
    given = {"store": path, "demos": None, "spec": SPEC, "size": 10, "weights": (1, 1), "seed": 3}
    given |= {"shape": Transitions(), **options}
    return Batches(**given)  # type: ignore[arg-type]


def test_shares_are_exact_once_both_are_there(tmp_path: Path) -> None:
    with Store.open(tmp_path / "s") as store:
        batches = open_batches(tmp_path / "s", weights=(3, 2))
        assert batches.follow() == (0, 0)
        live(store, kind="practice", value=1.0)
        assert batches.follow() == (0, 10)
        assert set(batches.sample().reward.tolist()) == {1.0}  # the other gives all
        live(store, kind="demonstration", value=2.0)
        assert batches.follow() == (10, 10)
        for _ in range(5):
            assert sorted(batches.sample().reward.tolist()) == [1.0] * 4 + [2.0] * 6
        batches.close()


def test_demonstrations_may_be_elsewhere(tmp_path: Path) -> None:
    with Store.open(tmp_path / "demos") as demos, Store.open(tmp_path / "s") as store:
        live(demos, kind="demonstration", value=2.0)
        batches = open_batches(tmp_path / "s", demos=tmp_path / "demos")
        assert batches.follow() == (10, 0)
        assert set(batches.sample().reward.tolist()) == {2.0}
        live(store, kind="practice", value=1.0)
        batches.follow()
        assert sorted(batches.sample().reward.tolist()) == [1.0] * 5 + [2.0] * 5
        batches.close()


def test_a_persons_steps_in_practice_are_demonstrations_too(tmp_path: Path) -> None:
    with Store.open(tmp_path / "s") as store:
        live(store, kind="practice", value=1.0, human=True)
        batches = open_batches(tmp_path / "s")
        assert batches.follow() == (4, 10)
        batch = batches.sample()
        assert (batch.source[:5] == Source.HUMAN).all()
        batches.close()


def test_the_state_is_enough_to_go_on_after_the_store_grew(tmp_path: Path) -> None:
    with Store.open(tmp_path / "s") as store:
        live(store, kind="practice", value=1.0)
        live(store, kind="demonstration", value=2.0)
        first = open_batches(tmp_path / "s")
        first.follow()
        for _ in range(3):
            first.sample()
        state = first.state()
        wanted = [first.sample().observation.copy() for _ in range(3)]
        live(store, kind="practice", value=5.0)
        again = open_batches(tmp_path / "s")
        again.restore(state)
        assert all(np.array_equal(again.sample().observation, w) for w in wanted)
        for batches in (first, again):
            batches.close()


def test_looking_moves_no_cursor(tmp_path: Path) -> None:
    with Store.open(tmp_path / "s") as store:
        live(store, kind="practice", value=1.0)
        live(store, kind="demonstration", value=2.0)
        one, two = open_batches(tmp_path / "s"), open_batches(tmp_path / "s")
        for batches in (one, two):
            batches.follow()
        looked = list(two.look(7))
        assert [len(observation) for observation in looked] == [7, 7]
        assert np.array_equal(one.sample().observation, two.sample().observation)
        for batches in (one, two):
            batches.close()


def test_steps_of_another_kind_are_refused_by_name(tmp_path: Path) -> None:
    with Store.open(tmp_path / "s") as store:
        live(store, kind="practice")
        with pytest.raises(
            StoreError, match=r"holds steps of another kind \(action is .*, expected .*\); record and train"
        ):
            open_batches(tmp_path / "s", spec=robot_spec(8))


def test_returns_of_several_steps_are_summed(tmp_path: Path) -> None:
    with Store.open(tmp_path / "s") as store:
        live(store, kind="practice", value=1.0)
        batches = open_batches(tmp_path / "s", size=50, shape=Transitions(num_steps=3, discount=0.5))
        batches.follow()
        assert set(batches.sample().reward.tolist()) == {1.0, 1.5, 1.75}
        batches.close()


def test_batches_drawn_together_have_exact_shares_each(tmp_path: Path) -> None:
    with Store.open(tmp_path / "s") as store:
        live(store, kind="practice", value=1.0)
        live(store, kind="demonstration", value=2.0)
        batches = open_batches(tmp_path / "s", weights=(3, 2))
        batches.follow()
        drawn = [sorted(batch.reward.tolist()) for batch in batches.draw(37)]  # more than go into one group
        assert drawn == [[1.0] * 4 + [2.0] * 6] * 37
        assert batches.num_batches == 37
        seen = [batch.observation.copy() for batch in batches.draw(2)]
        assert not np.array_equal(*seen)
        batches.close()

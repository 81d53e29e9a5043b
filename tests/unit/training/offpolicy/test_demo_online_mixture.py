"""The demo/online mixture of RLPD: exact shares, steps of another spec are refused, the state is enough to resume."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.writing import write_episode

from understudy.core import Source, StoreError, TransitionBatch
from understudy.core import tree as trees
from understudy.core.examples import random_episode, random_tree, robot_spec, small_spec
from understudy.core.step import Step
from understudy.policies import ActorConfig, EncoderConfig
from understudy.replay import Mixture, Store, Transitions
from understudy.training.offpolicy.demo_online_mixture import Shards, open_demo_online_mixture
from understudy.training.offpolicy.rlpd import RLPDConfig, small_sac

SPEC = small_spec()


def record(
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


def open_mixture(store: Path | Shards, **options: Any) -> Mixture[TransitionBatch]:
    given: dict[str, Any] = {"demos": None, "spec": SPEC, "batch_size": 10, "demo_weight": 1, "online_weight": 1}
    given |= {"seed": 3, "shape": Transitions(), **options}
    return open_demo_online_mixture(store=store, **given)


def followed(mixture: Mixture[TransitionBatch]) -> tuple[int, int]:
    """How many steps of demonstrations and of experience there are, after `follow`."""
    num_steps = mixture.follow()
    assert num_steps == len(mixture) == sum(mixture.num_steps.values())
    return mixture.num_steps["demo"], mixture.num_steps["online"]


def test_shares_are_exact_once_both_are_there(tmp_path: Path) -> None:
    with Store.open(tmp_path / "s") as store:
        mixture = open_mixture(tmp_path / "s", demo_weight=3, online_weight=2)
        assert followed(mixture) == (0, 0)
        record(store, kind="practice", value=1.0)
        assert followed(mixture) == (0, 10)
        assert set(mixture.sample().reward.tolist()) == {1.0}  # the other gives all
        record(store, kind="demonstration", value=2.0)
        assert followed(mixture) == (10, 10)
        for _ in range(5):
            assert sorted(mixture.sample().reward.tolist()) == [1.0] * 4 + [2.0] * 6
        mixture.close()


def test_demonstrations_may_be_elsewhere(tmp_path: Path) -> None:
    with Store.open(tmp_path / "demos") as demos, Store.open(tmp_path / "s") as store:
        record(demos, kind="demonstration", value=2.0)
        mixture = open_mixture(tmp_path / "s", demos=tmp_path / "demos")
        assert followed(mixture) == (10, 0)
        assert set(mixture.sample().reward.tolist()) == {2.0}
        record(store, kind="practice", value=1.0)
        mixture.follow()
        assert sorted(mixture.sample().reward.tolist()) == [1.0] * 5 + [2.0] * 5
        mixture.close()


def test_a_persons_steps_in_practice_are_demonstrations_too(tmp_path: Path) -> None:
    with Store.open(tmp_path / "s") as store:
        record(store, kind="practice", value=1.0, human=True)
        mixture = open_mixture(tmp_path / "s")
        assert followed(mixture) == (4, 10)
        batch = mixture.sample()
        assert (batch.source[:5] == Source.HUMAN).all()
        mixture.close()


def test_the_state_is_enough_to_go_on_after_the_store_grew(tmp_path: Path) -> None:
    with Store.open(tmp_path / "s") as store:
        record(store, kind="practice", value=1.0)
        record(store, kind="demonstration", value=2.0)
        first = open_mixture(tmp_path / "s")
        first.follow()
        for _ in range(3):
            first.sample()
        state = first.state()
        wanted = [first.sample().observation.copy() for _ in range(3)]
        record(store, kind="practice", value=5.0)
        again = open_mixture(tmp_path / "s")
        again.restore(state)
        assert all(np.array_equal(again.sample().observation, w) for w in wanted)
        for mixture in (first, again):
            mixture.close()


def test_peek_changes_no_batch(tmp_path: Path) -> None:
    with Store.open(tmp_path / "s") as store:
        record(store, kind="practice", value=1.0)
        record(store, kind="demonstration", value=2.0)
        one, two = open_mixture(tmp_path / "s"), open_mixture(tmp_path / "s")
        for mixture in (one, two):
            mixture.follow()
        peeked = [sampler.peek(7) for sampler in two.samplers.values()]
        assert [len(batch) for batch in peeked] == [7, 7]
        assert np.array_equal(peeked[0].observation, two.samplers["demo"].peek(7).observation)
        assert np.array_equal(one.sample().observation, two.sample().observation)
        for mixture in (one, two):
            mixture.close()


def test_steps_of_another_kind_are_refused_by_name(tmp_path: Path) -> None:
    with Store.open(tmp_path / "s") as store:
        record(store, kind="practice")
        with pytest.raises(
            StoreError, match=r"holds steps of another spec \(action is .*, expected .*\); record and train"
        ):
            open_mixture(tmp_path / "s", spec=robot_spec(8))


def test_returns_of_several_steps_are_summed(tmp_path: Path) -> None:
    with Store.open(tmp_path / "s") as store:
        record(store, kind="practice", value=1.0)
        mixture = open_mixture(tmp_path / "s", batch_size=50, shape=Transitions(num_steps=3, discount=0.5))
        mixture.follow()
        assert set(mixture.sample().reward.tolist()) == {1.0, 1.5, 1.75}
        mixture.close()


def test_batches_drawn_together_have_exact_shares_each(tmp_path: Path) -> None:
    with Store.open(tmp_path / "s") as store:
        record(store, kind="practice", value=1.0)
        record(store, kind="demonstration", value=2.0)
        mixture = open_mixture(tmp_path / "s", demo_weight=3, online_weight=2)
        mixture.follow()
        drawn = [sorted(batch.reward.tolist()) for batch in mixture.sample_many(37)]  # more than go into one group
        assert drawn == [[1.0] * 4 + [2.0] * 6] * 37
        assert mixture.num_batches == 37
        seen = [batch.observation.copy() for batch in mixture.sample_many(2)]
        assert not np.array_equal(*seen)
        mixture.close()


def test_shares_that_are_no_whole_numbers_are_exact_over_a_group_of_batches(tmp_path: Path) -> None:
    with Store.open(tmp_path / "s") as store:
        record(store, kind="practice", value=1.0)
        record(store, kind="demonstration", value=2.0)
        mixture = open_mixture(tmp_path / "s", batch_size=7)
        mixture.follow()
        num_demo = [int((batch.reward == 2.0).sum()) for batch in mixture.sample_many(32)]
        assert set(num_demo) == {3, 4}
        assert sum(num_demo[:16]) == sum(num_demo[16:]) == 16 * 7 // 2
        assert mixture.num_drawn == {"demo": 112, "online": 112}
        mixture.close()


def test_a_run_gets_its_cameras_in_the_size_of_its_network(tmp_path: Path) -> None:
    spec = robot_spec(16)
    with Store.open(tmp_path / "s") as store:
        write_episode(store.writer("w", spec), random_episode(spec, 6, 0), kind="demonstration")
    actor = ActorConfig(encoder=EncoderConfig(image_size=(8, 4)))
    config = RLPDConfig(batch_size=4, sac=replace(small_sac(), actor=actor))
    with config.open_mixture(tmp_path / "s", spec) as mixture:
        mixture.follow()
        seen = dict(trees.leaves(mixture.sample().observation))
    cameras = config.inputs(spec).cameras
    assert cameras
    assert all(seen[path].shape[1:3] == (8, 4) for path in cameras)

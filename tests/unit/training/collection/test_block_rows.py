"""Rows: a block of actions as one row, rows as a batch, and episodes into a real store and back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.unit.training.collection.made import failed_rollout, make_rollout
from tests.unit.training.collection.scripted import Scripted, make_tickets

from understudy.core import ArraySpec, EpisodeError, Spec, SpecError, StepSpec
from understudy.policies import Sampling
from understudy.replay import Reader, Store
from understudy.training.collection.block_rows import block_spec, to_batch, write_rollouts
from understudy.training.collection.collector import Collector

STEP_SPEC = StepSpec(
    observation=Spec({"state": ArraySpec(shape=(20,), dtype="float32")}),
    action=Spec(
        {
            "arm": ArraySpec(shape=(3,), dtype="float32", low=(-1.0, -2.0, -3.0), high=1.0),
            "grip": ArraySpec(shape=(), dtype="float32", low=0.0),
        }
    ),
)


def test_a_block_has_each_action_and_reward_and_how_it_was_chosen() -> None:
    spec = block_spec(STEP_SPEC, Scripted())
    assert spec.observation == STEP_SPEC.observation
    assert spec.action.tree == {
        "arm": ArraySpec(shape=(5, 3), dtype="float32", low=(-1.0, -2.0, -3.0), high=1.0),
        "grip": ArraySpec(shape=(5,), dtype="float32", low=0.0),
    }
    assert spec.reward == ArraySpec(shape=(5,), dtype="float32")
    assert spec.extras.flat == {
        "replay/tokens": ArraySpec(shape=(5, 4), dtype="int32"),
        "log_prob": ArraySpec(shape=(5, 4), dtype="float32"),
        "executed": ArraySpec(shape=(5,), dtype="bool"),
    }
    judging = block_spec(STEP_SPEC, Scripted(has_value=True))
    assert set(judging.extras.flat) - set(spec.extras.flat) == {"value", "next_value"}
    assert judging.extras.flat["next_value"] == ArraySpec(shape=(), dtype="float32")


def test_what_has_no_block_is_refused() -> None:
    ragged = StepSpec(observation=STEP_SPEC.observation, action=Spec(ArraySpec(shape=(None, 2), dtype="float32")))
    with pytest.raises(SpecError, match=r"action: expected a fixed shape, got float32 \[\?, 2\]"):
        block_spec(ragged, Scripted())
    two = StepSpec(
        observation=STEP_SPEC.observation, action=STEP_SPEC.action, reward=ArraySpec(shape=(2,), dtype="float32")
    )
    with pytest.raises(SpecError, match=r"reward: expected float32 \[\], got float32 \[2\]"):
        block_spec(two, Scripted())


def test_a_ticket_that_failed_is_an_episode_without_rows() -> None:
    tickets = make_tickets(2, "a", n_samples=2)
    rollouts = [
        make_rollout(tickets[0], success=True),
        failed_rollout(tickets[1]),
        make_rollout(tickets[2], success=False, truncated=True),
        make_rollout(tickets[3], success=True),
    ]
    batch = to_batch(rollouts)
    assert len(batch) == 6
    assert batch.episode.tolist() == [0, 0, 2, 2, 3, 3]
    assert batch.group.tolist() == [0, 0, 1, 1]
    assert batch.success.tolist() == [True, False, False, True]
    assert batch.terminated.tolist() == [True, False, False, True]
    assert batch.reward.sum(axis=1).tolist() == [0, 1, 0, 0, 0, 1]
    assert batch.instruction == ("do a",) * 6
    assert batch.value is None
    assert batch.observation["said"] == [f"ticket {number}" for number in (0, 0, 2, 2, 3, 3)]
    assert len(batch.observation["points"]) == 6
    for at, rollout in ((0, rollouts[0]), (2, rollouts[2]), (4, rollouts[3])):
        assert rollout.episode is not None
        assert np.array_equal(batch.observation["state"][at : at + 2], rollout.episode.observation["state"][:2])
        assert np.array_equal(batch.replay["tokens"][at : at + 2], rollout.episode.extras["replay"]["tokens"])
        assert np.array_equal(batch.log_prob[at : at + 2], rollout.episode.extras["log_prob"])
    with pytest.raises(EpisodeError, match="expected at least one with an episode, got 1 without; see failure"):
        to_batch(rollouts[1:2])


def test_episodes_go_into_a_store_and_come_back(tmp_path: Path) -> None:
    policy = Scripted(noise=0.3, good=0.5, has_value=True)
    tickets = make_tickets(2, "press_button", "pick_red")
    with Collector("toy?cameras=false", num_parallel_envs=2, max_steps=32) as collector:
        rollouts = collector.collect(tickets, policy, Sampling())
        spec = block_spec(collector.step_spec, policy)
    batch = to_batch(rollouts)
    assert (batch.executed.sum(axis=1) < 5).any()  # the last block of some was not executed whole
    assert not batch.reward[~batch.executed].any()
    assert batch.value is not None
    assert batch.value.dtype == np.float32
    assert batch.next_value is not None
    assert batch.next_value.any()
    assert batch.policy_version.tolist() == [7] * len(batch)
    with Store.open(tmp_path / "store") as store:
        writer = store.writer("collector", spec)
        assert write_rollouts([rollouts[0], failed_rollout(tickets[1]), *rollouts[2:]], writer) == 7
    with Reader(tmp_path / "store") as reader:
        stored = [reader.read(record.id) for record in reader.episodes()]
    lived = [rollout.episode for rollout in (rollouts[0], *rollouts[2:]) if rollout.episode is not None]
    assert len(stored) == 7
    for one, other in zip(stored, lived, strict=True):
        assert one.equals(replace(other, info=replace(other.info, actor="collector")))

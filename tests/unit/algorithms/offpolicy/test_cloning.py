"""Cloning: its options, and that it learns what it is shown."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from tests.unit.algorithms.batches import CAMERAS, STATE, random_batch, same_tree, small_actor

from understudy.algorithms import AlgorithmError, Cloning, CloningConfig
from understudy.core import StepSpec, TransitionBatch
from understudy.policies import Gripper, Inputs, Stats

ANOTHER: dict[str, Any] = {
    "actor": small_actor(hidden=(16, 8)),
    "loss": "likelihood",
    "learning_rate": 1e-2,
    "shift_pixels": 1,
}


def make(spec: StepSpec = STATE, **options: Any) -> Cloning:
    config = CloningConfig(**{"actor": small_actor(), **options})
    return Cloning(config, spec, Stats.none(Inputs(spec.observation)), seed=0)


def test_every_option_has_a_test() -> None:
    assert set(ANOTHER) == {field.name for field in fields(CloningConfig)}


@pytest.mark.parametrize("option", ANOTHER)
def test_every_option_changes_what_is_learned(option: str) -> None:
    first, second = make(CAMERAS), make(CAMERAS, **{option: ANOTHER[option]})
    for cloning in (first, second):
        cloning.update(random_batch(CAMERAS))
    assert not same_tree(first.parameters(), second.parameters())


def shown(seed: int) -> TransitionBatch:
    """What to do is a function of the state; grip where its last number is positive."""
    batch = random_batch(seed=seed, size=128)
    state = batch.observation["state"]
    batch.action[:] = np.stack(
        [0.8 * state[:, 0], -0.5 * state[:, 1] + 0.2, np.where(state[:, 4] > 0, 1.0, -1.0)],
        axis=1,  # type: ignore[list-item]
    )
    return batch


@pytest.mark.parametrize("loss", ["mse", "likelihood"])
def test_it_learns_what_it_is_shown(loss: str) -> None:
    cloning = make(
        actor=small_actor(gripper=Gripper(values=(-1.0, 1.0)), hidden=(32, 32)), loss=loss, learning_rate=3e-3
    )
    for seed in range(300):
        metrics = cloning.update(shown(seed), report=seed == 299)
    test = shown(1000)
    action = cloning.policy().act(test.observation, rng=np.random.default_rng(0), deterministic=True).action
    assert np.abs(action[:, :2] - test.action[:, :2]).mean() < 0.06
    assert np.mean(action[:, 2] == test.action[:, 2]) > 0.93
    assert metrics["gripper_agreement"] > 0.93
    assert metrics["mse"] == pytest.approx(0, abs=0.02)


def test_likelihood_learns_how_sure_to_be() -> None:
    """The first number is shown with spread, the second without."""
    rng = np.random.default_rng(0)
    cloning = make(loss="likelihood", learning_rate=3e-3)
    for seed in range(400):
        batch = random_batch(seed=seed, size=128)
        batch.action[:] = np.stack([np.tanh(0.5 * rng.normal(size=128)), np.zeros(128), np.zeros(128)], axis=1)
        cloning.update(batch, report=False)
    policy = cloning.policy()
    action = policy.act(random_batch(size=500).observation, rng=rng).action
    assert np.arctanh(action[:, 0]).std() == pytest.approx(0.5, rel=0.15)
    assert np.abs(action[:, 1:]).max() < 0.2


def test_rows_that_weigh_nothing_teach_nothing() -> None:
    cloning = make()
    before = cloning.parameters()
    cloning.update(random_batch(weight=np.zeros(32, np.float32)))
    assert same_tree(before, cloning.parameters())


def test_options_that_make_no_sense_are_refused() -> None:
    with pytest.raises(AlgorithmError, match="loss: expected 'mse' or 'likelihood', got 'l1'"):
        CloningConfig(loss="l1")  # type: ignore[arg-type]
    with pytest.raises(AlgorithmError, match="shift_pixels: expected 0 or more, got -1"):
        CloningConfig(shift_pixels=-1)

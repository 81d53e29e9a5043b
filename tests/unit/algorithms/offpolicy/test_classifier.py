"""The success classifier: its options, its labels, its file, and that it sees what was shown."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.unit.algorithms.batches import CAMERAS, STATE, random_batch, random_tree, same_tree, small_actor

from understudy.algorithms import AlgorithmError, ClassifierTraining, ClassifierTrainingConfig, Frames
from understudy.policies import (
    ActorPolicy,
    ClassifierConfig,
    EncoderConfig,
    Inputs,
    PolicyError,
    Stats,
    SuccessClassifier,
)

SMALL = ClassifierConfig(encoder=small_actor().encoder, hidden=(8,))
ANOTHER: dict[str, Any] = {
    "classifier": ClassifierConfig(encoder=SMALL.encoder, hidden=(9,)),
    "learning_rate": 1e-2,
    "balance": False,
    "shift_pixels": 1,
}


def make(**options: Any) -> ClassifierTraining:
    config = ClassifierTrainingConfig(**{"classifier": SMALL, **options})
    stats = Stats.none(Inputs(CAMERAS.observation, config.classifier.encoder.inputs))
    return ClassifierTraining(config, CAMERAS.observation, stats, seed=0)


def frames(seed: int, size: int = 64) -> Frames:
    """Success is a bright square in the middle of the front camera; one in eight shows it."""
    rng = np.random.default_rng(seed)
    observation = random_tree(CAMERAS.observation, size, rng)
    label = rng.random(size) < 0.125
    observation["front"] //= 2
    observation["front"][label, 6:10, 6:10] = 255
    return Frames(observation=observation, label=label)


def test_every_option_has_a_test() -> None:
    assert set(ANOTHER) == {field.name for field in fields(ClassifierTrainingConfig)}


@pytest.mark.parametrize("option", ANOTHER)
def test_every_option_changes_what_is_learned(option: str) -> None:
    first, second = make(), make(**{option: ANOTHER[option]})
    for training in (first, second):
        for seed in range(2):
            training.update(frames(seed))
    assert not same_tree(first.parameters(), second.parameters())


def test_it_learns_to_see_success_and_its_file_does_too(tmp_path: Path) -> None:
    training = make(learning_rate=3e-3, shift_pixels=2)
    for seed in range(150):
        metrics = training.update(frames(seed), report=seed == 149)
    test = frames(1000, 500)
    chance = training.probability(test.observation)
    assert chance.shape == (500,)
    assert np.mean((chance > 0.5) == test.label) > 0.97
    assert metrics["recall"] > 0.9
    assert metrics["false_alarms"] < 0.1
    assert 0 < metrics["positive_share"] < 0.3
    path = tmp_path / "success.safetensors"
    training.classifier(version=5).save(path)
    loaded = SuccessClassifier.load(path, CAMERAS.observation)
    assert np.array_equal(loaded.probability(test.observation), chance)
    assert loaded.version == 5
    one = {name: leaf[0] for name, leaf in test.observation.items()}
    assert loaded.probability(one).shape == ()
    assert loaded.probability(one) == pytest.approx(chance[0], abs=1e-4)
    with pytest.raises(PolicyError, match=r"success.safetensors: observation/front: the classifier was made for uint8"):
        SuccessClassifier.load(path, STATE.observation)
    with pytest.raises(PolicyError, match="expected a policy, got a classifier"):
        ActorPolicy.load(path)


def test_a_transition_is_labelled_by_what_it_led_to() -> None:
    batch = random_batch(size=4, reward=np.float32([1, 1, 0, 0]), terminated=np.array([True, False, True, False]))
    found = Frames.of(batch)
    assert found.label.tolist() == [True, False, False, False]  # reward alone, or an end alone, is no success
    assert found.observation is batch.next_observation
    assert len(found) == 4


def test_balance_lets_a_rare_success_count_as_much_as_all_failures() -> None:
    """With nothing to see, the best guess is one half; without balance it is the share of successes."""
    for balance, wanted in ((True, 0.5), (False, 0.125)):
        training = make(
            balance=balance,
            learning_rate=1e-2,
            classifier=ClassifierConfig(encoder=EncoderConfig(inputs=("state",)), hidden=(4,)),
        )
        observation = {"state": np.zeros((64, 5), np.float32)}
        label = np.arange(64) % 8 == 0
        for _ in range(400):
            training.update(Frames(observation=observation, label=label), report=False)
        assert training.probability(observation)[0] == pytest.approx(wanted, abs=0.02)


def test_a_rate_of_nothing_is_not_reported() -> None:
    observation = frames(0).observation
    for label, missing in ((np.zeros(64, bool), "recall"), (np.ones(64, bool), "false_alarms")):
        metrics = make().update(Frames(observation=observation, label=label))
        assert missing not in metrics
        assert all(np.isfinite(number) for number in metrics.values())


def test_labels_are_true_or_false() -> None:
    with pytest.raises(AlgorithmError, match=r"label: expected bool \[B\], got float64 \[64\]"):
        make().update(Frames(observation=frames(0).observation, label=np.zeros(64)))
    with pytest.raises(AlgorithmError, match="shift_pixels: expected 0 or more, got -1"):
        make(shift_pixels=-1)

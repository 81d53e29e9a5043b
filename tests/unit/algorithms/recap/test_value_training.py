"""ValueTraining: it learns returns, each option counts, and it goes on to the same bits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from understudy.algorithms import AlgorithmError
from understudy.algorithms.recap import ValueSteps, ValueTraining, ValueTrainingConfig
from understudy.core import ArraySpec, Spec
from understudy.core import tree as trees
from understudy.policies import EncoderConfig, PolicyError, Stats
from understudy.policies.config import ValueConfig
from understudy.policies.encoders.words import Words
from understudy.policies.inputs import Inputs
from understudy.policies.value_model import ValueModel

torch.set_num_threads(1)

OBSERVATION = Spec({"state": ArraySpec(shape=(2,), dtype="float32")})
TEXTS = ("open it", "close it")
BASE = ValueTrainingConfig(hidden=(32,))


def model_of(config: ValueTrainingConfig = BASE, seed: int = 0) -> ValueModel:
    words = Words.of(TEXTS, max_words=4)
    stats = Stats.none(Inputs(OBSERVATION, None))
    return ValueModel.new(ValueConfig(hidden=config.hidden), EncoderConfig(), OBSERVATION, stats, words, seed=seed)


def steps(num: int = 64, seed: int = 0) -> ValueSteps:
    """The return is a function of the first number, and lower where something is to be closed."""
    rng = np.random.default_rng(seed)
    state = rng.uniform(-1, 1, (num, 2)).astype(np.float32)
    texts = tuple(TEXTS[number % 2] for number in range(num))
    low = np.array([text == TEXTS[1] for text in texts])
    return ValueSteps(
        observation={"state": state},
        instruction=texts,
        value=np.asarray(np.clip(-0.3 + 0.2 * state[:, 0] - 0.4 * low, -1, 0), np.float32),
    )


def test_it_learns_what_became_of_the_steps() -> None:
    model = model_of()
    training = ValueTraining(replace(BASE, learning_rate=1e-2), model, seed=0)
    first = training.update(steps())
    for number in range(250):
        training.update(steps(seed=number), report=False)
    last = training.update(steps(seed=1000))
    assert first["loss"] == pytest.approx(np.log(201), abs=0.2)  # a new model knows nothing
    assert last["error"] < 0.05 < first["error"]
    held_out = steps(seed=2000)
    found = training.model(version=7)
    values = found.values(held_out.observation, held_out.instruction)
    assert np.abs(values - held_out.value).mean() < 0.05
    assert (values.dtype, found.version) == (np.float32, 7)
    kept = found.parameters()
    training.update(steps())
    assert trees.equal(found.parameters(), kept)  # later updates do not change it


@pytest.mark.parametrize("change", [{"learning_rate": 3e-3}, {"weight_decay": 0.5}, {"hidden": (16,)}], ids=str)
def test_every_option_changes_something(change: dict[str, Any]) -> None:
    def losses(config: ValueTrainingConfig) -> list[float]:
        training = ValueTraining(config, model_of(config), seed=0)
        return [training.update(steps(seed=number))["loss"] for number in range(4)]

    assert losses(replace(BASE, **change)) != losses(BASE)


def test_it_goes_on_to_the_same_bits() -> None:
    one = ValueTraining(BASE, model_of(), seed=0)
    for number in range(3):
        one.update(steps(seed=number))
    state = one.state()
    other = ValueTraining(BASE, model_of(seed=9), seed=5)
    other.restore(state)
    for number in range(3, 6):
        assert one.update(steps(seed=number)) == other.update(steps(seed=number))
    assert trees.equal(one.model().parameters(), other.model().parameters())
    with pytest.raises(AlgorithmError, match="config/update/learning_rate: the state was saved with"):
        ValueTraining(replace(BASE, learning_rate=1e-2), model_of(), seed=0).restore(state)


def test_a_model_survives_its_file(tmp_path: Path) -> None:
    model = model_of(seed=3)
    model.save(tmp_path / "value.safetensors")
    loaded = ValueModel.load(tmp_path / "value.safetensors")
    seen = steps()
    assert np.array_equal(
        loaded.values(seen.observation, seen.instruction), model.values(seen.observation, seen.instruction)
    )
    assert loaded.description() == model.description()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"updates": 0}, "updates: expected a number from 1, got 0"),
        ({"batch_size": 0}, "batch_size: expected a number from 1, got 0"),
        ({"hidden": ()}, "hidden: expected at least one positive number"),
        ({"learning_rate": 0.0}, "learning_rate, weight_decay: expected more than 0"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(AlgorithmError, match=said):
        replace(BASE, **change)


def test_a_network_that_cannot_be_is_refused() -> None:
    with pytest.raises(PolicyError, match="num_bins: expected a number from 2, got 1"):
        ValueConfig(num_bins=1)
    with pytest.raises(PolicyError, match="hidden: expected at least one positive number"):
        ValueConfig(hidden=(0,))

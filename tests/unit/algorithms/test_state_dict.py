"""State and restore: what goes on is what would have gone on, bit for bit, through safetensors and JSON alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tests.unit.algorithms.batches import CAMERAS, GRIPPER, STATE, random_batch, same_tree, small_actor, small_sac

from understudy.algorithms import (
    SAC,
    Algorithm,
    AlgorithmError,
    ClassifierTraining,
    ClassifierTrainingConfig,
    Cloning,
    CloningConfig,
    SACConfig,
)
from understudy.core import StepSpec
from understudy.policies import ClassifierConfig, Inputs, Stats

SOME_STATS = {"mean": {"state": np.full(5, 0.3, np.float32)}, "std": {"state": np.full(5, 2.0, np.float32)}}


def cloning(seed: int, stats: Stats | None = None) -> Cloning:
    stats = stats or Stats.none(Inputs(CAMERAS.observation))
    return Cloning(CloningConfig(actor=small_actor(gripper=GRIPPER)), CAMERAS, stats, seed=seed)


def classifier(seed: int) -> ClassifierTraining:
    config = ClassifierTrainingConfig(classifier=ClassifierConfig(encoder=small_actor().encoder, hidden=(8,)))
    return ClassifierTraining(config, CAMERAS.observation, Stats.none(Inputs(CAMERAS.observation)), seed=seed)


ALGORITHMS: dict[str, tuple[StepSpec, Callable[[int], Algorithm]]] = {
    "sac": (STATE, lambda seed: small_sac(seed=seed)),
    "sac with everything": (
        CAMERAS,
        lambda seed: small_sac(
            CAMERAS, seed=seed, actor=small_actor(gripper=GRIPPER), num_critics=4, critic_steps=2, backup_entropy=True
        ),
    ),
    "cloning": (CAMERAS, cloning),
    "classifier": (CAMERAS, classifier),
}


@pytest.fixture(params=ALGORITHMS)
def case(request: pytest.FixtureRequest) -> tuple[StepSpec, Callable[[int], Algorithm]]:
    return ALGORITHMS[request.param]


def run(algorithm: Algorithm, spec: StepSpec, seeds: range) -> list[dict[str, float]]:
    return [algorithm.update(random_batch(spec, size=8, seed=seed)) for seed in seeds]


def on_disk(state: dict[str, Any], place: Path) -> dict[str, Any]:
    """Through a file of tensors and a text."""
    arrays = {name: value for name, value in state.items() if isinstance(value, np.ndarray)}
    save_file(arrays, place / "arrays")
    text = json.dumps({name: value for name, value in state.items() if name not in arrays})
    return {**load_file(place / "arrays"), **json.loads(text)}


def test_a_restored_algorithm_goes_on_bit_for_bit(
    case: tuple[StepSpec, Callable[[int], Algorithm]], tmp_path: Path
) -> None:
    spec, make = case
    first = make(1)
    run(first, spec, range(20))
    saved = on_disk(first.state(), tmp_path)
    wanted = run(first, spec, range(20, 40))

    second = make(2)  # another seed: nothing of the new object may be left
    second.restore(saved)
    assert second.num_updates == 20
    assert run(second, spec, range(20, 40)) == wanted
    assert second.num_updates == 40
    assert same_tree(first.parameters(), second.parameters())
    for name, value in first.state().items():
        assert np.array_equal(value, second.state()[name]), name


def test_the_seed_decides(case: tuple[StepSpec, Callable[[int], Algorithm]]) -> None:
    spec, make = case
    first, again, other = (run(make(seed), spec, range(3)) for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_a_state_is_a_snapshot(case: tuple[StepSpec, Callable[[int], Algorithm]]) -> None:
    spec, make = case
    algorithm = make(1)
    state, parameters = algorithm.state(), algorithm.parameters()
    copies = {name: np.copy(value) for name, value in state.items()}
    run(algorithm, spec, range(3))
    assert all(np.array_equal(state[name], copies[name]) for name in state)
    assert not same_tree(parameters, algorithm.parameters())


def test_published_parameters_do_not_change_later(case: tuple[StepSpec, Callable[[int], Algorithm]]) -> None:
    spec, make = case
    algorithm = make(1)
    parameters = algorithm.parameters()
    again = {path: leaf.copy() for path, leaf in parameters["weights"].items() if not isinstance(leaf, dict)}
    run(algorithm, spec, range(3))
    assert all(np.array_equal(parameters["weights"][path], leaf) for path, leaf in again.items())


def test_statistics_are_in_the_state() -> None:
    """They came from the data of the first day; the data of today gives others."""
    stats = Stats(**SOME_STATS)  # type: ignore[arg-type]
    config = SACConfig(actor=small_actor(), critic_hidden=(16, 16))
    pairs: tuple[tuple[Cloning | SAC, Cloning | SAC], ...] = (
        (cloning(1, stats), cloning(1)),
        (SAC(config, CAMERAS, stats, seed=1), small_sac(CAMERAS, seed=1)),
    )
    for first, second in pairs:
        second.restore(first.state())
        assert run(second, CAMERAS, range(3)) == run(first, CAMERAS, range(3))
        assert np.array_equal(second.policy().stats.mean["state"], SOME_STATS["mean"]["state"])


def test_a_state_of_something_else_is_refused_and_nothing_changes() -> None:
    sac = small_sac()
    before = sac.state()
    other = small_sac(discount=0.5, seed=3)
    other.update(random_batch())
    state = other.state()
    for bad, said in (
        (state, "config/discount: the state was saved with 0.5, this run has 0.97; resume with the saved config"),
        ({**state, "config": before["config"], "spec": "{}"}, "spec/action/.*: the state was saved with None"),
        (cloning(0).state(), "kind: expected a state of 'sac', got 'cloning'"),
        ({**before, "device": "cuda"}, "device: the state was saved on cuda, this run is on cpu"),
        (
            {k: v for k, v in before.items() if k != "generator"},
            "generator: expected it in the saved state",
        ),
        (
            {k: v for k, v in before.items() if not k.startswith("stats/")},
            "stats/mean/observation/state: expected it in the saved state",
        ),
        (
            {**before, "modules/target/critic/0/bias": np.zeros(3, np.float32)},
            r"modules/target/critic/0/bias: expected shape \[2, 1, 16\], got \[3\]; the state is of another network",
        ),
    ):
        with pytest.raises(AlgorithmError, match=said):
            sac.restore(bad)
        assert all(np.array_equal(value, before[name]) for name, value in sac.state().items())

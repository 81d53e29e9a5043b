"""Stats: from data, from bounds, and what a network sees of numbers that run away."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from understudy.core import ArraySpec, Spec
from understudy.policies import EncoderConfig, Inputs, PolicyError, Stats
from understudy.policies.encoders.observation_encoder import LARGEST_STATE, ObservationEncoder

SPEC = Spec(
    {
        "a": ArraySpec(shape=(3,), dtype="float32", low=(-1.0, 0.0, 2.0), high=(1.0, 4.0, 4.0)),
        "b": ArraySpec(shape=(), dtype="float64"),
    }
)
INPUTS = Inputs(SPEC)


def data(size: int, seed: int) -> dict[str, np.ndarray]:  # type: ignore[type-arg]
    rng = np.random.default_rng(seed)
    return {"a": rng.normal((5, 100, 0), (1, 20, 0), (size, 3)).astype(np.float32), "b": rng.normal(-1e4, 0.5, size)}


def test_batches_are_merged_as_if_they_were_one() -> None:
    parts = [data(size, seed) for seed, size in enumerate((1, 7, 50, 3))]
    stats = Stats.of_data(INPUTS, iter(parts))
    whole = {path: np.concatenate([part[path] for part in parts]).astype(np.float64) for path in ("a", "b")}
    np.testing.assert_allclose(stats.mean["a"], whole["a"].mean(axis=0), rtol=1e-6)
    np.testing.assert_allclose(stats.std["a"][:2], whole["a"].std(axis=0)[:2], rtol=1e-6)
    np.testing.assert_allclose(stats.std["b"], [whole["b"].std()], rtol=1e-6)
    assert stats.std["a"][2] == 1.0  # a constant stays at its scale


def test_of_bounds() -> None:
    inputs = Inputs(SPEC, ("a",))
    stats = Stats.of_bounds(inputs)
    assert stats.mean["a"].tolist() == [0, 2, 3]
    assert stats.std["a"].tolist() == [1, 2, 1]
    with pytest.raises(PolicyError, match=r"observation/b: expected bounds, got float64 \[\] without; use"):
        Stats.of_bounds(INPUTS)


def test_a_network_sees_numbers_near_one_and_none_that_runs_away() -> None:
    stats = Stats.of_data(INPUTS, [data(500, 3)])
    encoder = ObservationEncoder(EncoderConfig(), SPEC, stats, torch.device("cpu"))
    seen = encoder(INPUTS.tensors(data(500, 4), torch.device("cpu"))).numpy()
    assert np.abs(seen.mean(axis=0)).max() < 0.2
    assert 0.9 < seen[:, [0, 1, 3]].std() < 1.1
    away = {"a": np.full((1, 3), 1e9, np.float32), "b": np.array([-1e9])}
    assert encoder(INPUTS.tensors(away, torch.device("cpu"))).tolist() == [[LARGEST_STATE] * 3 + [-LARGEST_STATE]]


def test_statistics_of_other_fields_are_refused() -> None:
    with pytest.raises(PolicyError, match="observation/b: expected 1 numbers of mean, got nothing"):
        Stats.none(Inputs(SPEC, ("a",))).check(INPUTS)
    with pytest.raises(PolicyError, match="expected at least one observation, got none"):
        Stats.of_data(INPUTS, [])


def test_flat_and_back() -> None:
    for inputs in (INPUTS, Inputs(Spec(ArraySpec(shape=(2,), dtype="float32")))):
        stats = Stats.none(inputs)
        again = Stats.of_flat({**stats.flat(), "weights/x": np.zeros(1)})
        again.check(inputs)
        assert {**again.mean}.keys() == {**stats.mean}.keys()

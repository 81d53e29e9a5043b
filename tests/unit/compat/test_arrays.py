"""Arrays: torch tensors become numpy, floats are rounded to the spec, and nothing else is converted."""

from __future__ import annotations

import numpy as np
import pytest

from understudy.compat.arrays import conform, number, to_numpy, tree_to_numpy
from understudy.core import ArraySpec, Spec, SpecError

SPEC = Spec({"state": ArraySpec(shape=(2,), dtype="float32"), "id": ArraySpec(shape=(), dtype="int64")})


def test_a_tensor_becomes_an_array_and_text_stays() -> None:
    torch = pytest.importorskip("torch")
    assert to_numpy(torch.ones(2, requires_grad=True), "w").tolist() == [1.0, 1.0]
    assert tree_to_numpy({"a": torch.zeros(1), "b": "text"}, "x")["b"] == "text"
    with pytest.raises(SpecError, match=r"w: numpy cannot hold it \(.*\); convert it first, for example to float32"):
        to_numpy(torch.ones(2, dtype=torch.bfloat16), "w")


def test_floats_are_rounded_to_the_spec_and_integers_are_not_converted() -> None:
    found = conform(SPEC, {"state": np.array([1.0, 1 / 3]), "id": np.int64(3)}, "observations")
    assert found["state"].dtype == np.float32
    with pytest.raises(SpecError, match="observations/id: expected int64"):
        conform(SPEC, {"state": np.zeros(2, np.float32), "id": np.int32(3)}, "observations")


def test_a_value_that_fits_is_not_copied() -> None:
    value = {"state": np.zeros(2, np.float32), "id": np.array(3)}
    assert conform(SPEC, value, "observations") is value


def test_one_number_may_be_wrapped() -> None:
    assert number(np.array([0.5]), "rewards") == 0.5
    with pytest.raises(SpecError, match="rewards: expected one number, got"):
        number(np.zeros(2), "rewards")

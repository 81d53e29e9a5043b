"""Actions: vectors from -1 to 1 and the trees a world takes, both ways."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some

from understudy.core import ArraySpec, Spec, SpecError
from understudy.policies import PolicyError
from understudy.policies.actions import Actions

CPU = torch.device("cpu")
TREE = Spec(
    {
        "arm": ArraySpec(shape=(2,), dtype="float32", low=(-0.1, 0.3), high=(0.7, 0.9)),
        "hand": ArraySpec(shape=(), dtype="float64", low=0.0, high=0.08),
    }
)


def test_the_bounds_are_minus_one_and_one() -> None:
    actions = Actions(TREE)
    low, middle, high = (actions.from_unit(np.full(3, unit, np.float32)) for unit in (-1, 0, 1))
    np.testing.assert_allclose(low["arm"], [-0.1, 0.3], rtol=1e-6)
    np.testing.assert_allclose(middle["arm"], [0.3, 0.6], rtol=1e-6)
    np.testing.assert_allclose(high["arm"], [0.7, 0.9], rtol=1e-6)
    assert (low["hand"], high["hand"].shape) == (0.0, ())
    assert high["hand"] == pytest.approx(0.08)


@given(some.lists(some.floats(-1, 1, width=32), min_size=3, max_size=3))
def test_every_vector_fits_the_spec_and_comes_back(unit: list[float]) -> None:
    actions = Actions(TREE)
    vector = np.array([unit], np.float32)
    tree = actions.from_unit(vector)
    TREE.check({"arm": tree["arm"][0], "hand": tree["hand"][0]}, "action")
    np.testing.assert_allclose(actions.to_unit(tree, CPU).numpy(), vector, atol=1e-5)


def test_a_plain_action_is_not_touched() -> None:
    actions = Actions(Spec(ArraySpec(shape=(2,), dtype="float32", low=-1.0, high=1.0)))
    given_ = np.array([[0.1, -0.7]], np.float32)
    assert np.array_equal(actions.to_unit(given_, CPU).numpy(), given_)
    assert np.array_equal(actions.from_unit(given_), given_)


@pytest.mark.parametrize(
    ("leaf", "said"),
    [
        (ArraySpec(shape=(2,), dtype="float32"), r"action: expected float numbers with bounds, got float32 \[2\]"),
        (ArraySpec(shape=(2,), dtype="int64", low=0, high=2), r"action: expected float numbers with bounds, got int64"),
        (
            ArraySpec(shape=(2,), dtype="float32", low=1.0, high=1.0),
            "expected low less than high, got 1.0 and 1.0",
        ),
    ],
)
def test_actions_without_room_are_refused(leaf: ArraySpec, said: str) -> None:
    with pytest.raises(PolicyError, match=said):
        Actions(Spec(leaf))


def test_a_batch_of_another_shape_is_named() -> None:
    with pytest.raises(SpecError, match=r"action/hand: expected \[B\], got float64 \[4, 1\]"):
        Actions(TREE).to_unit({"arm": np.zeros((4, 2), np.float32), "hand": np.zeros((4, 1))}, CPU)

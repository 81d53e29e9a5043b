"""The bounds of an ArraySpec: what may be given and what they refuse."""

import numpy as np
import pytest
from tests.unit.core.complaints import complaint

from understudy.core import ArraySpec


def leaf(dtype, shape=(), **bounds):
    return ArraySpec(shape=shape, dtype=dtype, **bounds)


ONE_OR_LAST = "expected one number or one per element of the last dimension of"


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"shape": (2, 3), "low": (0, 0)}, f"low: {ONE_OR_LAST} [2, 3], got 2 numbers"),
        ({"high": (1,)}, f"high: {ONE_OR_LAST} [], got 1 numbers"),
        ({"shape": (None,), "high": (1, 2)}, f"high: {ONE_OR_LAST} [None], got 2 numbers"),
        ({"low": 2, "high": 1}, "low: expected no more than high, got 2.0 and 1.0; correct the bounds"),
        ({"high": float("nan")}, "low: expected no more than high, got None and nan; correct the bounds"),
        (
            {"shape": (2,), "low": (0, 2), "high": 1},
            "low: expected no more than high, got (0.0, 2.0) and 1.0; correct the bounds",
        ),
    ],
)
def test_bounds_that_make_no_sense_are_refused(fields, said):
    assert complaint(leaf, "float32", **fields) == said


def test_bounds_become_floats():
    for bound in (2, 2.0, np.float32(2), np.int64(2), np.array(2)):
        assert type(leaf("int8", low=bound).low) is float
        assert leaf("int8", low=bound) == leaf("int8", low=2.0)
    assert leaf("int8", (2,), high=np.array([1, 2])).high == (1.0, 2.0)


@pytest.mark.parametrize(
    ("made", "value", "said"),
    [
        (leaf("float32", (3,), low=-1), [0, -1, -1.5], "x[2]: expected a value from -1 to inf, got -1.5"),
        (leaf("float32", (3,), high=1), [1, 1.5, 9], "x[1]: expected a value from -inf to 1, got 1.5"),
        (leaf("float32", (2,), low=(0, -1)), [-0.5, -0.5], "x[0]: expected a value from 0 to inf, got -0.5"),
        (leaf("float32", (2, 2), high=(9, 1)), [[5, 0], [5, 2]], "x[1, 1]: expected a value from -inf to 1, got 2"),
        (leaf("int32", (None, 2), low=(0, 2)), [[0, 2], [3, 1]], "x[1, 1]: expected a value from 2 to inf, got 1"),
        (leaf("int64", low=0, high=2), 3, "x: expected a value from 0 to 2, got 3"),
        (leaf("float32", low=-1), float("nan"), "x: expected a value from -1 to inf, got nan"),
        (leaf("float64", (2,), high=1), [0, float("nan")], "x[1]: expected a value from -inf to 1, got nan"),
        (
            leaf("float32", high=1),
            np.nextafter(np.float32(1), np.float32(2)),
            "x: expected a value from -inf to 1, got 1.0000001",
        ),
    ],
)
def test_a_value_out_of_bounds_is_refused_with_its_place(made, value, said):
    advice = "fix what computed it" if said.endswith("nan") else "clip it, or widen the bounds of the spec"
    assert complaint(made.check, value, "x") == f"{said}; {advice}"


def test_bounds_are_inclusive():
    leaf("float32", (2,), low=(-1, 0), high=(0, 1)).check([-1, 1], "x")
    leaf("int8", (None,), low=3, high=3).check([3, 3], "x")
    leaf("int8", (None,), low=3).check([], "x")


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_a_value_clipped_to_its_bounds_fits(dtype):
    """0.1 is another number in float32 than in float64, and 0.7 errs to the other side."""
    for bound in (0.1, 0.7):
        made = leaf(dtype, (2,), low=-bound, high=bound)
        made.check(np.array([-bound, bound]).astype(dtype), "x")
        complaint(made.check, np.nextafter(np.array([0, bound], dtype), np.array(1, dtype)), "x")


def test_nan_is_refused_by_bounds_only():
    assert np.isnan(leaf("float32").check(float("nan"), "x"))
    complaint(leaf("float32", low=-float("inf")).check, float("nan"), "x")

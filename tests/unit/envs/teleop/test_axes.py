"""Axes: any action of one array of floats, within its bounds, from pushes and a grip."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from understudy.core import ArraySpec, Spec
from understudy.envs.teleop.axes import Axes, DeviceError


def axes(size: int, low: object = -1.0, high: object = 1.0, **options: object) -> Axes:
    return Axes.of(Spec(ArraySpec(shape=(size,), dtype="float32", low=low, high=high)), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("size", "names"),
    [
        (2, ("x", "y")),
        (4, ("x", "y", "z", "grip")),
        (7, ("x", "y", "z", "roll", "pitch", "yaw", "grip")),
        (5, ("axis 1", "axis 2", "axis 3", "axis 4", "axis 5")),
    ],
)
def test_the_usual_meaning_of_an_action_by_its_size(size: int, names: tuple[str, ...]) -> None:
    assert axes(size).names == names


def test_a_push_goes_towards_the_bound_and_an_axis_rests_at_zero() -> None:
    arm = axes(4, low=(-2.0, -1.0, 0.5, 0.0), high=(4.0, 1.0, 1.5, 2.0))
    assert arm.action({}, closed=False).tolist() == [0, 0, 0.5, 0]  # z rests where it can: 0 is out of its bounds
    assert arm.action({"x": 1, "y": -0.5, "z": 0.5}, closed=True).tolist() == [4, -0.5, 1.0, 2]
    assert arm.action({"x": -1, "z": -1}, closed=False).tolist() == [-2, 0, 0.5, 0]


def test_without_bounds_a_full_push_is_one() -> None:
    assert axes(2, None, None).action({"x": 1, "y": -1}, closed=False).tolist() == [1, -1]
    assert axes(2, None, 0.5).action({"x": 1, "y": -1}, closed=False).tolist() == [0.5, -1]


def test_a_grip_may_close_at_the_lower_bound() -> None:
    usual, other = axes(4), axes(4, high_closes=False)
    assert (usual.action({}, closed=True)[3], other.action({}, closed=True)[3]) == (1, -1)
    assert usual.closed(np.float32([0, 0, 0, 0.2]))
    assert not other.closed(np.float32([0, 0, 0, 0.2]))


def test_an_action_in_a_dict_stays_in_it() -> None:
    spec = Spec({"arm": {"speed": ArraySpec(shape=(4,), dtype="float64", low=-1, high=1)}})
    action = Axes.of(spec).action({"y": 0.3}, closed=True)
    spec.check(action, "action")
    assert action["arm"]["speed"].tolist() == [0, 0.3, 0, 1]
    assert Axes.of(spec).closed(action)


@given(
    pushes=st.lists(st.floats(-3, 3), min_size=3, max_size=3),
    bounds=st.tuples(st.floats(-1e6, 1e6), st.floats(-1e6, 1e6)),
    dtype=st.sampled_from(["float16", "float32", "float64"]),
    closed=st.booleans(),
)
def test_whatever_is_pushed_fits_the_spec(
    pushes: list[float], bounds: tuple[float, float], dtype: str, closed: bool
) -> None:
    low, high = sorted(np.clip(bounds, -6e4, 6e4).tolist())
    spec = Spec(ArraySpec(shape=(4,), dtype=dtype, low=low, high=high))
    spec.check(Axes.of(spec).action(dict(zip("xyz", pushes, strict=True)), closed=closed), "action")


def test_what_no_hand_can_make_is_refused() -> None:
    with pytest.raises(DeviceError, match="action: expected one array, got a, b"):
        Axes.of(Spec({"a": ArraySpec(shape=(2,), dtype="float32"), "b": ArraySpec(shape=(2,), dtype="float32")}))
    with pytest.raises(DeviceError, match=r"action/a: expected floats of one dimension, got int64 \[2\]"):
        Axes.of(Spec({"a": ArraySpec(shape=(2,), dtype="int64")}))
    with pytest.raises(DeviceError, match="names: expected 4 different ones for action, got x, x, y, z"):
        axes(4, names="xxyz")

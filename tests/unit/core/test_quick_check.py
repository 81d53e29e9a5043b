"""The usual value passes a check by a shorter way; what it gives and what it refuses is the same."""

from types import MappingProxyType

import numpy as np
import pytest

from understudy.core import ArraySpec, Spec, SpecError
from understudy.core.tree import map_with_paths

SPEC = Spec(
    {
        "arm": {"pose": ArraySpec(shape=(3,), dtype="float32", low=-1, high=1)},
        "touch": ArraySpec(shape=(), dtype="bool"),
    }
)


def value(pose):
    return {"arm": {"pose": pose}, "touch": np.asarray(True)}


def test_arrays_that_fit_are_given_back_as_they_are():
    pose = np.zeros(3, np.float32)
    assert SPEC.check(value(pose), "x")["x/arm/pose"] is pose


@pytest.mark.parametrize(
    "given",
    [
        value([0.0, 0.5, 1.0]),
        MappingProxyType(value(np.array([0, 0.5, 1], np.float32))),
        value(np.array([0, 0.5, 1], np.float32).view(np.recarray)),
    ],
    ids=["a list", "a mapping that is no dict", "a subclass of ndarray"],
)
def test_the_long_way_gives_the_same(given):
    usual = SPEC.check(value(np.array([0, 0.5, 1], np.float32)))
    checked = SPEC.check(given)
    assert list(checked) == list(usual) == ["arm/pose", "touch"]
    assert type(checked["arm/pose"]) is np.ndarray
    assert all(np.array_equal(checked[path], usual[path]) for path in usual)


@pytest.mark.parametrize("wrong", [np.nan, np.inf, 1.001, -1.001])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_bounds_hold_at_every_place(place, wrong):
    pose = np.zeros(3, np.float32)
    pose[place] = wrong
    with pytest.raises(SpecError, match=rf"^x/arm/pose\[{place}\]: expected a value from -1 to 1, got"):
        SPEC.check(value(pose), "x")


def test_nothing_is_within_all_bounds():
    empty = ArraySpec(shape=(None,), dtype="float32", low=0, high=1)
    assert empty.check(np.zeros(0, np.float32), "x").shape == (0,)


def test_fields_join_those_that_are_there():
    row = {"other": 1}
    SPEC.check_into(row, value(np.zeros(3, np.float32)), "x")
    assert list(row) == ["other", "x/arm/pose", "x/touch"]


def test_leaves_are_replaced_with_their_paths_known():
    assert map_with_paths(lambda path, leaf: f"{path}={leaf}", {"a": {"b": 1}, "c": 2}, "x") == {
        "a": {"b": "x/a/b=1"},
        "c": "x/c=2",
    }
    assert map_with_paths(lambda path, leaf: (path, leaf), 3) == ("", 3)

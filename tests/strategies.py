"""Hypothesis strategies for trees and specs, and the values that go with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

from understudy.core.spec import DTYPES, ArraySpec, Spec, text
from understudy.core.step import StepSpec
from understudy.core.tree import Tree

names = st.text('ab_.$ \\"\0é猫🤖', min_size=1, max_size=3)


def trees(leaves: st.SearchStrategy[Any]) -> st.SearchStrategy[Tree]:
    """A bare leaf or up to two levels of dicts; no dict is empty, since a flat tree cannot tell it from nothing."""
    inner = st.dictionaries(names, leaves, min_size=1, max_size=2)
    return leaves | inner | st.dictionaries(names, leaves | inner, min_size=1, max_size=2)


@st.composite
def array_specs(draw: Callable[..., Any]) -> ArraySpec:
    """Leaves of every dtype, fixed or ragged, with bounds that leave room for a value of the dtype."""
    dtype = draw(st.sampled_from(DTYPES))
    if dtype == "str":
        return text()
    shape: list[int | None] = draw(st.lists(st.integers(0, 3), max_size=3))
    if draw(st.booleans()):
        shape = [None, *(size or 1 for size in shape)]
    if dtype == "bool":
        return ArraySpec(shape=tuple(shape), dtype=dtype)
    number = st.floats(-50, 0) | st.just(-float("inf")) if dtype.startswith("float") else st.integers(-50, 0)
    low, high = draw(bounds(shape, number)), draw(bounds(shape, number.map(lambda x: -x)))
    shift = 0 if dtype.startswith("u") else draw(st.integers(-60, 60))
    return ArraySpec(shape=tuple(shape), dtype=dtype, low=shifted(low, shift), high=shifted(high, shift))


def bounds(shape: list[int | None], number: st.SearchStrategy[float]) -> st.SearchStrategy[Any]:
    """No bound, one number, or one per element of the last dimension."""
    kinds = st.none() | number
    if shape and shape[-1] is not None:
        kinds |= st.lists(number, min_size=shape[-1], max_size=shape[-1])
    return kinds


def shifted(bound: Any, by: int) -> Any:
    if isinstance(bound, list):
        return [x + by for x in bound]
    return None if bound is None else bound + by


specs = trees(array_specs()).map(Spec)

step_specs = st.builds(
    StepSpec,
    observation=specs,
    action=specs,
    extras=st.just(Spec({})) | specs,
    reward=st.sampled_from([((), "float32"), ((), "int64"), ((2,), "float64")]).map(
        lambda fields: ArraySpec(shape=fields[0], dtype=fields[1])
    ),
)

"""Spaces: Gymnasium's, and whatever has the same attributes, become specs."""

from __future__ import annotations

import numpy as np
import pytest

from understudy.compat.spaces import spec_of
from understudy.core import ArraySpec, Spec, SpecError


def test_a_dict_of_boxes_becomes_a_spec() -> None:
    spaces = pytest.importorskip("gymnasium").spaces
    space = spaces.Dict({"state": spaces.Box(-1, 1, (3,), np.float32), "more": spaces.Dict({"n": spaces.Discrete(4)})})
    assert dict(spec_of(space, "observations").flat) == {
        "state": ArraySpec(shape=(3,), dtype="float32"),
        "more/n": ArraySpec(shape=(), dtype="int64"),
    }


def test_specs_are_accepted_as_they_are() -> None:
    leaf = ArraySpec(shape=(2,), dtype="uint8")
    spec = Spec({"image": leaf})
    assert spec_of(spec, "observations") is spec
    assert dict(spec_of({"image": leaf}, "observations").flat) == {"image": leaf}


def test_a_space_without_a_shape_is_named_by_its_path() -> None:
    with pytest.raises(SpecError, match="observations/a: expected a space of arrays or a dict of them, got"):
        spec_of({"a": object()}, "observations")

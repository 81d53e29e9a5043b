"""Weights of any nesting come back as they were."""

import numpy as np
import pytest

from understudy.compat.agentlace.weights import pack_weights, unpack_weights
from understudy.core import StoreError


def test_plain_dicts_travel_as_they_are() -> None:
    tree, metadata = pack_weights({"a": {"b": np.ones(2)}})
    assert metadata == {}
    assert unpack_weights(tree, metadata)["a"]["b"].tolist() == [1, 1]


def test_lists_tuples_and_numbers_stay_what_they_are() -> None:
    given = {"layers": [np.ones(2), {"bias/0": np.zeros(1)}], "shape": (1, 2.5, True, None, "x"), "empty": {}}
    found = unpack_weights(*pack_weights(given))
    assert found["layers"][1]["bias/0"].tolist() == [0]
    assert (found["shape"], found["empty"], type(found["layers"])) == (given["shape"], {}, list)


def test_nothing_to_send_is_refused() -> None:
    with pytest.raises(StoreError, match="params: expected at least one array"):
        pack_weights({"name": "resnet"})

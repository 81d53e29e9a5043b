"""Tensors and other values come back as they were."""

from typing import Any

import numpy as np
import pytest
import torch

from understudy.compat.rlinf.tensors import decode_value, encode_value, to_array, to_tensor
from understudy.core import SpecError


def test_bfloat16_goes_through_float32_and_back() -> None:
    given = torch.tensor([1.5, -3e38, 2**-130]).bfloat16()
    array, dtype = to_array(given.requires_grad_())
    assert (array.dtype, dtype) == (np.float32, "bfloat16")
    assert torch.equal(to_tensor(array, dtype), given)


@pytest.mark.parametrize("value", [None, True, 3, 2.5, "text", [1, ("a", None)], {"a": [1]}, (), float("inf")])
def test_values_are_kept(value: Any) -> None:
    assert decode_value(encode_value(value, "v")) == value


def test_small_tensors_and_arrays_are_kept() -> None:
    for given in (torch.tensor(3.0), torch.tensor([1, 2]), torch.tensor([1.0]).bfloat16()):
        found = decode_value(encode_value([given], "v"))[0]
        assert found.dtype == given.dtype
        assert torch.equal(found, given)
    assert np.array_equal(decode_value(encode_value(np.arange(3), "v")), np.arange(3))


def test_what_cannot_be_kept_is_named() -> None:
    with pytest.raises(SpecError, match=r"v\[1\]/x: expected tensors, numbers, text, or lists and dicts of them"):
        encode_value([1, {"x": object()}], "v")
    with pytest.raises(SpecError, match="v: expected names that are text"):
        encode_value({1: 2}, "v")

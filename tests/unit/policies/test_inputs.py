"""Inputs: which fields are seen, as what, and what is said of those that do not fit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from understudy.core import ArraySpec, Resize, Spec, SpecError, text
from understudy.core.resize import resize_frame
from understudy.policies import Inputs, PolicyError

CPU = torch.device("cpu")
SPEC = Spec(
    {
        "images": {"front": ArraySpec(shape=(8, 8, 3), dtype="uint8")},
        "pose": ArraySpec(shape=(2, 3), dtype="float64"),
        "held": ArraySpec(shape=(), dtype="bool"),
        "code": ArraySpec(shape=(4,), dtype="uint8"),
    }
)


def observation(size: int = 2) -> dict[str, Any]:
    return {
        "images": {"front": np.zeros((size, 8, 8, 3), np.uint8)},
        "pose": np.arange(6.0 * size).reshape(size, 2, 3),
        "held": np.array([True, False][:size]),
        "code": np.ones((size, 4), np.uint8),
    }


def test_pictures_are_cameras_and_all_else_is_state() -> None:
    inputs = Inputs(SPEC)
    assert inputs.cameras == ("images/front",)
    assert inputs.states == ("pose", "held", "code")
    assert inputs.state_size == 6 + 1 + 4
    tensors = inputs.tensors(observation(), CPU)
    assert tensors["images/front"].dtype == torch.uint8
    assert {path: (tensors[path].dtype, tuple(tensors[path].shape)) for path in inputs.states} == {
        "pose": (torch.float32, (2, 6)),
        "held": (torch.float32, (2, 1)),
        "code": (torch.float32, (2, 4)),
    }
    assert tensors["held"].tolist() == [[1.0], [0.0]]
    assert tensors["pose"][1].tolist() == [6, 7, 8, 9, 10, 11]


def test_only_the_chosen_fields_are_seen_and_others_may_be_anything() -> None:
    inputs = Inputs(Spec({**SPEC.tree, "instruction": text()}), ("pose",))
    assert (inputs.cameras, inputs.states) == ((), ("pose",))
    assert inputs.spec == Spec({"pose": SPEC.tree["pose"]})
    assert list(inputs.tensors({**observation(), "instruction": ["a", "b"]}, CPU)) == ["pose"]


def test_memory_is_shared_where_it_can_be() -> None:
    given = {"state": np.zeros((2, 3), np.float32)}
    inputs = Inputs(Spec({"state": ArraySpec(shape=(3,), dtype="float32")}))
    tensors = inputs.tensors(given, CPU)
    given["state"][1, 2] = 5.0
    assert tensors["state"][1, 2] == 5.0
    given["state"].flags.writeable = False
    tensors = inputs.tensors(given, CPU)  # torch would warn of it
    assert tensors["state"][1, 2] == 5.0


def test_a_flipped_picture_is_taken_as_it_looks() -> None:
    image = np.arange(2 * 8 * 8 * 3, dtype=np.uint8).reshape(2, 8, 8, 3)
    tensors = Inputs(SPEC, ("images/front",)).tensors({"images": {"front": image[:, ::-1]}}, CPU)
    assert np.array_equal(tensors["images/front"].numpy(), image[:, ::-1])


def test_one_is_told_from_a_batch() -> None:
    inputs = Inputs(SPEC, ("pose",))
    assert inputs.is_single({"pose": np.zeros((2, 3))})
    assert not inputs.is_single({"pose": np.zeros((1, 2, 3))})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"pose": np.zeros((2, 4))}, r"observation/pose: expected float64 \[B, 2, 3\], got float64 \[2, 4\]"),
        ({"pose": np.zeros((3, 2, 3))}, r"observation/pose: expected float64 \[B, 2, 3\], got float64 \[3, 2, 3\]"),
        (
            {"images": {"front": np.zeros((2, 8, 8, 3), np.float32)}},
            r"observation/images/front: expected uint8 \[8, 8, 3\], got float32 \[2, 8, 8, 3\]; convert it to uint8",
        ),
        ({"images": {}}, r"observation/images/front: expected this field, got code, held, pose"),
    ],
)
def test_what_does_not_fit_is_named(change: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError, match=said):
        Inputs(SPEC).tensors({**observation(), **change}, CPU)


def test_fields_that_cannot_be_seen_are_refused() -> None:
    with pytest.raises(PolicyError, match="observation/say: expected a fixed shape, got text; leave it out"):
        Inputs(Spec({"say": text()}))
    with pytest.raises(PolicyError, match=r"the observation has no field 'poze'; did you mean 'pose'\?"):
        Inputs(SPEC, ("poze",))
    with pytest.raises(PolicyError, match="expected at least one field"):
        Inputs(SPEC, ())


def test_cameras_are_seen_in_another_size_whether_a_batch_has_it_already_or_not() -> None:
    inputs = Inputs(SPEC, image_size=(4, 2))
    assert inputs.camera_shapes == {"images/front": (4, 2, 3)}
    assert inputs.batch_resize == {"observation/images/front": Resize((4, 2))}
    assert inputs.spec == SPEC  # a policy is made for the world's cameras
    whole = observation()
    whole["images"]["front"][:] = np.random.default_rng(0).integers(0, 256, (2, 8, 8, 3))
    small = observation()
    small["images"]["front"] = np.stack([resize_frame(frame, Resize((4, 2))) for frame in whole["images"]["front"]])
    found = [inputs.tensors(given, CPU)["images/front"] for given in (whole, small)]
    assert found[0].shape == (2, 4, 2, 3)
    assert torch.equal(*found)
    assert Inputs(SPEC).batch_resize is None


def test_a_size_without_an_effect_or_a_sense_is_refused() -> None:
    with pytest.raises(PolicyError, match="image_size: has no effect, the network sees no camera"):
        Inputs(SPEC, ("pose",), (4, 4))
    with pytest.raises(SpecError, match="observation/images/front: expected 1x1 to 8x8 pixels, got 16x16"):
        Inputs(SPEC, image_size=(16, 16))

"""Frames in another size: the definition, computed slowly, and which fields it is for."""

from typing import Any

import numpy as np
import pytest
import xxhash

from understudy.core import H264, ArraySpec, Resize, Spec, SpecError, StepSpec
from understudy.core.resize import ResizeOption, resize_frame, resized_spec, sizes_by_field

CAMERA = ArraySpec(shape=(12, 16, 3), dtype="uint8")
SPEC = StepSpec(
    observation=Spec(
        {
            "front": ArraySpec(shape=(12, 16, 3), dtype="uint8", codec=H264()),
            "arm": {"wrist": CAMERA},
            "depth": ArraySpec(shape=(6, 8), dtype="uint16"),
            "joints": ArraySpec(shape=(4,), dtype="float32"),
        }
    ),
    action=Spec(ArraySpec(shape=(2,), dtype="float32")),
)


def mean_of_areas(frame: Any, height: int, width: int) -> Any:
    """docs/formats.md, word by word."""
    old_height, old_width = frame.shape[:2]
    flat = frame.reshape(old_height, old_width, -1)
    found = np.zeros((height, width, flat.shape[2]), object)
    for i, j in np.ndindex(height, width):
        for r, c in np.ndindex(old_height, old_width):
            rows = min((r + 1) * height, (i + 1) * old_height) - max(r * height, i * old_height)
            columns = min((c + 1) * width, (j + 1) * old_width) - max(c * width, j * old_width)
            found[i, j] += max(rows, 0) * max(columns, 0) * flat[r, c].astype(object)
    total = old_height * old_width
    return ((2 * found + total) // (2 * total)).astype(frame.dtype).reshape(height, width, *frame.shape[2:])


@pytest.mark.parametrize(
    ("shape", "dtype", "size"),
    [
        ((12, 16, 3), "uint8", (3, 4)),
        ((12, 16, 3), "uint8", (5, 7)),
        ((12, 16, 3), "uint8", (12, 16)),
        ((6, 6, 4), "uint8", (6, 5)),
        ((2, 2), "uint8", (1, 1)),
        ((9, 11), "uint16", (4, 11)),
        ((9, 11, 1), "uint16", (7, 3)),  # sums above 2**24
    ],
)
def test_a_pixel_is_the_mean_of_what_it_covers(shape: tuple[int, ...], dtype: str, size: tuple[int, int]) -> None:
    frame = np.random.default_rng(0).integers(0, np.iinfo(dtype).max + 1, shape).astype(dtype)
    found = resize_frame(frame, Resize(size))
    assert found.dtype == frame.dtype
    assert np.array_equal(found, mean_of_areas(frame, *size))
    white = np.full(shape, np.iinfo(dtype).max, dtype)
    assert np.array_equal(resize_frame(white, Resize(size)), white[: size[0], : size[1]])


def test_a_crop_comes_first() -> None:
    frame = np.random.default_rng(1).integers(0, 256, (12, 16, 3)).astype(np.uint8)
    found = resize_frame(frame, Resize((4, 5), crop=(2, 3, 8, 10)))
    assert np.array_equal(found, mean_of_areas(frame[2:10, 3:13], 4, 5))
    assert np.array_equal(resize_frame(frame, Resize((8, 10), crop=(2, 3, 8, 10))), frame[2:10, 3:13])


@pytest.mark.parametrize(
    ("size", "checksum"),
    [((128, 128), 0x1EBB68DE23404498), ((224, 224), 0x829B2757A2B7798D), ((127, 131), 0xBAD5B4F5B9032EEB)],
    ids=["128", "224", "odd"],
)
def test_the_pixels_are_the_same_on_every_machine(size: tuple[int, int], checksum: int) -> None:
    frame = (np.arange(480 * 640 * 3, dtype=np.uint64) * 2654435761 >> 13).astype(np.uint8).reshape(480, 640, 3)
    assert xxhash.xxh3_64_intdigest(resize_frame(frame, Resize(size)).data) == checksum


@pytest.mark.parametrize(
    ("option", "fields"),
    [
        (None, {}),
        ((6, 8), {"observation/front": (6, 8), "observation/arm/wrist": (6, 8), "observation/depth": (6, 8)}),
        (Resize((3, 4)), {"observation/front": (3, 4), "observation/arm/wrist": (3, 4), "observation/depth": (3, 4)}),
        ({"arm/wrist": (3, 4)}, {"observation/arm/wrist": (3, 4)}),
        ({"observation/depth": Resize((2, 2))}, {"observation/depth": (2, 2)}),
        ({"front": (12, 16), "arm/wrist": (12, 16)}, {"observation/front": (12, 16)}),  # what is stored raw stays
    ],
)
def test_which_fields_are_resized(option: ResizeOption | None, fields: dict[str, tuple[int, int]]) -> None:
    found = sizes_by_field(SPEC, option)
    if option == (6, 8):
        fields = {path: size for path, size in fields.items() if path != "observation/depth"}  # it has that size
    assert {path: resize.size for path, resize in found.items()} == fields
    resized = resized_spec(SPEC, found)
    for path, leaf in resized.columns.items():
        if path in fields:
            assert leaf.shape[:2] == fields[path]
            assert leaf.codec is None
        else:
            assert leaf == SPEC.columns[path]


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ((24, 32), "frames are only made smaller"),
        ((0, 4), "expected 1x1 to 12x16 pixels, got 0x4"),
        ({"joints": (2, 2)}, "there is no camera 'joints'; the cameras of the observation are: front"),
        ({"frnt": (2, 2)}, "there is no camera 'frnt'; did you mean 'front'?"),
        ({"front": Resize((2, 2), crop=(8, 0, 6, 6))}, "got a crop of 6x6 from row 8 and column 0"),
        ({"front": (2, 2, 2)}, "expected 2 whole numbers as size"),
        ({"front": (2.0, 2)}, "expected 2 whole numbers as size"),
    ],
)
def test_a_size_that_makes_no_sense_is_refused(option: Any, text: str) -> None:
    with pytest.raises(SpecError, match=text):
        sizes_by_field(SPEC, option)

"""Resize: another size of camera frames, by averaging areas, to the bit the same on every machine.

A pixel of the result is the mean of the rectangle of the frame that it covers, rounded to the nearest whole number
(halves up). It is computed with whole numbers only, so neither the order of the sums nor the CPU changes it:
docs/formats.md has the definition. Matrix products in floating point do the work, in a type that holds all of these
sums exactly.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, TypeAlias, cast

import numpy as np

from understudy.core import tree as trees
from understudy.core.cameras import is_frame
from understudy.core.errors import SpecError
from understudy.core.spec import Spec
from understudy.core.step import StepSpec
from understudy.core.suggestion import did_you_mean

Array: TypeAlias = np.ndarray[Any, Any]
BAND_VALUES = 2**16  # that are averaged at a time, so that they stay in the CPU's cache
MAX_SIDE = 8192  # pixels; the sums of a frame of this size are exact in float64


@dataclass(frozen=True)
class Resize:
    """Height and width that frames are averaged to, after a crop (top, left, height, width) if there is one."""

    size: tuple[int, int]
    crop: tuple[int, int, int, int] | None = None

    def __post_init__(self) -> None:
        for name, value, count in (("size", self.size, 2), ("crop", self.crop, 4)):
            if value is not None and (len(value) != count or any(type(x) is not int or x < 0 for x in value)):
                raise SpecError(f"resize: expected {count} whole numbers as {name}, got {value!r}; see docs/cameras.md")

    def check(self, path: str, shape: tuple[int, ...]) -> None:
        """Refuse a crop outside of the frame, and a size that is larger than what is averaged."""
        height, width = shape[:2]
        top, left, rows, columns = self.crop or (0, 0, height, width)
        if not (0 < rows <= height - top and 0 < columns <= width - left):
            raise SpecError(
                f"resize: {path} has {height}x{width} pixels, got a crop of {rows}x{columns} from row {top} and column "
                f"{left}; choose a part of the frame"
            )
        if not (0 < self.size[0] <= rows <= MAX_SIDE and 0 < self.size[1] <= columns <= MAX_SIDE):
            raise SpecError(
                f"resize: {path}: expected 1x1 to {min(rows, MAX_SIDE)}x{min(columns, MAX_SIDE)} pixels, got "
                f"{self.size[0]}x{self.size[1]}; frames are only made smaller"
            )

    def to_json(self) -> dict[str, Any]:
        return {"size": list(self.size), "crop": None if self.crop is None else list(self.crop)}

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> Resize:
        crop = value["crop"]
        return Resize(tuple(value["size"]), None if crop is None else tuple(crop))


# One size for all cameras, or a size for each of some cameras by name.
ResizeOption: TypeAlias = tuple[int, int] | Resize | Mapping[str, tuple[int, int] | Resize]


def sizes_by_field(spec: StepSpec, option: ResizeOption | None) -> dict[str, Resize]:
    """Which fields of a step are to be resized, and how. Frames that are stored raw and have the size are left out."""
    if option is None:
        return {}
    cameras = {path: leaf for path, leaf in spec.observation.leaves("observation") if is_frame(leaf) or leaf.codec}
    if isinstance(option, Mapping):
        chosen: dict[str, Resize] = {}
        for name, wanted in option.items():
            path = name if name in cameras else trees.join("observation", name)
            if path not in cameras:
                names = [camera.removeprefix("observation/") for camera in cameras]
                advice = did_you_mean(name, names, f"the cameras of the observation are: {', '.join(names) or 'none'}")
                raise SpecError(f"resize: there is no camera {name!r}; {advice}")
            chosen[path] = as_resize(wanted)
    else:
        chosen = dict.fromkeys(cameras, as_resize(option))
    for path, each in chosen.items():
        each.check(path, cameras[path].fixed_shape)
    return {
        path: each
        for path, each in chosen.items()
        if cameras[path].codec is not None or each.crop is not None or each.size != cameras[path].fixed_shape[:2]
    }


def as_resize(value: Sequence[int] | Resize) -> Resize:
    """The value that a size stands for."""
    return value if isinstance(value, Resize) else Resize(cast("tuple[int, int]", tuple(value)))


def resized_spec(spec: StepSpec, sizes: Mapping[str, Resize]) -> StepSpec:
    """The spec of what is read when these fields are resized."""
    if not sizes:
        return spec
    flat = {
        path: replace(leaf, shape=(*sizes[full].size, *leaf.shape[2:]), codec=None) if full in sizes else leaf
        for path, leaf in spec.observation.flat.items()
        for full in (trees.join("observation", path),)
    }
    return replace(spec, observation=Spec(trees.unflatten(flat)))


def resize_frame(frame: Array, resize: Resize) -> Array:
    """One frame [height, width, ...] of uint8 or uint16, cropped and averaged."""
    if resize.crop is not None:
        top, left, rows, columns = resize.crop
        frame = frame[top : top + rows, left : left + columns]
    if frame.shape[:2] == resize.size:
        return np.ascontiguousarray(frame)
    height, width = frame.shape[:2]
    channels = math.prod(frame.shape[2:])
    whole = height // math.gcd(height, resize.size[0]) * (width // math.gcd(width, resize.size[1]))
    dtype = "float32" if whole * int(np.iinfo(frame.dtype).max) < 2**24 else "float64"
    down, across = _down(height, resize.size[0], dtype), _across(width, resize.size[1], channels, dtype)
    groups = np.ascontiguousarray(frame).reshape(-1, down.shape[1], width * channels)  # of rows that become whole ones
    sums = np.empty((len(groups), len(down) * resize.size[1] * channels), dtype)
    step = max(BAND_VALUES // groups[0].size, 1)
    band = np.empty((step, *groups.shape[1:]), dtype)
    for first in range(0, len(groups), step):
        part = band[: len(groups) - first]
        np.copyto(part, groups[first : first + step])
        np.matmul(
            (down @ part).reshape(-1, len(across)), across, out=sums[first : first + step].reshape(-1, across.shape[1])
        )
    exact: Array = sums.astype(np.int64 if dtype == "float64" else np.int32)
    means: Array = (2 * exact + whole) // (2 * whole)
    return means.astype(frame.dtype).reshape(*resize.size, *frame.shape[2:])


def _shares(size: int, new: int) -> Array:
    """[new, size], each divided by their greatest common divisor: how much of each old pixel a new one covers."""
    divisor = math.gcd(size, new)
    size, new = size // divisor, new // divisor
    old_start, new_start = np.arange(size) * new, np.arange(new)[:, None] * size  # a new pixel is `size` wide
    shares: Array = np.minimum(old_start + new, new_start + size) - np.maximum(old_start, new_start)
    return shares.clip(min=0)


@lru_cache(maxsize=32)
def _down(height: int, new: int, dtype: str) -> Array:
    """What a group of old rows is multiplied with, from the left."""
    return _shares(height, new).astype(dtype)


@lru_cache(maxsize=32)
def _across(width: int, new: int, channels: int, dtype: str) -> Array:
    """What a group of old columns, with their channels, is multiplied with from the right."""
    shares = np.kron(_shares(width, new), np.eye(channels, dtype=np.int64))
    return np.ascontiguousarray(shares.T, dtype)

"""What the crash test and the chain test write: steps that follow from an episode's seed and an index, so that every
row can be checked wherever it is found.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from understudy.core import H264, ArraySpec, Png, Source, Spec, Step, StepSpec, text
from understudy.core import tree as trees

MOSAIC = 6  # fields of a frame of video, in each direction
FIELD_PIXELS = 8  # of such a field, in each direction
MAX_ERROR = 64  # of the mean of a field, which is black or white


@dataclass(frozen=True, kw_only=True)
class Contents:
    """The steps of all episodes; with `encoded` they also have a video in H.264 and a depth camera in PNG."""

    encoded: bool = False

    @cached_property
    def spec(self) -> StepSpec:
        size = MOSAIC * FIELD_PIXELS
        fields: dict[str, Any] = {"camera": ArraySpec(shape=(24, 24, 3), dtype="uint8"), "note": text()}
        if self.encoded:
            fields["video"] = ArraySpec(shape=(size, size, 3), dtype="uint8", codec=H264(gop_size=4))
            fields["depth"] = ArraySpec(shape=(12, 16), dtype="uint16", codec=Png())
        return StepSpec(observation=Spec(fields), action=Spec(ArraySpec(shape=(3,), dtype="float32")))

    def step(self, seed: int, index: int, *, last: bool) -> Step:
        rng = np.random.default_rng([seed, index, 1])
        return Step(
            observation=self.observation(seed, index),
            action=rng.random(3, np.float32),
            reward=float(index),
            terminated=last,
            source=Source.SCRIPT,
            policy_version=index,
        )

    def observation(self, seed: int, index: int) -> dict[str, Any]:
        rng = np.random.default_rng([seed, index, 2])
        fields: dict[str, Any] = {
            "camera": rng.integers(0, 256, (24, 24, 3), np.uint8),
            "note": f"episode {seed}, row {index}"[: 5 + index],
        }
        if self.encoded:
            mosaic = rng.integers(0, 2, (MOSAIC, MOSAIC, 1), np.uint8) * np.uint8(255)
            fields["video"] = np.tile(mosaic.repeat(FIELD_PIXELS, 0).repeat(FIELD_PIXELS, 1), 3)
            fields["depth"] = rng.integers(0, 2**16, (12, 16), np.uint16)
        return fields

    def row_equals(
        self, columns: Mapping[str, Any], row: int, seed: int, *, last: bool, index: int | None = None
    ) -> bool:
        """Whether a stored row is what was written; `index` is its number in the episode, by default `row`."""
        index = row if index is None else index
        wanted = trees.flatten(self.observation(seed, index), "observation")
        if not last:
            step = self.step(seed, index, last=bool(columns["terminated"][row]))
            wanted |= {
                "action": step.action,
                "reward": np.float32(step.reward),
                "source": np.uint8(step.source),
                "policy_version": np.int64(step.policy_version),
            }
        return all(self.leaf_equals(path, value, columns[path][row]) for path, value in wanted.items())

    def leaf_equals(self, path: str, wanted: Any, found: Any) -> bool:
        """Exactly, or for video as near as the codec comes: each field of the mosaic must be recognized."""
        if not path.endswith("/video"):
            return trees.equal_leaf(wanted, found)
        return wanted.shape == found.shape and bool(np.all(np.abs(_means(wanted) - _means(found)) < MAX_ERROR))


def _means(frame: np.ndarray) -> np.ndarray:
    """The mean of each field of a frame of video."""
    fields = frame.reshape(MOSAIC, FIELD_PIXELS, MOSAIC, FIELD_PIXELS * 3)
    return np.asarray(fields.mean(axis=(1, 3)))

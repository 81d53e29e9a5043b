"""MCAP in the contract of formats: all that is written as PNG comes back, but for stacks and what is not finite."""

from dataclasses import replace
from typing import Any

import numpy as np
from tests.contracts.formats.case import Case

from understudy.core import ArraySpec, Episode, Spec, StepSpec
from understudy.core import tree as trees
from understudy.formats.mcap.messages import is_camera


def newest_frames(spec: StepSpec, episode: Episode) -> tuple[StepSpec, Episode]:
    def leaf(leaf: ArraySpec) -> ArraySpec:
        return replace(leaf, shape=leaf.shape[-3:]) if is_camera(leaf) else leaf

    def column(leaf: ArraySpec, values: Any) -> Any:
        return values[:, -1] if is_camera(leaf) and len(leaf.shape) == 4 else values

    changed = {
        name: Spec(trees.map_leaves(leaf, getattr(spec, name).tree)) for name in ("observation", "action", "extras")
    }
    leaves = spec.columns
    parts = {
        name: trees.map_with_paths(lambda path, values: column(leaves[path], values), getattr(episode, name), name)
        for name in ("observation", "action", "proposal", "extras")
    }
    assert all(np.isfinite(episode.reward).ravel())
    return replace(spec, **changed), replace(episode, **parts)


CASES = [
    Case(format="mcap", options={"images": "png"}, file="demos.mcap", carried=newest_frames),
    Case(format="mcap", options={"images": "png", "compression": "none"}, file="demos", carried=newest_frames),
]

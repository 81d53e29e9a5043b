"""Packed images: the frames of an observation and of the next one in one array, each once, as HIL-SERL samples them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from understudy.core import Spec, SpecError, StoreError, TransitionBatch
from understudy.core import tree as trees
from understudy.core.tree import AnyTree
from understudy.replay.read.recycled_memory import empty_array

Array = np.ndarray[Any, Any]


def image_path(observation: Spec, key: str) -> str:
    """The path of an image key: `images/wrist_1`, or `wrist_1` if only one field has that name."""
    matches = [path for path in observation.flat if path == key or path.endswith(f"/{key}")]
    if key not in observation.flat and len(matches) != 1:
        raise SpecError(
            f"image_keys: there is no observations/{key}; choose among {', '.join(sorted(observation.flat))}, "
            f"or pass image_keys=()"
        )
    path = key if key in observation.flat else matches[0]
    leaf = observation.flat[path]
    if leaf.ragged or len(leaf.shape) not in (3, 4):
        raise SpecError(
            f"observations/{path}: expected frames [T, height, width, channels] or [height, width, channels], got "
            f"{leaf}; leave it out of image_keys"
        )
    return path


def with_packed_images(batch: TransitionBatch, image_keys: tuple[str, ...]) -> tuple[TransitionBatch, dict[str, Array]]:
    """The batch with images that are views of arrays [B, 2T, ...], so that sampling writes the packed frames."""
    now, then = trees.flatten(batch.observation), trees.flatten(batch.next_observation)
    frames = {}
    for key in image_keys:
        if now[key].ndim == 4:  # [B, height, width, channels]: one frame each
            size, stack, shape = len(now[key]), 1, now[key].shape[1:]
        else:
            size, stack, *shape = now[key].shape
        frames[key] = both = empty_array((size, 2 * stack, *shape), now[key].dtype)
        first, second = both[:, :stack], both[:, stack:]
        now[key], then[key] = (first[:, 0], second[:, 0]) if now[key].ndim == 4 else (first, second)
    return replace(batch, observation=trees.unflatten(now), next_observation=trees.unflatten(then)), frames


def pack(observation: AnyTree, next_observation: AnyTree, frames: dict[str, Array]) -> tuple[AnyTree, AnyTree]:
    """The first observation with the frames of both, each once, and the second without images."""
    packed, rest = trees.flatten(observation), trees.flatten(next_observation)
    for key, both in frames.items():
        before, after = packed[key], rest.pop(key)
        stack = both.shape[1] // 2
        if stack == 1:
            packed[key] = both
            continue
        if not np.array_equal(before[:, 1:], after[:, :-1]):
            raise StoreError(
                f"observations/{key}: a stack does not share its frames with the next one, so they cannot be packed; "
                f"sample with pack_obs_and_next_obs=False"
            )
        packed[key] = np.concatenate([before, after[:, -1:]], axis=1)
    return trees.unflatten(packed), trees.unflatten(rest)

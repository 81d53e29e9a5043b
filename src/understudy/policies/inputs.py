"""Inputs: which fields of an observation a network sees, and how they become tensors.

Importing this module does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from understudy.core import ArraySpec, Resize, Spec, SpecError, Tree
from understudy.core import tree as trees
from understudy.core.cameras import is_frame
from understudy.core.resize import resize_frame
from understudy.core.spec import describe
from understudy.core.suggestion import did_you_mean
from understudy.policies.protocol import PolicyError
from understudy.policies.transfer import to_tensor

if TYPE_CHECKING:
    import torch


class Inputs:
    """The chosen leaves of an observation Spec: cameras (uint8 [H, W, C]) and state (all other numbers, flattened)."""

    def __init__(
        self,
        observation: Spec,
        chosen: tuple[str, ...] | None = None,
        image_size: tuple[int, int] | None = None,
    ):
        """`chosen` are paths in the observation; None takes every leaf. Cameras are resized to `image_size`."""
        found = observation.flat
        for path in chosen or ():
            if path not in found:
                advice = did_you_mean(path, found, f"it has {', '.join(found)}")
                raise PolicyError(f"inputs: the observation has no field {path!r}; {advice}")
        self.leaves = {path: found[path] for path in (found if chosen is None else chosen)}
        if not self.leaves:
            raise PolicyError("inputs: expected at least one field of the observation, got none; name one")
        for path, leaf in self.leaves.items():
            if leaf.ragged:
                raise PolicyError(
                    f"{_named(path)}: expected a fixed shape, got {leaf}; leave it out of the encoder's inputs"
                )
        self.cameras = tuple(path for path, leaf in self.leaves.items() if is_camera(leaf))
        self.states = tuple(path for path in self.leaves if path not in self.cameras)
        self.spec = Spec(trees.unflatten(self.leaves))
        self.resize = None if image_size is None else Resize(image_size)
        self.camera_shapes = {path: self.leaves[path].fixed_shape for path in self.cameras}  # as the network sees them
        if self.resize is not None:
            if not self.cameras:
                raise PolicyError(f"image_size: has no effect, the network sees no camera ({', '.join(self.leaves)})")
            for path, shape in self.camera_shapes.items():
                self.resize.check(_named(path), shape)
                self.camera_shapes[path] = (*self.resize.size, *shape[2:])

    @cached_property
    def batch_resize(self) -> dict[str, Resize] | None:
        """The size of cameras that a sampler is to be asked for; None if they come as they are."""
        if self.resize is None:
            return None
        return {_named(path): self.resize for path in self.cameras if is_frame(self.leaves[path])}

    @cached_property
    def state_columns(self) -> dict[str, slice]:
        """Where each field of the state is when they are joined in their order."""
        sizes = [int(np.prod(self.leaves[path].fixed_shape)) for path in self.states]
        ends = np.cumsum(sizes, dtype=int).tolist()
        return {path: slice(end - size, end) for path, size, end in zip(self.states, sizes, ends, strict=True)}

    @cached_property
    def state_size(self) -> int:
        return max((columns.stop for columns in self.state_columns.values()), default=0)

    def is_single(self, observation: Tree) -> bool:
        """Whether it is one observation and not a batch. Fields that are not inputs are not looked at."""
        path, leaf = next(iter(self.leaves.items()))
        return np.ndim(_leaf(trees.flatten(observation), path)) == len(leaf.shape)

    def tensors(self, observation: Tree, device: torch.device, *, single: bool = False) -> dict[str, torch.Tensor]:
        """The chosen leaves of a batch on the device: cameras uint8 [B, H, W, C], state float32 [B, n].

        The memory of arrays that are writable and of the right dtype is shared, not copied. Cameras that are not of
        the network's size yet are resized, with the same result as in a batch of a sampler that resizes.
        """
        flat = trees.flatten(observation)
        found: dict[str, torch.Tensor] = {}
        num_rows: int | None = None
        for path, leaf in self.leaves.items():
            array = np.asarray(_leaf(flat, path))
            if single:
                array = array[None]
            shape = self.camera_shapes.get(path, leaf.shape)
            if self.resize is not None and path in self.cameras and array.shape[1:] == leaf.shape != shape:
                array = np.stack([resize_frame(frame, self.resize) for frame in array])
            if array.shape[1:] != shape or array.ndim == 0 or num_rows not in (None, len(array)):
                rows = "" if single else "B, "
                wanted = f"[{rows}{', '.join(map(str, leaf.shape))}]"
                raise SpecError(
                    f"{_named(path)}: expected {leaf.dtype} {wanted}, got {describe(flat[path])}; stack it anew"
                )
            num_rows = len(array)
            if path in self.cameras:
                if array.dtype != np.uint8:
                    raise SpecError(f"{_named(path)}: expected {leaf}, got {describe(flat[path])}; convert it to uint8")
            else:
                array = array.reshape(len(array), -1).astype(np.float32, copy=False)
            found[path] = to_tensor(array, device)
        return found


def is_camera(leaf: ArraySpec) -> bool:
    return leaf.dtype == "uint8" and len(leaf.shape) == 3


def _leaf(flat: Mapping[str, Any], path: str) -> Any:
    if path not in flat:
        raise SpecError(f"{_named(path)}: expected this field, got {', '.join(sorted(flat)) or 'none'}; add it")
    return flat[path]


def _named(path: str) -> str:
    return trees.join("observation", path)

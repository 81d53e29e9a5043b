"""Actions: between the tree of arrays that a world takes and the vector from -1 to 1 that a network gives."""

from __future__ import annotations

import numpy as np
import torch

from understudy.core import Spec, SpecError, Tree
from understudy.core import tree as trees
from understudy.core.spec import describe
from understudy.policies.protocol import Array, PolicyError
from understudy.policies.transfer import to_tensor


class Actions:
    """The leaves of an action Spec, one after the other; every one is float and has finite bounds."""

    def __init__(self, spec: Spec):
        self.spec = spec
        lows, highs = [], []
        for path, leaf in spec.leaves("action"):
            if leaf.ragged or not leaf.dtype.startswith("float") or not np.isfinite(leaf.limits).all():
                raise PolicyError(f"{path}: expected float numbers with bounds, got {leaf}; give it low and high")
            low, high = (np.broadcast_to(limit, leaf.fixed_shape).astype(np.float64).ravel() for limit in leaf.limits)
            if not (low < high).all():
                raise PolicyError(f"{path}: expected low less than high, got {leaf.low} and {leaf.high}; widen them")
            lows.append(low)
            highs.append(high)
        self.low, self.high = np.concatenate(lows), np.concatenate(highs)  # [D] float64
        self.size = len(self.low)
        self._centre = ((self.high + self.low) / 2).astype(np.float32)
        self._half = ((self.high - self.low) / 2).astype(np.float32)
        self._plain = bool((self._centre == 0).all() and (self._half == 1).all())

    def from_unit(self, unit: Array) -> Tree:
        """The tree for [..., D] numbers from -1 to 1."""
        values = unit * self._half + self._centre
        flat, at = {}, 0
        for path, leaf in self.spec.leaves():
            size = int(np.prod(leaf.fixed_shape))
            part = values[..., at : at + size].reshape(unit.shape[:-1] + leaf.fixed_shape)
            flat[path] = np.clip(part.astype(leaf.dtype), *leaf.limits)
            at += size
        return trees.unflatten(flat)

    def to_unit(self, action: Tree, device: torch.device) -> torch.Tensor:
        """A batch of actions as [B, D] numbers from -1 to 1."""
        flat = trees.flatten(action)
        parts = []
        for path, leaf in self.spec.leaves():
            array = np.asarray(flat.get(path))
            if array.ndim == 0 or array.shape[1:] != leaf.shape:
                raise SpecError(
                    f"{trees.join('action', path)}: expected [{', '.join(map(str, ('B', *leaf.shape)))}], "
                    f"got {describe(array)}; take it from a batch of this Spec"
                )
            parts.append(array.reshape(len(array), -1).astype(np.float32, copy=False))
        unit = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)
        if not self._plain:
            unit = (unit - self._centre) / self._half
        return to_tensor(unit, device).clamp(-1.0, 1.0)

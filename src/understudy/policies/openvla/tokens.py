"""ActionTokens: between actions and the 256 bins that stand at the end of OpenVLA's vocabulary.

Bin b is token `vocabulary - 1 - b`, where the vocabulary is that of the text model before it was padded by 64. The
bins are the 255 gaps between 256 edges from -1 to 1, and one more for 1 itself, which means the last gap too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from understudy.core import Spec, Tree
from understudy.core import tree as trees
from understudy.core.suggestion import did_you_mean
from understudy.policies.openvla.config import Normalization
from understudy.policies.protocol import Array, PolicyError

# What becomes -1 and what becomes 1, by the names of OpenVLA-OFT.
BOUNDS: dict[Normalization, tuple[str, str]] = {"bounds_q99": ("q01", "q99"), "bounds": ("min", "max")}
_TINY = 1e-8  # so that a number that never changed in the data does not divide by zero


class Range:
    """From numbers in their own units to -1 to 1 and back, by the bounds that a data set's statistics give."""

    def __init__(self, statistics: Mapping[str, Any], where: str, normalization: Normalization | None = None):
        """None takes the percentiles where there are any, and else the lowest and highest number."""
        if normalization is None:
            normalization = "bounds" if "q01" not in statistics and "min" in statistics else "bounds_q99"
        low, high = BOUNDS[normalization]
        try:
            self.low = np.asarray(statistics[low], np.float64)
            self.high = np.asarray(statistics[high], np.float64)
            self.scaled = np.asarray(statistics.get("mask", np.ones(self.low.shape)), bool)
        except (KeyError, TypeError, ValueError) as error:
            there = ", ".join(statistics) or "nothing"
            raise PolicyError(
                f"{where}: expected {low}, {high} and perhaps mask, got {error!r} among {there}; copy the statistics "
                f"again, or choose another normalization"
            ) from None
        if self.low.ndim != 1 or not self.low.shape == self.high.shape == self.scaled.shape or not self.low.size:
            raise PolicyError(
                f"{where}: expected as many {low} as {high} and mask, got {self.low.shape}, {self.high.shape} and "
                f"{self.scaled.shape}; copy the statistics again"
            )

    def __len__(self) -> int:
        return len(self.low)

    def to_unit(self, values: Array) -> Array:
        """[..., D] in their units to -1 to 1, clipped; what is not scaled is only clipped."""
        unit = 2 * (values - self.low) / (self.high - self.low + _TINY) - 1
        clipped: Array = np.clip(np.where(self.scaled, unit, values), -1.0, 1.0)
        return clipped

    def from_unit(self, unit: Array) -> Array:
        """The inverse for what was not clipped."""
        values: Array = 0.5 * (unit + 1) * (self.high - self.low + _TINY) + self.low
        return np.asarray(np.where(self.scaled, values, unit))


class ActionTokens:
    """Bins [..., D] to the action tree of a world, and back."""

    def __init__(
        self,
        spec: Spec,
        statistics: Mapping[str, Any],
        *,
        num_bins: int,
        gripper: bool,
        where: str,
        normalization: Normalization | None = None,
    ):
        """`gripper`: the last number is OpenVLA's, from 0 (closed) to 1 (open), and the world's is -1 (open) or 1."""
        self.range = Range(statistics, where, normalization)
        self.size = len(self.range)  # D
        self.num_bins = num_bins
        self._spec = spec
        self._gripper = gripper
        self._edges = np.linspace(-1.0, 1.0, num_bins)
        self._centres = (self._edges[:-1] + self._edges[1:]) / 2
        size = 0
        for path, leaf in spec.leaves("action"):
            if leaf.ragged or not leaf.dtype.startswith("float"):
                raise PolicyError(f"{path}: expected float numbers, got {leaf}; this policy gives nothing else")
            size += int(np.prod(leaf.fixed_shape))
        if size != self.size:
            raise PolicyError(
                f"action: the world takes {size} numbers, the checkpoint gives {self.size} ({where}); "
                f"choose another unnorm_key or another world"
            )

    def action(self, bins: Array) -> Tree:
        """The action tree [..., ] of bins [..., D], within the world's bounds."""
        return self.of_unit(self._centres[np.minimum(bins, len(self._centres) - 1)])

    def of_unit(self, unit: Array) -> Tree:
        """The action tree [..., ] of numbers [..., D] that are mostly from -1 to 1, within the world's bounds."""
        values = self.range.from_unit(unit)
        if self._gripper:
            values[..., -1] = np.where(values[..., -1] > 0.5, -1.0, 1.0)
        flat, at = {}, 0
        for path, leaf in self._spec.leaves():
            size = int(np.prod(leaf.fixed_shape))
            part = values[..., at : at + size].reshape(values.shape[:-1] + leaf.fixed_shape).astype(leaf.dtype)
            flat[path] = np.clip(part, *leaf.limits)
            at += size
        return trees.unflatten(flat)

    def bins(self, action: Tree) -> Array:
        """The bins [..., D] (int32) nearest to an action tree [..., ], for learning from demonstrations."""
        found = np.digitize(self.unit(action), self._edges) - 1
        return np.asarray(np.clip(found, 0, self.num_bins - 1), np.int32)

    def unit(self, action: Tree) -> Array:
        """The numbers [..., D] from -1 to 1 of an action tree [..., ]."""
        flat = trees.flatten(action)
        parts = []
        for path, leaf in self._spec.leaves():
            array = np.asarray(flat[path], np.float64)
            lead = array.shape[: array.ndim - len(leaf.shape)]
            parts.append(array.reshape(*lead, -1))
        values = np.concatenate(parts, axis=-1)
        if self._gripper:
            values[..., -1] = np.where(values[..., -1] > 0, 0.0, 1.0)
        return self.range.to_unit(values)


def statistics_of(statistics: Mapping[str, Any], unnorm_key: str | None) -> tuple[str, Mapping[str, Any]]:
    """The statistics of a data set by its name; without one, those of the only data set."""
    names = sorted(statistics)
    if unnorm_key is None:
        if len(names) != 1:
            raise PolicyError(f"unnorm_key: expected one of {', '.join(names) or 'nothing at all'}, got none; name one")
        unnorm_key = names[0]
    if unnorm_key not in statistics and f"{unnorm_key}_no_noops" in statistics:  # as the LIBERO data sets are called
        unnorm_key = f"{unnorm_key}_no_noops"
    if unnorm_key not in statistics:
        raise PolicyError(
            f"unnorm_key: the checkpoint has no statistics of {unnorm_key!r}, "
            f"it has {', '.join(names) or 'none at all'}; {did_you_mean(unnorm_key, names, 'choose one of these')}"
        )
    return unnorm_key, statistics[unnorm_key]

"""Stats: mean and standard deviation of an observation's state fields, which normalize a network's inputs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from understudy.core import Tree
from understudy.core import tree as trees
from understudy.policies.inputs import Inputs
from understudy.policies.protocol import Array, PolicyError

CONSTANT_STD = 1e-6  # a number with a smaller standard deviation is not scaled


@dataclass(frozen=True, kw_only=True, eq=False)
class Stats:
    """By path of the state field; each array is flat, float32. Cameras need none: their range is known."""

    mean: Mapping[str, Array]
    std: Mapping[str, Array]

    @staticmethod
    def none(inputs: Inputs) -> Stats:
        """Statistics that change nothing."""
        sizes = {path: int(np.prod(inputs.leaves[path].fixed_shape)) for path in inputs.states}
        return Stats(
            mean={path: np.zeros(size, np.float32) for path, size in sizes.items()},
            std={path: np.ones(size, np.float32) for path, size in sizes.items()},
        )

    @staticmethod
    def of_bounds(inputs: Inputs) -> Stats:
        """From the bounds of the Spec: low becomes -1 and high 1. Every state field needs both."""
        mean, std = {}, {}
        for path in inputs.states:
            leaf = inputs.leaves[path]
            low, high = (np.broadcast_to(limit, leaf.fixed_shape).astype(np.float64).ravel() for limit in leaf.limits)
            if not np.isfinite(high - low).all():
                raise PolicyError(
                    f"{trees.join('observation', path)}: expected bounds, got {leaf} without; use Stats.of_data"
                )
            mean[path], std[path] = _pair((low + high) / 2, (high - low) / 2)
        return Stats(mean=mean, std=std)

    @staticmethod
    def of_data(inputs: Inputs, observations: Iterable[Tree]) -> Stats:
        """From batches of observations, such as those of demonstrations; each is read once."""
        count = 0
        totals = {path: np.zeros(0) for path in inputs.states}
        squares = dict(totals)  # of the distances from the mean, merged batch by batch
        for observation in observations:
            flat = trees.flatten(observation)
            size = 0
            for path in inputs.states:
                values = np.asarray(flat[path], np.float64)
                values = values.reshape(len(values), -1)
                size = len(values)
                own = ((values - values.mean(axis=0)) ** 2).sum(axis=0)
                if count:
                    difference = values.mean(axis=0) - totals[path] / count
                    squares[path] = squares[path] + own + difference**2 * (count * size / (count + size))
                    totals[path] = totals[path] + values.sum(axis=0)
                else:
                    squares[path], totals[path] = own, values.sum(axis=0)
            count += size
        if inputs.states and not count:
            raise PolicyError("stats: expected at least one observation, got none; record demonstrations first")
        pairs = {path: _pair(totals[path] / count, np.sqrt(squares[path] / count)) for path in inputs.states}
        return Stats(mean={path: p[0] for path, p in pairs.items()}, std={path: p[1] for path, p in pairs.items()})

    def flat(self) -> dict[str, Array]:
        """Its arrays under the paths `stats/mean/observation/...` and `stats/std/observation/...`."""
        return {
            trees.join(f"stats/{kind}/observation", path): array
            for kind, arrays in (("mean", self.mean), ("std", self.std))
            for path, array in arrays.items()
        }

    @staticmethod
    def of_flat(flat: Mapping[str, Any]) -> Stats:
        """The statistics among arrays under such paths."""
        kinds: dict[str, dict[str, Array]] = {"mean": {}, "std": {}}
        for name, array in flat.items():
            kind, _, path = name.removeprefix("stats/").partition("/")
            if name.startswith("stats/") and kind in kinds:
                kinds[kind][path.removeprefix("observation").removeprefix("/")] = np.array(array, np.float32)
        return Stats(mean=kinds["mean"], std=kinds["std"])

    def check(self, inputs: Inputs) -> None:
        """Refuse statistics that are not of these inputs."""
        wanted = Stats.none(inputs)
        for name in ("mean", "std"):
            found = getattr(self, name)
            for path, like in getattr(wanted, name).items():
                if path not in found or np.shape(found[path]) != like.shape:
                    got = "nothing" if path not in found else f"shape {list(np.shape(found[path]))}"
                    raise PolicyError(
                        f"{trees.join('observation', path)}: expected {len(like)} numbers of {name}, got {got}; "
                        f"make the statistics from the same observations"
                    )


def _pair(mean: Array, std: Array) -> tuple[Array, Array]:
    return mean.astype(np.float32), np.where(std < CONSTANT_STD, 1.0, std).astype(np.float32)

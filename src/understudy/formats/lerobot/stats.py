"""Statistics of each feature, per episode and over all episodes, as LeRobot's policies need them.

Camera statistics are per channel, from 0 to 1, over up to a hundred frames per episode; large frames are subsampled. As
in LeRobot, quantiles over all episodes are means of the episodes' quantiles.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Stats = Mapping[str, Array]

QUANTILES = {"q01": 0.01, "q10": 0.10, "q50": 0.50, "q90": 0.90, "q99": 0.99}
_MOST_FRAMES = 100
_MOST_SIDE = 300  # pixels; larger frames are subsampled to about half of this


def of_numbers(column: Array) -> dict[str, Array]:
    """Statistics of a column [T, *shape]; each has the feature's shape."""
    return _stats(np.asarray(column, np.float64), len(column))


def of_camera(frames: Array) -> dict[str, Array]:
    """Statistics of frames [T, height, width, 3]; each has the shape [3, 1, 1]."""
    chosen = np.unique(np.linspace(0, len(frames) - 1, min(len(frames), _MOST_FRAMES)).round().astype(int))
    side = max(frames.shape[1:3])
    stride = 1 if side < _MOST_SIDE else side // (_MOST_SIDE // 2)
    pixels = frames[chosen, ::stride, ::stride].reshape(-1, 3) / 255.0
    found = _stats(pixels, len(chosen))
    return {name: value if name == "count" else value.reshape(3, 1, 1) for name, value in found.items()}


def _stats(values: Array, count: int) -> dict[str, Array]:
    with np.errstate(all="ignore"):  # NaN and infinity propagate
        return {
            "min": values.min(0),
            "max": values.max(0),
            "mean": values.mean(0),
            "std": values.std(0),
            "count": np.array([count]),
            **dict(zip(QUANTILES, np.quantile(values, list(QUANTILES.values()), axis=0), strict=True)),
        }


class MergedStats:
    """Statistics over episodes, added one by one."""

    def __init__(self) -> None:
        self._sums: dict[str, dict[str, Array]] = {}

    def add(self, episode: Mapping[str, Stats]) -> None:
        with np.errstate(all="ignore"):
            for key, stats in episode.items():
                count = int(stats["count"][0])
                weighted = {name: stats[name] * count for name in ("mean", *QUANTILES)}
                weighted["square"] = (stats["std"] ** 2 + stats["mean"] ** 2) * count
                weighted["count"] = stats["count"]
                before = self._sums.get(key)
                now = {name: value if before is None else before[name] + value for name, value in weighted.items()}
                for name, choose in (("min", np.minimum), ("max", np.maximum)):
                    now[name] = stats[name] if before is None else choose(before[name], stats[name])
                self._sums[key] = now

    def result(self) -> dict[str, dict[str, Array]]:
        return {key: _joined(sums) for key, sums in self._sums.items()}


def _joined(sums: Stats) -> dict[str, Array]:
    count = sums["count"][0]
    with np.errstate(all="ignore"):
        means = {name: sums[name] / count for name in ("mean", *QUANTILES)}
        spread = np.sqrt(np.maximum(sums["square"] / count - means["mean"] ** 2, 0.0))
    return {"min": sums["min"], "max": sums["max"], **means, "std": spread, "count": sums["count"]}


def as_lists(stats: Mapping[str, Stats]) -> dict[str, dict[str, Any]]:
    """Plain values for JSON; a single number is a list of one."""
    return {key: {name: np.atleast_1d(value).tolist() for name, value in of.items()} for key, of in stats.items()}

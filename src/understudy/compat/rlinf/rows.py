"""A trajectory [T, B, ...] as rows of a store, whole columns at a time, and back.

The steps of one environment follow each other, and the environments follow each other. They are cut into episodes at
terminations and truncations, and where a `next_obs` is not the `curr_obs` that follows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from understudy.compat.rlinf.trajectory import EDGES, Layout, ParsedTrajectory, edge_steps
from understudy.core import NO_VERSION, EpisodeInfo, Source
from understudy.core import tree as trees
from understudy.replay.write.writer import FinishedEpisode

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Rows of whole episodes, as the columns of a spec."""

    columns: dict[str, Array]
    episodes: tuple[FinishedEpisode, ...]
    size_bytes: int


def rows_of(
    trajectory: ParsedTrajectory, info: EpisodeInfo, last_labels: Mapping[str, str], max_bytes: int
) -> Iterator[Rows]:
    """The trajectory's episodes in groups of at most `max_bytes`, or of one. `last_labels` are for the last episode."""
    length, spec = trajectory.length, trajectory.layout.spec
    terminated, truncated = _ends(trajectory)
    ends = (terminated | truncated).T.reshape(-1)  # environment by environment
    last = ends | ~_followed(trajectory)
    stops = np.flatnonzero(last) + 1
    starts = np.concatenate([[0], stops[:-1]])
    row_bytes = sum(leaf.row_bytes for leaf in spec.columns.values())
    first = 0
    while first < len(stops):
        fits = (stops - starts[first] + np.arange(len(stops)) - first + 1) * row_bytes <= max_bytes
        end = max(int(fits[first:].sum()), 1) + first
        episodes = []
        for n in range(first, end):
            labels = {**info.labels, **(last_labels if n == len(stops) - 1 else {})}
            episodes.append(
                FinishedEpisode(
                    num_rows=int(stops[n] - starts[n]) + 1,
                    state="ended" if ends[stops[n] - 1] else "cut",
                    info=EpisodeInfo(actor=info.actor, group=info.group, labels=labels),
                )
            )
        step = np.arange(starts[first], stops[end - 1])
        repeat = 1 + last[step]  # the row after a last step holds the last observation
        is_step = np.ones(repeat.sum(), bool)
        is_step[np.cumsum(repeat)[last[step]] - 1] = False
        step = np.repeat(step, repeat)
        columns = _columns(trajectory, step % length, step // length, is_step, terminated, truncated)
        yield Rows(
            columns={path: columns[path] for path in spec.columns},
            episodes=tuple(episodes),
            size_bytes=len(step) * row_bytes,
        )
        first = end


def _columns(
    trajectory: ParsedTrajectory, time: Array, column: Array, is_step: Array, terminated: Array, truncated: Array
) -> dict[str, Array]:
    layout = trajectory.layout
    spec = layout.spec
    after = ~is_step
    found: dict[str, Array] = {}

    def take(array: Array) -> Array:
        rows: Array = array[time, column]
        rows[after] = 0
        return rows

    for path, leaf in spec.columns.items():
        kind, _, name = path.partition(trees.SEPARATOR)
        if kind == "observation" and layout.paired:
            rows = trajectory.arrays[trees.join("curr_obs", name)][time, column]
            rows[after] = trajectory.arrays[trees.join("next_obs", name)][time[after], column[after]]
            found[path] = rows
        elif kind == "observation":
            found[path] = (time + after).astype(np.int32)
        elif kind == "action" and "actions" in trajectory.arrays:
            found[path] = take(trajectory.arrays["actions"])
        elif kind == "reward" and "rewards" in trajectory.arrays:
            found[path] = take(trajectory.arrays["rewards"])
        elif kind == "extras" and name.startswith(f"{EDGES}/"):
            found[path] = take(_beside_steps(trajectory, name.removeprefix(f"{EDGES}/")))
        elif kind == "extras":
            found[path] = take(trajectory.arrays[name])
        else:
            found[path] = np.zeros((len(time), *leaf.fixed_shape), leaf.dtype)
    found["terminated"], found["truncated"] = take(terminated), take(truncated)
    found["source"] = take(_sources(trajectory))
    found["policy_version"] = take(_versions(trajectory))
    found["policy_version"][after] = NO_VERSION
    found["is_step"] = is_step
    return found


def _beside_steps(trajectory: ParsedTrajectory, path: str) -> Array:
    """The rows between epochs [T, B, ...], at the steps that they are next to."""
    edge = trajectory.edges[path]
    rows = np.zeros_like(trajectory.arrays[path])
    rows[edge_steps(len(edge), trajectory.length, path)] = edge
    return rows


def _followed(trajectory: ParsedTrajectory) -> Array:
    """Whether the step after each of [B * T] belongs to the same environment and begins with its `next_obs`."""
    followed = np.ones((trajectory.length, trajectory.batch), bool)
    followed[-1] = False
    if trajectory.layout.paired:
        for path, now in trees.below(trajectory.arrays, "curr_obs").items():
            then = trajectory.arrays[trees.join("next_obs", path)]
            followed[:-1] &= _same_bits(then[:-1], now[1:])
    return followed.T.reshape(-1)


def _same_bits(a: Array, b: Array) -> Array:
    """Whether two arrays [T, B, ...] have the same bytes at each of [T, B]."""
    bits, size = np.dtype(f"u{a.dtype.itemsize}"), math.prod(a.shape[2:])
    a, b = (np.ascontiguousarray(x).view(bits).reshape(*x.shape[:2], size) for x in (a, b))
    same: Array = (a == b).all(axis=-1)
    return same


def _ends(trajectory: ParsedTrajectory) -> tuple[Array, Array]:
    """`terminated` and `truncated` [T, B]; a step of several actions ends if one of its actions does."""
    found = [_any(trajectory, name) for name in ("terminations", "truncations", "dones")]
    terminated, truncated, ended = found
    only_done = ended & ~terminated & ~truncated
    if "terminations" in trajectory.arrays:
        return terminated, truncated | only_done
    return terminated | only_done, truncated


def _any(trajectory: ParsedTrajectory, name: str) -> Array:
    shape = (trajectory.length, trajectory.batch)
    array = trajectory.arrays.get(name)
    if array is None:
        return np.zeros(shape, bool)
    found: Array = (array != 0).reshape(*shape, -1).any(axis=-1)
    return found


def _sources(trajectory: ParsedTrajectory) -> Array:
    human = _any(trajectory, "intervene_flags")
    return np.where(human, np.uint8(Source.HUMAN), np.uint8(Source.POLICY))


def _versions(trajectory: ParsedTrajectory) -> Array:
    """The policy's version of each step, if the field holds one whole number there."""
    shape = (trajectory.length, trajectory.batch)
    given = trajectory.arrays.get("versions")
    if given is None or not given.size:
        return np.full(shape, NO_VERSION, np.int64)
    values = given.reshape(*shape, -1)
    one = values[..., 0].astype(np.float64)
    good = (values == values[..., :1]).all(axis=-1) & np.isfinite(one) & (one == np.floor(one)) & (abs(one) < 2**53)
    return np.where(good, np.where(good, one, 0).astype(np.int64), np.int64(NO_VERSION))


# ---- back


def arrays_of(
    layout: Layout, shape: tuple[int, ...], episodes: list[dict[str, Array]]
) -> tuple[dict[str, Array], dict[str, Array]]:
    """The arrays [T, B, ...] and the rows between epochs, from the rows of its episodes in their order."""
    length, batch = shape[:2]

    def joined(path: str, part: slice) -> Array:
        flat = np.concatenate([rows[path][part] for rows in episodes])
        return np.ascontiguousarray(flat.reshape(batch, length, *flat.shape[1:]).swapaxes(0, 1))

    steps, after = slice(None, -1), slice(1, None)
    arrays: dict[str, Array] = {}
    edges: dict[str, Array] = {}
    for field in layout.fields:
        kind, _, name = field.path.partition(trees.SEPARATOR)
        if layout.paired and kind == "curr_obs":
            arrays[field.path] = joined(trees.join("observation", name), steps)
        elif layout.paired and kind == "next_obs":
            arrays[field.path] = joined(trees.join("observation", name), after)
        elif field.path in ("actions", "rewards"):
            arrays[field.path] = joined("action" if kind == "actions" else "reward", steps)
        else:
            arrays[field.path] = joined(f"extras/{field.path}", steps)
        if field.num_edges:
            beside = joined(f"extras/{EDGES}/{field.path}", steps)
            edges[field.path] = beside[edge_steps(field.num_edges, length, field.path)]
    return arrays, edges

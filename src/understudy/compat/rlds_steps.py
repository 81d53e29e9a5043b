"""Reads RLDS data in any of its forms as flat columns of steps with one spec."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from understudy.compat.arrays import tree_to_numpy
from understudy.core import ArraySpec, EpisodeError, Spec, SpecError
from understudy.core import tree as trees
from understudy.core.spec import describe
from understudy.core.tree import AnyTree
from understudy.formats.rlds import RldsEpisodes

STEP_FEATURES = ("observation", "action", "reward", "discount", "is_first", "is_last", "is_terminal")
_FLAGS = ("is_first", "is_last", "is_terminal")


def open_episodes(rlds_data: Iterable[Mapping[str, Any]]) -> tuple[Spec, Iterator[dict[str, Any]]]:
    """The spec of a step and the episodes, each as flat columns [N, ...] that fit the spec."""
    if isinstance(rlds_data, RldsEpisodes):
        spec = Spec(rlds_data.step_spec)
        found: Iterator[Mapping[str, Any]] = iter(rlds_data)
    else:
        found = iter(rlds_data)
        first = next(found, None)
        if first is None:
            raise EpisodeError("rlds_data: expected episodes, got none; check where they come from")
        columns = _columns(first, "episode 0")  # the steps may be readable only once
        found = itertools.chain([{"steps": columns}], found)
        spec = Spec(trees.map_leaves(_leaf_of_column, columns))
    _check_features(spec)
    return spec, (_checked(spec, episode, f"episode {number}") for number, episode in enumerate(found))


def _check_features(spec: Spec) -> None:
    there = {path.partition(trees.SEPARATOR)[0] for path in spec.flat}
    missing = [name for name in STEP_FEATURES if name not in there]
    if missing:
        raise SpecError(
            f"steps/{missing[0]}: expected steps with {', '.join(STEP_FEATURES)}, got {', '.join(sorted(there))}; "
            f"add what is missing"
        )
    for name in _FLAGS:
        if spec.flat.get(name) != ArraySpec(shape=(), dtype="bool"):
            raise SpecError(f"steps/{name}: expected bool [], got {spec.flat.get(name, 'a dict')}; convert it")


def _columns(episode: Mapping[str, Any], where: str) -> AnyTree:
    """The steps of an episode as a tree of columns."""
    if "steps" not in episode:
        raise SpecError(
            f"{where}: expected a dict with the steps of an RLDS episode, got {describe(episode)}; add 'steps'"
        )
    steps = episode["steps"]
    if not isinstance(steps, Mapping):
        rows = [tree_to_numpy(step, "steps") for step in getattr(steps, "as_numpy_iterator", steps.__iter__)()]
        if not rows or not all(isinstance(row, Mapping) for row in rows):
            raise SpecError(f"{where}/steps: expected at least one step, each a dict, got {describe(steps)}")
        flat = [trees.flatten(row) for row in rows]
        if any(row.keys() != flat[0].keys() for row in flat):
            raise SpecError(f"{where}/steps: expected the same fields in each step; give them all to each")
        return trees.unflatten({path: _stacked([row[path] for row in flat]) for path in flat[0]})
    return tree_to_numpy(steps, "steps")


def _stacked(values: list[Any]) -> Any:
    arrays = [np.asarray(value) for value in values]
    if arrays[0].dtype.kind in "OSU":  # text
        return [value.decode() if isinstance(value, bytes) else str(value) for value in values]
    same = all(a.shape == arrays[0].shape and a.dtype == arrays[0].dtype for a in arrays)
    return np.stack(arrays) if same else arrays


def _leaf_of_column(column: Any) -> ArraySpec:
    if isinstance(column, list):
        if isinstance(column[0], str):
            return ArraySpec(shape=(), dtype="str")
        return ArraySpec(shape=(None, *np.shape(column[0])[1:]), dtype=str(column[0].dtype))
    return ArraySpec(shape=column.shape[1:], dtype=str(column.dtype))


def _checked(spec: Spec, episode: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Flat columns of equal length, with values that fit the spec."""
    flat = trees.flatten(_columns(episode, where))
    if flat.keys() != spec.flat.keys():
        odd = sorted(flat.keys() ^ spec.flat.keys())[0]
        raise SpecError(f"{where}/steps/{odd}: expected the fields of the first episode; add it, or leave it out")
    rows = len(flat["is_first"])
    for path, leaf in spec.flat.items():
        column = flat[path]
        if len(column) != rows or not rows:
            raise SpecError(f"{where}/steps/{path}: expected {rows or 'some'} rows, got {len(column)}")
        for value in column if leaf.ragged else column[:1]:
            wrong_shape = not leaf.ragged and np.shape(value) != leaf.shape
            if wrong_shape or getattr(value, "dtype", "str") != leaf.dtype:
                raise SpecError(f"{where}/steps/{path}: expected {leaf} as in the first episode, got {describe(value)}")
    return flat

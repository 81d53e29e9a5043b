"""RldsReader: reads RLDS rows as Episodes.

RLDS has N rows for N-1 steps: the last row is the last observation, and its action, reward and discount have no
meaning. It is terminal if the task terminated there, and only last if the episode was truncated:

    row 0 .. N-2   observation, action, reward        steps 0 .. T-1, with T = N-1
    row N-1        observation                        the last observation
    is_terminal of row N-1                            terminated of step T-1
    is_last of row N-1, not is_terminal               truncated of step T-1
    neither                                           an episode without an end

Some datasets have N rows for N steps. With `last=step` every row is a step, and the last observation is repeated.
"""

from __future__ import annotations

import json
from collections.abc import Container, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np

from understudy.core import NO_VERSION, ArraySpec, Episode, EpisodeError, EpisodeInfo, Source, UnderstudyError
from understudy.core import tree as trees
from understudy.core.episode import Column, Split
from understudy.formats.format import FormatError
from understudy.formats.rlds.example import Malformed
from understudy.formats.rlds.plan import (
    ACTOR,
    HUMAN,
    INSTRUCTION,
    METADATA,
    SUCCESS,
    UNDERSTUDY,
    UNDERSTUDY_COLUMNS,
    make_plan,
    mapping,
)
from understudy.formats.rlds.rows import RldsEpisodes, Rows

_STEP_COLUMNS = ("reward", "terminated", "truncated", "source", "policy_version", "has_proposal")

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """How to interpret what RLDS does not say."""

    split: str | None = None
    last: str = "observation"  # what the last row is: an observation, as in RLDS, or a step
    source: Source = Source.POLICY  # where no field says it
    workers: int = 1


class RldsReader:
    """Reads the files again for each call of `episodes`."""

    def __init__(self, rows: RldsEpisodes, options: ReadOptions):
        self._rows = rows
        self._options = options
        self._plan = make_plan(rows.reader)
        self.spec = self._plan.spec
        self.name = rows.reader.dataset.name
        self.num_episodes: int | None = rows.reader.dataset.num_records
        self.mapping = tuple(mapping(self._plan, rows.reader, options.source, self._last_reward()))

    def _last_reward(self) -> float:
        """The scalar reward in the last row of the first episode, if that row will be left out."""
        if (
            self._plan.from_understudy
            or self._options.last == "step"
            or self.spec.reward.shape
            or "reward" not in self._plan.fields
        ):
            return 0.0
        with closing(self._rows.reader.dataset.records()) as records:
            for record in records:
                rewards = self._rows.reader.read_one(record, "reward")
                return float(rewards[-1]) if len(rewards) else 0.0
        return 0.0

    def close(self) -> None:
        """Nothing is held open between episodes."""

    def episodes(self, skip: Container[str] = ()) -> Iterator[tuple[str, Episode]]:
        """Yield key and episode. A record with one row has no step and is left out."""
        for rows in self._rows.rows(skip):
            if rows.num_rows >= (1 if self._options.last == "step" else 2):
                try:
                    episode = self._episode(rows)
                except Malformed as error:
                    raise rows.record.malformed(error) from None
                except UnderstudyError as error:
                    raise FormatError(f"{rows.record.where}: {error}") from None
                yield rows.record.key, episode

    # ---- an episode

    def _episode(self, rows: Rows) -> Episode:
        num_steps = rows.num_rows if self._options.last == "step" else rows.num_rows - 1
        steps = rows.steps
        terminal, last = _ends(steps, rows.num_rows)
        at_end = np.arange(num_steps) == num_steps - 1
        columns: dict[str, Column] = {
            "reward": np.zeros(num_steps, np.float32),
            "terminated": at_end & terminal,
            "truncated": at_end & (last and not terminal),
        }
        for internal, external in self._plan.fields.items():
            if internal.partition("/")[0] != "observation":
                columns[internal] = steps[external][:num_steps]
            else:
                columns[internal] = steps[external] if num_steps < rows.num_rows else _with_last_twice(steps[external])
        columns |= self._sources_and_proposals(steps, num_steps, columns)
        self._check(columns)
        return _assembled(columns, self._info(rows))

    def _sources_and_proposals(
        self, steps: Mapping[str, Column], num_steps: int, columns: Mapping[str, Column]
    ) -> dict[str, Column]:
        """Source, policy version and proposal of each step; also truncated, if Understudy wrote the dataset."""
        if self._plan.from_understudy:
            stored = {name: np.array(steps[f"{UNDERSTUDY}/{name}"][:num_steps]) for name in UNDERSTUDY_COLUMNS}
            if (stored["source"] > max(Source)).any():
                raise Malformed(f"steps/{UNDERSTUDY}/source: {stored['source'].max()} is no source")
            if stored["truncated"][:-1].any():
                raise Malformed(f"steps/{UNDERSTUDY}/truncated: is set before the last row")
            proposal = {
                path: _blanked(columns[path], stored["has_proposal"], leaf)
                for path, leaf in self.spec.action.leaves("proposal")
            }
            return {**proposal, **stored}
        source = np.full(num_steps, self._options.source, np.uint8)
        for name in HUMAN:
            if name in steps:
                source = np.where(steps[name][:num_steps], Source.HUMAN, source).astype(np.uint8)
        nothing = {path: _repeated(leaf, num_steps) for path, leaf in self.spec.action.leaves("proposal")}
        return {
            **nothing,
            "source": source,
            "policy_version": np.full(num_steps, NO_VERSION, np.int64),
            "has_proposal": np.zeros(num_steps, bool),
        }

    def _check(self, columns: Mapping[str, Column]) -> None:
        if not np.isfinite(columns["reward"]).all():
            raise Malformed("steps/reward: is not finite")
        for path, leaf in self.spec.columns.items():
            if leaf.bounded and path in columns:
                values = columns[path]
                if path.partition("/")[0] == "proposal":  # zero without a proposal, also outside the bounds
                    values = [value for value, there in zip(values, columns["has_proposal"], strict=True) if there]
                for value in values:
                    leaf.check(value, path)

    def _info(self, rows: Rows) -> EpisodeInfo:
        metadata = rows.metadata
        if self._plan.from_understudy:
            try:
                return EpisodeInfo(**json.loads(metadata[METADATA]))
            except (ValueError, TypeError, RecursionError, EpisodeError) as error:
                raise Malformed(f"{METADATA}: {error}") from None
        instruction = next((rows.steps[name][0] for name in INSTRUCTION if name in rows.steps), None)
        success = next((bool(metadata[name]) for name in SUCCESS if name in metadata), None)
        actor = next((str(metadata[name]) for name in ACTOR if name in metadata), None)
        taken = {*SUCCESS, *ACTOR}
        labels = {path: str(value) for path, value in metadata.items() if path not in taken}
        return EpisodeInfo(
            instruction=instruction or None,
            success=success,
            actor=actor or None,
            labels=labels,
            split=_split(rows.record.split),
        )


# ---- helpers


def _ends(steps: Mapping[str, Column], num_rows: int) -> tuple[bool, bool]:
    """is_terminal and is_last of the last row; flags in the middle are refused."""
    for name in ("is_last", "is_terminal"):
        if name in steps and steps[name][:-1].any():
            raise Malformed(
                f"steps/{name}: row {int(np.argmax(steps[name]))} of {num_rows} is set, and more rows follow"
            )
    if "is_first" in steps and steps["is_first"][1:].any():
        raise Malformed(
            f"steps/is_first: row {int(np.argmax(steps['is_first'][1:])) + 1} is set, so these are two episodes"
        )
    terminal = bool(steps["is_terminal"][-1]) if "is_terminal" in steps else False
    last = bool(steps["is_last"][-1]) if "is_last" in steps else True
    return terminal, last


def _with_last_twice(column: Column) -> Column:
    return [*column, column[-1]] if isinstance(column, list) else np.concatenate([column, column[-1:]])


def _blanked(column: Column, keep: Array, leaf: ArraySpec) -> Column:
    """Zero where there is no proposal."""
    if leaf.ragged:
        return [value if kept else leaf.zero() for value, kept in zip(column, keep, strict=True)]
    return np.where(keep.reshape(-1, *[1] * len(leaf.shape)), column, np.zeros((), leaf.dtype))


def _repeated(leaf: ArraySpec, rows: int) -> Column:
    """Zeros in every row."""
    return [leaf.zero()] * rows if leaf.ragged else np.zeros((rows, *leaf.fixed_shape), leaf.dtype)


def _assembled(columns: Mapping[str, Column], info: EpisodeInfo) -> Episode:
    def part(name: str) -> Any:
        found = trees.below(columns, name)
        return trees.unflatten(found) if found else {}

    return Episode(
        **{name: part(name) for name in ("observation", "action", "proposal", "extras")},
        **{name: columns[name] for name in _STEP_COLUMNS},
        info=info,
    )


def _split(name: str) -> Split:
    return "train" if name.partition("_")[0] == "train" else "eval"

"""RobomimicReader: reads files of robomimic and LIBERO as Episodes.

An episode needs T steps and T+1 observations. The files have one of three layouts:

    obs and next_obs      robomimic: the last observation is the last of next_obs
    obs, recorded before  robomimic without next_obs: the observation after the last action is missing. If the task
    the action            terminated there, no value is learned from it, and the last observation is repeated; otherwise
                          the last action is left out
    obs, recorded after   LIBERO: its script records after each step, so action t+1 belongs to observation t, and the
    the action            observation of the first action is missing. The first action is left out
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from understudy.core import NO_VERSION, Episode, EpisodeInfo, Kind, Source, Spec, StepSpec, UnderstudyError
from understudy.core import tree as trees
from understudy.core.episode import Column
from understudy.formats.format import Field, FormatError
from understudy.formats.hdf5 import Group, Hdf5Reader
from understudy.formats.hdf5.columns import checked
from understudy.formats.robomimic.exact_episode import exact_episode
from understudy.formats.robomimic.layout import EXTRAS_OUT, File, leaf_of, open_files, row_datasets
from understudy.formats.robomimic.writer import BARE, MASKS, UNDERSTUDY


@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """How to interpret what the files do not say."""

    mask: str | None = None  # only the demos of this filter key
    align: str | None = None  # obs recorded before or after the action of its row; None: after in LIBERO's files
    last: str | None = None  # repeat or drop, if the last observation is missing; None: see above
    end: str = "last"  # or first: the episode ends at the first row with `dones`
    extras: str = "all"  # or none
    kind: Kind = "demonstration"
    source: Source = Source.HUMAN


class RobomimicReader:
    """Opens one file at a time."""

    def __init__(self, path: Path, options: ReadOptions):
        self._options = options
        self._files, self._one = open_files(path, options.mask), path.is_file()
        try:
            self._inspect()
        except BaseException:
            self.close()
            raise

    def _inspect(self) -> None:
        """Find the spec and mapping from the first demonstration of each file."""
        self._from_understudy = all(file.spec is not None for file in self._files)
        firsts = [(file, self._first(file)) for file in self._files]
        specs = (
            [file.spec for file in self._files] if self._from_understudy else [self._spec(*first) for first in firsts]
        )
        self.spec = self._common([spec for spec in specs if spec is not None])
        self.num_episodes: int | None = sum(len(file.demos) for file in self._files)
        if not self._from_understudy and any(self._left_out(file, group) for file, group in firsts):
            self.num_episodes = None
        self.mapping = tuple(self._mapping(*firsts[0]))

    def close(self) -> None:
        for file in self._files:
            file.reader.close()

    def _first(self, file: File) -> Group:
        try:
            return file.reader.tree(f"data/{file.demos[0]}")
        finally:
            if not self._one:
                file.reader.close()

    def _left_out(self, file: File, first: Group) -> bool:
        """Whether a demonstration with one row may have no step."""
        return not any(name.startswith("next_obs/") for name in first.datasets)

    # ---- the spec

    def _spec(self, file: File, first: Group) -> StepSpec:
        where = f"{file.path}: {first.path}"
        seen = {name[4:]: data for name, data in first.datasets.items() if name.startswith("obs/")}
        observation: dict[str, Any] = {name: leaf_of(data) for name, data in seen.items()}
        unread = [name for name, leaf in observation.items() if leaf is None]
        if unread or not observation or "actions" not in first.datasets:
            missing = f"obs/{unread[0]} can be read" if unread else "obs and actions are there"
            raise FormatError(
                f"{where}: expected that {missing}; observations are made by robomimic's dataset_states_to_obs.py"
            )
        extras = {}
        if self._options.extras == "all":
            extras = {name: leaf for name, data in row_datasets(first).items() if (leaf := leaf_of(data)) is not None}
        action: Any = leaf_of(first.datasets["actions"])
        try:
            bare = observation.keys() == {BARE}
            return StepSpec(
                observation=Spec(observation[BARE] if bare else trees.unflatten(observation)),
                action=Spec(action),
                extras=Spec(trees.unflatten(extras)),
            )
        except UnderstudyError as error:
            raise FormatError(f"{where}: {error}") from None

    def _common(self, specs: list[StepSpec]) -> StepSpec:
        """One spec for all files; extras that differ, such as the states of different scenes, are left out."""
        first = specs[0]
        for file, spec in zip(self._files, specs, strict=True):
            if (spec.observation, spec.action, spec.reward) != (first.observation, first.action, first.reward):
                raise FormatError(
                    f"{file.path}: its observations or actions are not those of {self._files[0].path}; "
                    f"read each file separately"
                )
        same = {
            path: leaf
            for path, leaf in first.extras.leaves()
            if all(spec.extras.flat.get(path) == leaf for spec in specs)
        }
        if len(same) < max(len(spec.extras.flat) for spec in specs) and self._from_understudy:
            raise FormatError(f"{self._files[0].path}: the other files have other extras; read each separately")
        return StepSpec(
            observation=first.observation, action=first.action, extras=Spec(trees.unflatten(same)), reward=first.reward
        )

    # ---- episodes

    def episodes(self, skip: Container[str] = ()) -> Iterator[tuple[str, Episode]]:
        for file in self._files:
            with file.reader as reader:
                for demo in file.demos:
                    yield from self._demo(file, reader, demo, skip)

    def _demo(self, file: File, reader: Hdf5Reader, demo: str, skip: Container[str]) -> Iterator[tuple[str, Episode]]:
        key = demo if self._one else f"{file.path.name}/{demo}"
        if not self._from_understudy and key in skip:
            return
        try:
            group = reader.tree(f"data/{demo}")
            if self._from_understudy:
                found: tuple[str, Episode] | None = exact_episode(self.spec, reader, group, skip)
            else:
                episode = self._episode(file, reader, group, demo)
                found = None if episode is None else (key, episode)
        except FormatError as error:
            raise (
                error if str(error).startswith(str(file.path)) else FormatError(f"{file.path}: {demo}: {error}")
            ) from None
        except UnderstudyError as error:
            raise FormatError(f"{file.path}: {demo}: {error}") from None
        if found is not None:
            yield found

    def _episode(self, file: File, reader: Hdf5Reader, group: Group, demo: str) -> Episode | None:
        columns, num_rows = self._columns(reader, group)
        rewards = columns.pop("reward")
        dones = columns.pop("dones")
        first_row, num_steps = 0, num_rows
        observations = {path: column for path, column in columns.items() if path.partition("/")[0] == "observation"}
        if any(name.startswith("next_obs/") for name in group.datasets):
            observations = self._with_next(reader, group, observations, num_rows)
        elif (self._options.align or ("after" if file.is_libero else "before")) == "after":
            first_row = 1
        elif self._options.last == "drop" or (self._options.last is None and not dones[-1]):
            num_steps -= 1
        else:
            observations = {path: _with_last_twice(column) for path, column in observations.items()}
        ends = np.flatnonzero(dones[first_row:num_steps]) + first_row
        if self._options.end == "first" and len(ends):
            num_steps = int(ends[0]) + 1
            observations = {path: column[: num_steps + 1 - first_row] for path, column in observations.items()}
        if num_steps <= first_row:
            return None
        rows = slice(first_row, num_steps)
        terminated = np.zeros(num_steps - first_row, bool)
        terminated[-1] = bool(dones[num_steps - 1])
        success = bool((rewards[rows] == 1).any()) if np.isin(rewards, (0, 1)).all() else None
        labels = {"dones": str(len(ends))} if self._options.end == "last" and len(ends) > 1 else {}
        instruction = group.attrs.get("lang")
        info = EpisodeInfo(
            task=file.task,
            instruction=instruction if isinstance(instruction, str) else file.instruction,
            success=success,
            split="eval" if demo in file.masks.get(MASKS["eval"], ()) else "train",
            kind=self._options.kind,
            labels=labels,
        )
        return self._assembled(columns, observations, rows, rewards[rows], terminated, info)

    def _columns(self, reader: Hdf5Reader, group: Group) -> tuple[dict[str, Column], int]:
        """The rows of every field, with `reward` and `dones`."""
        actions = group.datasets.get("actions")
        if actions is None or not actions.shape or not 0 < actions.shape[0] < 2**31:
            raise FormatError("expected actions, a row for each step")
        num_rows = actions.shape[0]
        columns: dict[str, Column] = {}
        datasets = {
            trees.join("observation", path): f"obs/{path or BARE}" for path, _ in self.spec.observation.leaves()
        }
        datasets |= {"action": "actions"} | {f"extras/{path}": path for path in self.spec.extras.flat}
        for path, leaf in self.spec.columns.items():
            if path in datasets:
                if datasets[path] not in group.datasets:
                    raise FormatError(f"{datasets[path]}: the first demonstration has it, but this one does not")
                try:
                    columns[path] = checked(leaf, reader.read(f"{group.path}/{datasets[path]}"), num_rows)
                except FormatError as error:
                    raise FormatError(f"{datasets[path]}: {error}; extras=none leaves out what is not needed") from None
        for internal, external in (("reward", "rewards"), ("dones", "dones")):
            columns[internal] = np.zeros(num_rows, np.float32)
            if external in group.datasets:
                given = np.asarray(reader.read(f"{group.path}/{external}"))
                if given.shape != (num_rows,) or given.dtype.kind not in "biuf" or not np.isfinite(given).all():
                    raise FormatError(f"{external}: expected {num_rows} numbers, got {given.dtype} {list(given.shape)}")
                with np.errstate(over="ignore"):  # values that overflow float32 are refused below
                    columns[internal] = given.astype(np.float32) if internal == "reward" else given != 0
        if not np.isfinite(columns["reward"]).all():
            raise FormatError("rewards: expected numbers within the range of float32")
        return columns, num_rows

    def _with_next(
        self, reader: Hdf5Reader, group: Group, observations: dict[str, Column], num_rows: int
    ) -> dict[str, Column]:
        """Append the last next_obs; refuses if the other rows of next_obs differ from obs."""
        found: dict[str, Column] = {}
        for path, leaf in self.spec.observation.leaves():
            name, internal = f"next_obs/{path or BARE}", trees.join("observation", path)
            if name not in group.datasets:
                raise FormatError(f"{name}: is missing, though other fields have next_obs")
            after = checked(leaf, reader.read(f"{group.path}/{name}"), num_rows)
            before = observations[internal]
            if not trees.equal_leaf(before[1:], after[:-1]):
                raise FormatError(
                    f"{name}: differs from obs/{path or BARE} of the next row, so the rows are not one episode"
                )
            found[internal] = before + after[-1:] if leaf.ragged else np.concatenate([before, after[-1:]])
        return found

    def _assembled(
        self,
        columns: dict[str, Column],
        observations: dict[str, Column],
        rows: slice,
        rewards: Any,
        terminated: Any,
        info: EpisodeInfo,
    ) -> Episode:
        num_steps = len(terminated)

        def part(name: str) -> Any:
            return trees.unflatten(trees.below({path: column[rows] for path, column in columns.items()}, name))

        truncated = np.zeros(num_steps, bool)
        truncated[-1] = not terminated[-1]
        action = self.spec.action.flat[""]
        return Episode(
            observation=trees.unflatten(trees.below(observations, "observation")),
            action=part("action"),
            reward=rewards,
            terminated=terminated,
            truncated=truncated,
            source=np.full(num_steps, self._options.source, np.uint8),
            policy_version=np.full(num_steps, NO_VERSION, np.int64),
            proposal=np.zeros((num_steps, *action.fixed_shape), action.dtype),
            has_proposal=np.zeros(num_steps, bool),
            extras=part("extras"),
            info=info,
        )

    # ---- the mapping, for the user

    def _mapping(self, file: File, first: Group) -> Iterator[Field]:
        after = "recorded after the action of its row" if self._is_after(file, first) else ""
        for path, _ in self.spec.observation.leaves():
            yield Field(
                external=f"obs/{path or BARE}", internal=trees.join("observation", path), how=after or "as it is"
            )
        for path, _ in self.spec.action.leaves():
            external = trees.join(f"{UNDERSTUDY}/action", path) if self._from_understudy else "actions"
            yield Field(
                external=external, internal=trees.join("action", path), how="of the next row" if after else "as it is"
            )
        yield Field(external="rewards", internal="reward", how="float32")
        yield Field(external="dones", internal="terminated", how="of the last step; where it is 0, truncated")
        if self._from_understudy:
            yield Field(external="understudy", internal="source, policy_version, proposal, extras", how="as it is")
            return
        for path, _ in self.spec.extras.leaves():
            yield Field(external=path, internal=f"extras/{path}", how="as it is")
        yield Field(external="", internal="source", how=self._options.source.name)
        for name in first.datasets:
            if name not in self.spec.extras.flat and name not in EXTRAS_OUT and not re.match("(next_)?obs/", name):
                yield Field(external=name, internal="", how="left out")

    def _is_after(self, file: File, first: Group) -> bool:
        has_next = any(name.startswith("next_obs/") for name in first.datasets)
        return not has_next and (self._options.align or ("after" if file.is_libero else "before")) == "after"


def _with_last_twice(column: Column) -> Column:
    return column + column[-1:] if isinstance(column, list) else np.concatenate([column, column[-1:]])

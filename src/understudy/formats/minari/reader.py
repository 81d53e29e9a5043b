"""MinariReader: reads a Minari dataset as Episodes.

data/metadata.json            spaces and the format of the data
data/main_data.hdf5
  episode_0                   attrs: id, seed, total_steps
    observations, infos       T+1 rows; a Tuple is a group of _index_0, _index_1, ...
    actions, rewards, terminations, truncations         T rows
"""

from __future__ import annotations

import json
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from understudy.core import ArraySpec, Episode, EpisodeInfo, Kind, Source, Spec, Step, StepSpec, UnderstudyError
from understudy.core import tree as trees
from understudy.core.spec import DTYPES
from understudy.formats.format import Field, FormatError
from understudy.formats.hdf5 import Dataset, Group, Hdf5Reader
from understudy.formats.hdf5.columns import checked
from understudy.formats.minari import spaces
from understudy.formats.minari.images import decode_images
from understudy.formats.natural_sort import natural

METADATA, MAIN = "metadata.json", "main_data.hdf5"


@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    bounds: str = "action"  # or none: the spec of the action has the bounds of its space
    infos: str = "all"  # or none: whether infos become extras
    kind: Kind = "demonstration"
    source: Source = Source.POLICY


@dataclass(frozen=True, kw_only=True)
class _Leaf:
    """Where a field of an Episode is stored in Minari's file."""

    external: str
    leaf: ArraySpec
    image: bool = False


class MinariReader:
    def __init__(self, path: Path, options: ReadOptions):
        self._options = options
        folder = path / "data" if (path / "data").is_dir() else path
        self._metadata = _metadata(folder)
        self._reader = Hdf5Reader(folder / MAIN)
        try:
            names, _ = self._reader.names("/")
            self._episodes = sorted((name for name in names if name.startswith("episode_")), key=natural)
            if not self._episodes:
                raise FormatError(f"{folder / MAIN}: holds no episodes")
            first = self._reader.tree(self._episodes[0])
            self._leaves = dict(self._find_leaves(first))
            self.spec = self._spec()
        except FormatError:
            self.close()
            raise
        except UnderstudyError as error:
            self.close()
            raise FormatError(f"{folder}: {error}") from None
        self.num_episodes: int | None = len(self._episodes)
        self.mapping = tuple(self._mapping(first))

    def close(self) -> None:
        self._reader.close()

    # ---- the spec

    def _find_leaves(self, first: Group) -> Iterator[tuple[str, _Leaf]]:
        """Where each field is stored, by its path in a step."""
        jpeg = self._metadata.get("jpeg_encoding") is True
        parts = (("observation", "observations"), ("action", "actions"))
        for internal, external in parts:
            name = f"{internal}_space"
            for path, space in spaces.leaves(self._metadata.get(name), name).items():
                full = trees.join(external, path)
                if full not in first.datasets:
                    raise FormatError(
                        f"{self._reader.path}: {first.path}/{full}: is missing, though its space is declared"
                    )
                data = first.datasets[full]
                image = jpeg and spaces.is_image(space)
                leaf = ArraySpec(shape=tuple(space["shape"]), dtype="uint8") if image else _leaf(data)
                if not image and space.get("type") == "Box" and list(data.shape[1:]) != space.get("shape"):
                    raise FormatError(
                        f"{self._reader.path}: {first.path}/{full}: rows are {list(data.shape[1:])}, its space says "
                        f"{space.get('shape')!r:.80}; it is damaged"
                    )
                if leaf is None:
                    raise FormatError(f"{self._reader.path}: {first.path}/{full}: holds neither numbers nor text")
                if internal == "action" and self._options.bounds == "action" and not image and not leaf.ragged:
                    low, high = spaces.bounds(space, leaf.fixed_shape)
                    leaf = ArraySpec(shape=leaf.shape, dtype=leaf.dtype, low=low, high=high)
                yield trees.join(internal, spaces.episode_path(path)), _Leaf(external=full, leaf=leaf, image=image)
        if self._options.infos == "all":
            for full, data in first.datasets.items():
                leaf = _leaf(data) if full.startswith("infos/") and self._is_of_steps(first, data) else None
                if leaf is not None:
                    yield "extras/" + spaces.episode_path(full.removeprefix("infos/")), _Leaf(external=full, leaf=leaf)

    def _is_of_steps(self, group: Group, data: Dataset) -> bool:
        rewards = group.datasets.get("rewards")
        return rewards is not None and data.shape[:1] == (rewards.shape[0] + 1,)

    def _spec(self) -> StepSpec:
        def part(name: str) -> Spec:
            return Spec(
                trees.unflatten(trees.below({path: stored.leaf for path, stored in self._leaves.items()}, name))
            )

        return StepSpec(observation=part("observation"), action=part("action"), extras=part("extras"))

    # ---- episodes

    def episodes(self, skip: Container[str] = ()) -> Iterator[tuple[str, Episode]]:
        for name in self._episodes:
            if name in skip:
                continue
            try:
                episode = self._episode(self._reader.tree(name))
            except FormatError as error:
                if str(error).startswith(str(self._reader.path)):
                    raise
                raise FormatError(f"{self._reader.path}: {name}: {error}") from None
            except UnderstudyError as error:
                advice = "; bounds=none reads it" if "from" in str(error) and "action" in str(error) else ""
                raise FormatError(f"{self._reader.path}: {name}: {error}{advice}") from None
            if episode is not None:
                yield name, episode

    def _episode(self, group: Group) -> Episode | None:
        """An episode; None if it has no step."""
        with np.errstate(over="ignore"):  # values that overflow float32 are refused with the step
            rewards = self._flat(group, "rewards").astype(np.float32)
        num_steps = len(rewards)
        if num_steps == 0:
            raise FormatError("holds no step; remove it")
        ends = {name: self._flat(group, name) != 0 for name in ("terminations", "truncations")}
        if any(len(flags) != num_steps for flags in ends.values()):
            raise FormatError(f"rewards, terminations and truncations have {num_steps} rows and others")
        columns = {path: self._column(group, path, stored, num_steps) for path, stored in self._leaves.items()}
        rows = {
            path: column if path.partition("/")[0] == "observation" else [*column, None]
            for path, column in columns.items()
        }
        trees_of = {name: trees.unflatten(trees.below(rows, name)) for name in ("observation", "action", "extras")}

        def pick(name: str, index: int) -> Any:
            return trees.map_leaves(lambda column: column[index], trees_of[name])

        steps = [
            Step(
                observation=pick("observation", index),
                action=pick("action", index),
                reward=float(rewards[index]),
                terminated=bool(ends["terminations"][index]),
                truncated=bool(ends["truncations"][index])
                or (index == num_steps - 1 and not ends["terminations"][index]),
                source=self._options.source,
                extras=pick("extras", index),
            )
            for index in range(num_steps)
        ]
        return Episode.from_steps(self.spec, steps, pick("observation", num_steps), self._info(group))

    def _flat(self, group: Group, name: str) -> np.ndarray[Any, Any]:
        if name not in group.datasets or len(group.datasets[name].shape) != 1:
            raise FormatError(f"{name}: expected a number for each step")
        found = self._reader.read(f"{group.path}/{name}")
        if not isinstance(found, np.ndarray):
            raise FormatError(f"{name}: expected numbers, got text")
        return found

    def _column(self, group: Group, path: str, stored: _Leaf, num_steps: int) -> Any:
        """The rows of a field; infos are shifted by one row, because the first is that of the reset."""
        if stored.external not in group.datasets:
            raise FormatError(f"{stored.external}: the first episode has it, but this one does not")
        part = path.partition("/")[0]
        num_rows = num_steps if part == "action" else num_steps + 1
        try:
            found = self._reader.read(f"{group.path}/{stored.external}")
            if stored.image:
                return decode_images(found, stored.leaf, num_rows)
            unbounded = ArraySpec(shape=stored.leaf.shape, dtype=stored.leaf.dtype)
            column = checked(unbounded, found, num_rows)
        except FormatError as error:
            raise FormatError(f"{stored.external}: {error}") from None
        return column[1:] if part == "extras" else column

    def _info(self, group: Group) -> EpisodeInfo:
        seed = group.attrs.get("seed")
        success = None
        if "infos/success" in group.datasets and len(group.datasets["infos/success"].shape) == 1:
            flags = self._reader.read(f"{group.path}/infos/success")
            success = bool(np.any(flags[1:])) if isinstance(flags, np.ndarray) else None
        return EpisodeInfo(
            task=_text(_env_id(self._metadata)),
            seed=seed if type(seed) is int and abs(seed) < 2**63 else None,
            actor=_text(self._metadata.get("algorithm_name")),
            success=success,
            kind=self._options.kind,
        )

    # ---- the mapping, for the user

    def _mapping(self, first: Group) -> Iterator[Field]:
        for path, stored in self._leaves.items():
            how = "JPEG, decoded" if stored.image else "of the next row" if path.startswith("extras") else "as it is"
            yield Field(external=stored.external, internal=path, how=how)
        yield Field(external="rewards", internal="reward", how="float32")
        yield Field(external="terminations", internal="terminated", how="as it is")
        yield Field(external="truncations", internal="truncated", how="as it is; also where an episode just stops")
        known = {stored.external for stored in self._leaves.values()} | {"rewards", "terminations", "truncations"}
        for name in first.datasets:
            if name not in known:
                yield Field(external=name, internal="", how="left out")


def _metadata(folder: Path) -> Mapping[str, Any]:
    path = folder / METADATA
    try:
        found = json.loads(path.read_bytes())
    except OSError as error:
        raise FormatError(
            f"{path}: cannot be read ({error.strerror}); give the directory of a Minari dataset"
        ) from None
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path}: is not JSON ({error}); it is damaged") from None
    if not isinstance(found, dict):
        raise FormatError(f"{path}: expected a JSON object; it is damaged")
    kept = found.get("data_format", "hdf5")
    if kept != "hdf5":
        raise FormatError(
            f"{path}: the data format is {kept!r:.40}, and only hdf5 is read; convert it with Minari to hdf5, as "
            f"docs/hdf5.md shows"
        )
    return found


def _env_id(metadata: Mapping[str, Any]) -> Any:
    try:
        return json.loads(metadata["env_spec"])["id"]
    except (LookupError, TypeError, ValueError, RecursionError):
        return metadata.get("dataset_id")


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _leaf(data: Dataset) -> ArraySpec | None:
    if data.dtype == "str":
        return ArraySpec(shape=(), dtype="str") if len(data.shape) == 1 else None
    if data.dtype not in DTYPES or not data.shape:
        return None
    return ArraySpec(shape=data.shape[1:], dtype=data.dtype)

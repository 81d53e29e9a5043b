"""FunctionFormat: a data set that a function of the user reads, named as module:function:PATH.

    def episodes(path, **options):  # path: a Path; options: the texts behind the question mark
        for file in sorted(path.glob("*.npz")):
            data = np.load(file)
            yield {"name": file.stem, "observation": {"state": data["state"]}, "action": data["action"]}

An episode of T steps is a dict of arrays: `observation` with T+1 rows (the last is what the last action led to) and
`action` with T rows, each an array or a dict of arrays. All else may be left out: `reward` [T], `success`, `terminated`
(whether the task ended; by default where it succeeded), `task`, `instruction`, `source`, `kind`, `labels`, and `name`,
which identifies the episode when it is imported again.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

import numpy as np

from understudy.core import NO_VERSION, ArraySpec, Episode, EpisodeInfo, Source, Spec, StepSpec, Tree, UnderstudyError
from understudy.core import tree as trees
from understudy.core.spec import describe
from understudy.formats.format import DatasetReader, Field, FormatError
from understudy.processes.python_path import import_object

ReadFunction: TypeAlias = Callable[..., Iterator[Mapping[str, Any]]]  # (path, **options) -> one dict per episode

KEYS = (
    *("observation", "action", "reward", "success", "terminated"),
    *("task", "instruction", "source", "kind", "labels", "name"),
)


class FunctionFormat:
    """The format of a data set that the function "module:function" reads."""

    cannot = ("It can be read and not written.",)

    def __init__(self, function: str) -> None:
        self._function: ReadFunction = import_object(function, FormatError)
        self.name = function.replace(":", ".")

    def read(self, path: Path, options: Mapping[str, str]) -> DatasetReader:
        return FunctionReader(self._function, path, options, self.name)

    def write(
        self, path: Path, spec: StepSpec, options: Mapping[str, str], infos: Sequence[EpisodeInfo] = ()
    ) -> NoReturn:
        raise FormatError(f"{self.name}: can be read and not written; export to lerobot, rlds or robomimic instead")


class FunctionReader:
    """Reads the episodes that a function yields; the fields are those of the first."""

    def __init__(self, function: ReadFunction, path: Path, options: Mapping[str, str], name: str) -> None:
        if not path.exists():
            raise FormatError(f"{path}: is not there; name the file or folder that {name} reads")
        self._function, self._path, self._options, self._name = function, path, dict(options), name
        first = next(self._dicts(), None)
        if first is None:
            raise FormatError(f"{path}: {name} found no episode there; check the path")
        where, given = first
        observation, action = (
            Spec(trees.map_leaves(_leaf, _tree(given, key, where))) for key in ("observation", "action")
        )
        self._spec = StepSpec(observation=observation, action=action)

    @property
    def spec(self) -> StepSpec:
        return self._spec

    @property
    def mapping(self) -> tuple[Field, ...]:
        fields = [path for key in ("observation", "action") for path, _ in getattr(self._spec, key).leaves(key)]
        return tuple(Field(external=path, internal=path, how="as it is") for path in fields)

    @property
    def num_episodes(self) -> int | None:
        return None

    def episodes(self, skip: Container[str] = ()) -> Iterator[tuple[str, Episode]]:
        for number, (where, given) in enumerate(self._dicts()):
            key = str(given.get("name", f"episode_{number:06d}"))
            if key not in skip:
                yield key, self._episode(given, where)

    def close(self) -> None:
        """Nothing is open between two episodes."""

    def _dicts(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Each episode with where it stands, for errors."""
        for number, given in enumerate(self._function(self._path, **self._options)):
            where = f"{self._name}: episode {number}"
            if not isinstance(given, Mapping):
                raise FormatError(f"{where}: expected a dict with {', '.join(KEYS)}, got {describe(given)}")
            for key in given:
                if key not in KEYS:
                    raise FormatError(f"{where}: {key!r} is unknown; an episode has {', '.join(KEYS)}")
            yield where, given

    def _episode(self, given: Mapping[str, Any], where: str) -> Episode:
        observation, action = (_tree(given, key, where) for key in ("observation", "action"))
        num = len(next(iter(trees.flatten(action).values())))
        if num < 1:
            raise FormatError(f"{where}: expected at least one action, got none; leave the episode out")
        for path, column in trees.flatten({"observation": observation, "action": action}).items():
            wanted = num + path.startswith("observation")
            if len(column) != wanted:
                raise FormatError(
                    f"{where}: {path}: expected {wanted} rows, because there are {num} actions and one more "
                    f"observation than actions, got {len(column)}; repeat the last one, or leave the last action out"
                )
        success = given.get("success")
        final = np.arange(num) == num - 1
        terminated = bool(given.get("terminated", bool(success)))
        source = given.get("source", "human")
        if source not in Source.__members__ and str(source).upper() not in Source.__members__:
            raise FormatError(f"{where}: source: expected one of {', '.join(Source.__members__)}, got {source!r}")
        try:
            reward = np.asarray(given.get("reward", np.zeros(num)), np.float32)
            if reward.shape != (num,):
                raise FormatError(f"reward: expected [{num}], got {describe(reward)}")
            for key, columns, spec in (
                ("observation", observation, self._spec.observation),
                ("action", action, self._spec.action),
            ):
                spec.check(trees.map_leaves(lambda column: column[0], columns), key)
            return Episode(
                observation=observation,
                action=action,
                reward=reward,
                terminated=final & terminated,
                truncated=final & (not terminated),
                source=np.full(num, Source[str(source).upper()], np.uint8),
                policy_version=np.full(num, NO_VERSION, np.int64),
                proposal=trees.map_leaves(np.zeros_like, action),
                has_proposal=np.zeros(num, bool),
                extras={},
                info=EpisodeInfo(
                    task=given.get("task"),
                    instruction=given.get("instruction", given.get("task")),
                    success=None if success is None else bool(success),
                    kind=given.get("kind", "demonstration"),
                    labels=given.get("labels", {}),
                ),
            )
        except UnderstudyError as error:
            raise FormatError(f"{where}: {error}") from None


def _tree(given: Mapping[str, Any], key: str, where: str) -> Tree:
    if key not in given:
        raise FormatError(f"{where}: has no {key!r}; yield a dict with observation and action")
    found: Tree = trees.map_leaves(np.asarray, given[key])
    if not trees.flatten(found):
        raise FormatError(f"{where}: {key}: expected at least one array, got none")
    for path, column in trees.flatten(found, key).items():
        if column.ndim < 1 or column.dtype.kind not in "biuf":
            raise FormatError(
                f"{where}: {path}: expected an array of numbers with a row per step, got {describe(column)}"
            )
    return found


def _leaf(column: np.ndarray[Any, Any]) -> ArraySpec:
    return ArraySpec(shape=column.shape[1:], dtype=str(column.dtype))

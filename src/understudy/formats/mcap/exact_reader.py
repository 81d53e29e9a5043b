"""ExactReader: reads episodes from MCAP files that Understudy wrote, with all that the export kept.

Three things do not come back: the pixels that JPEG changes, the frames of a stack but for the newest, and which of NaN,
infinity and minus infinity a number was that is null in the file (it becomes NaN).
"""

from __future__ import annotations

import json
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from understudy.core import ArraySpec, Episode, EpisodeInfo, Source, Spec, Step, StepSpec, UnderstudyError
from understudy.core import tree as trees
from understudy.formats.bags.images import compressed_image
from understudy.formats.bags.mcap_file import read_metadata, read_records
from understudy.formats.format import Field, FormatError
from understudy.formats.mcap.messages import EPISODE, SPEC, STEP, is_camera

_WRONG = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)


class ExactReader:
    def __init__(self, files: Sequence[Path]):
        self._files = files
        self._written = _spec(files[0])
        self.spec = _spec_of_stacks(self._written)
        self.num_episodes: int | None = sum(len(read_metadata(file, EPISODE)) for file in files)
        self.mapping = tuple(self._mapping())

    def close(self) -> None:
        """Nothing is open between two episodes."""

    def episodes(self, skip: Container[str] = ()) -> Iterator[tuple[str, Episode]]:
        for file in self._files:
            if _spec(file) != self._written:
                raise FormatError(f"{file}: has other fields than {self._files[0].name}; import it by itself")
            about = read_metadata(file, EPISODE)
            num = 0
            for number, rows in enumerate(_rows(file)):
                num += 1
                if num > len(about):
                    break
                key, info = _about(file, about[number])
                if key not in skip:
                    yield key, self._read(file, key, rows, info)
            if num != len(about):
                raise FormatError(f"{file}: lists {len(about)} episodes and has {num} or more; fetch the file again")

    def _read(self, file: Path, key: str, rows: Sequence[Mapping[str, bytes]], info: EpisodeInfo) -> Episode:
        try:
            return self._episode(rows, info)
        except UnderstudyError as error:
            raise FormatError(f"{file}: {key}: {error}; fetch the file again") from None
        except _WRONG as error:
            raise FormatError(f"{file}: {key}: a message is damaged ({error!s:.200}); fetch the file again") from None

    def _episode(self, rows: Sequence[Mapping[str, bytes]], info: EpisodeInfo) -> Episode:
        steps = []
        for row in rows[:-1]:
            about = json.loads(row[STEP])
            proposed = any(path.partition(trees.SEPARATOR)[0] == "proposal" for path in row)
            steps.append(
                Step(
                    observation=self._tree("observation", row),
                    action=self._tree("action", row),
                    reward=_array(self.spec.reward, about["reward"]),
                    terminated=bool(about["terminated"]),
                    truncated=bool(about["truncated"]),
                    source=Source[about["source"].upper()],
                    policy_version=about["policy_version"],
                    proposal=self._tree("proposal", row) if proposed else None,
                    extras=self._tree("extras", row),
                )
            )
        return Episode.from_steps(self.spec, steps, self._tree("observation", rows[-1]), info)

    def _tree(self, part: str, row: Mapping[str, bytes]) -> Any:
        leaves = trees.below(self.spec.columns, part)
        found = {}
        for path, leaf in leaves.items():
            name = trees.join(part, path)
            if name not in row:
                raise FormatError(f"{name}: has no message in a row")
            found[path] = _value(leaf, json.loads(row[name]), is_camera(self._written.columns[name]))
        return trees.unflatten(found)

    def _mapping(self) -> Iterator[Field]:
        for path, leaf in self.spec.columns.items():
            if path.partition(trees.SEPARATOR)[0] in ("observation", "action", "proposal", "extras"):
                stacked = leaf != self._written.columns[path]
                camera = "image, decoded" + ("; the newest frame of a stack" if stacked else "")
                yield Field(external=f"/{path}", internal=path, how=camera if is_camera(leaf) else "as it is")
        for name in ("reward", "terminated", "truncated", "source", "policy_version"):
            yield Field(external=f"/step:{name}", internal=name, how="as it is")
        yield Field(external=f"metadata {EPISODE}", internal="info", how="the key and the attributes of each episode")


def is_exact(file: Path) -> bool:
    """Whether Understudy wrote the file, with the spec of its episodes."""
    return bool(read_metadata(file, SPEC))


def _spec(file: Path) -> StepSpec:
    found = read_metadata(file, SPEC)
    try:
        return StepSpec.from_json(json.loads(found[0]["spec"]))
    except (*_WRONG, UnderstudyError) as error:
        raise FormatError(f"{file}: metadata {SPEC}: {error!s:.200}; the file is damaged") from None


def _spec_of_stacks(spec: StepSpec) -> StepSpec:
    """The spec of what is in the file: of stacked frames, only the newest."""

    def newest(part: Spec) -> Spec:
        one = lambda leaf: replace(leaf, shape=leaf.shape[-3:]) if is_camera(leaf) else leaf  # noqa: E731
        return Spec(trees.map_leaves(one, part.tree))

    return replace(spec, observation=newest(spec.observation), action=newest(spec.action), extras=newest(spec.extras))


def _rows(file: Path) -> Iterator[list[dict[str, bytes]]]:
    """The messages of each episode by row and path; an episode begins where the numbers of the rows begin again."""
    rows: list[dict[str, bytes]] = []
    for topic, row, data in read_records(file):
        if row == 0 and len(rows) > 1:
            yield rows
            rows = []
        if row == len(rows):
            rows.append({})
        if row != len(rows) - 1:
            raise FormatError(f"{file}: {topic}: a message stands where none is expected; fetch the file again")
        rows[row][topic.removeprefix("/")] = data
    if rows:
        yield rows


def _about(file: Path, record: Mapping[str, str]) -> tuple[str, EpisodeInfo]:
    try:
        return record["key"], EpisodeInfo(**json.loads(record["info"]))
    except (*_WRONG, UnderstudyError) as error:
        raise FormatError(f"{file}: metadata {EPISODE}: {error!s:.200}; the file is damaged") from None


def _value(leaf: ArraySpec, message: Any, camera: bool) -> Any:
    if not camera:
        return _array(leaf, message["value"])
    image = compressed_image(message["data"], message["format"])
    if leaf.bounded:  # JPEG may exceed the bounds
        image = np.clip(image, *leaf.limits).astype(np.uint8)
    return image


def _array(leaf: ArraySpec, value: Any) -> Any:
    """A value of JSON as an array of the leaf; null is NaN."""
    if leaf.dtype == "str":
        return value
    if leaf.numpy_dtype.kind == "f":
        array = np.asarray(value, np.float64).astype(leaf.dtype)  # of None: NaN
    else:
        array = np.asarray(value, leaf.dtype)
    if array.size == 0 and None not in leaf.shape:
        return array.reshape(leaf.fixed_shape)
    return array.reshape(-1, *leaf.shape[1:]) if array.size == 0 and leaf.shape else array

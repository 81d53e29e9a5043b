"""The layout of a file of demonstrations: its groups, masks and attributes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from understudy.core import ArraySpec, StepSpec, UnderstudyError
from understudy.core.spec import DTYPES
from understudy.formats.format import FormatError
from understudy.formats.hdf5 import Dataset, Group, Hdf5Reader
from understudy.formats.natural_sort import natural
from understudy.formats.robomimic.writer import SPEC, UNDERSTUDY

EXTRAS_OUT = ("actions", "rewards", "dones")


@dataclass(frozen=True, kw_only=True)
class File:
    """A file and the demonstrations to read from it."""

    path: Path
    reader: Hdf5Reader
    demos: tuple[str, ...]
    masks: Mapping[str, frozenset[str]]
    spec: StepSpec | None  # if Understudy wrote it
    is_libero: bool
    task: str | None
    instruction: str | None


def open_files(path: Path, mask: str | None) -> list[File]:
    """Open the file, or all files of a directory in natural order."""
    if path.is_dir():
        paths = sorted((*path.glob("*.hdf5"), *path.glob("*.h5")), key=lambda found: natural(found.name))
        if not paths:
            raise FormatError(f"{path}: holds no .hdf5 files; give the file, or the directory that they are in")
        files = []
        for found in paths:
            files.append(_open(found, mask))
            files[-1].reader.close()  # it reopens on demand; there may be many files
        return files
    return [_open(path, mask)]


def _open(path: Path, mask: str | None) -> File:
    reader = Hdf5Reader(path)
    try:
        root, _ = reader.names("/")
        if "data" not in root:
            raise FormatError(f"{path}: has no group 'data'; is it a file of demonstrations?")
        demos, attrs = reader.names("data")
        masks = _masks(reader) if "mask" in root else {}
        if mask is not None:
            if mask not in masks:
                raise FormatError(f"{path}: has no mask {mask!r}; it has {', '.join(sorted(masks)) or 'none'}")
            demos = [demo for demo in demos if demo in masks[mask]]
        if not demos:
            raise FormatError(f"{path}: holds no demonstrations")
        env, problem = _json(attrs.get("env_args")), _json(attrs.get("problem_info"))
        bddl = attrs.get("bddl_file_name")
        language = problem.get("language_instruction")
        name = PurePosixPath(bddl).stem if isinstance(bddl, str) else env.get("env_name")
        return File(
            path=path,
            reader=reader,
            demos=tuple(sorted(demos, key=natural)),
            masks=masks,
            spec=_spec(path, reader.read(SPEC)) if UNDERSTUDY in root else None,
            is_libero="problem_info" in attrs or "bddl_file_name" in attrs,
            task=name if isinstance(name, str) else None,
            instruction="".join(language) if isinstance(language, str | list) else None,
        )
    except BaseException:
        reader.close()
        raise


def _masks(reader: Hdf5Reader) -> dict[str, frozenset[str]]:
    found = {}
    for name in reader.names("mask")[0]:
        demos = reader.read(f"mask/{name}")
        if isinstance(demos, list):
            found[name] = frozenset(demos)
    return found


def _json(value: Any) -> dict[str, Any]:
    try:
        found = json.loads(value) if isinstance(value, str) else {}
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _spec(path: Path, value: Any) -> StepSpec:
    try:
        return StepSpec.from_json(json.loads(value.tobytes()))
    except (TypeError, ValueError, LookupError, AttributeError, RecursionError, UnderstudyError) as error:
        raise FormatError(f"{path}: {SPEC}: {error}; the file is damaged") from None


def leaf_of(data: Dataset) -> ArraySpec | None:
    """The spec of one row; None if it cannot be read."""
    if data.dtype == "str":
        return ArraySpec(shape=(), dtype="str") if len(data.shape) == 1 else None
    if data.dtype not in DTYPES or not data.shape:
        return None
    return ArraySpec(shape=data.shape[1:], dtype=data.dtype)


def row_datasets(group: Group) -> dict[str, Dataset]:
    """Datasets with a row per step that are not observations, actions, rewards or dones, such as simulator states."""
    num_rows = group.datasets["actions"].shape[:1]
    return {
        name: data
        for name, data in group.datasets.items()
        if data.shape[:1] == num_rows
        and name not in EXTRAS_OUT
        and name.partition("/")[0] not in ("obs", "next_obs", UNDERSTUDY)
    }

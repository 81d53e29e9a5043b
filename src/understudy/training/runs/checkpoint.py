"""Checkpoints: all that a run needs to go on, in a directory that is there whole or not at all, and not too many.

000000012000-0/arrays.safetensors     what is numbers
000000012000-0/facts.json             what is not, and the checksum of the arrays
000000012000-0/shards/                what ranks wrote, each its own part, if there were several
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from safetensors import SafetensorError
from safetensors.numpy import load, save

from understudy.core import UnderstudyError

Array = np.ndarray[Any, Any]

ARRAYS, FACTS = "arrays.safetensors", "facts.json"
_FORMAT = 1


class CheckpointError(UnderstudyError):
    """There is no checkpoint, or it is not what was saved."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Checkpoint:
    """What was saved, and its number: the more a run has done, the higher."""

    path: Path
    number: int
    state: dict[str, Any]  # of the algorithm, flat: arrays, and what JSON can hold
    facts: dict[str, Any]  # of everything else


def write_checkpoint(
    root: Path,
    number: int,
    state: Mapping[str, Any],
    facts: Mapping[str, Any],
    *,
    keep: int,
    fill: Callable[[Path], object] | None = None,
) -> Path:
    """Save, and then remove all but the newest `keep`. Whoever is killed in here leaves the older ones as they were.

    `fill` is given the new directory, to put more into it before it gets its name.
    """
    if keep < 1:
        raise CheckpointError(f"keep: expected at least 1 checkpoint, got {keep}")
    root.mkdir(parents=True, exist_ok=True)
    for left in root.glob(".new-*"):  # by one who was killed
        shutil.rmtree(left)
    place = unfinished(root, number)
    place.mkdir()
    if fill is not None:
        fill(place)
    arrays = {name: value for name, value in state.items() if isinstance(value, np.ndarray)}
    plain = {name: value for name, value in state.items() if name not in arrays}
    content = save({name: array.copy(order="C") for name, array in arrays.items()})  # as safetensors wants them
    said = {"format": _FORMAT, "number": number, "arrays": xxhash.xxh3_128_hexdigest(content), "state": plain}
    write_synced(place / ARRAYS, content)
    write_synced(place / FACTS, json.dumps({**said, "facts": dict(facts)}, indent=1).encode())
    path = _free(root, number)
    place.rename(path)
    sync_directory(root)
    for old in sorted(root.glob("[0-9]*"))[:-keep]:
        shutil.rmtree(old.rename(root / f".new-{old.name}"))  # at no moment is half of one there under its name
    return path


def _free(root: Path, number: int) -> Path:
    """Its name, behind those of the same number: a resumed run comes there once more."""
    there = [int(path.name.partition("-")[2]) for path in root.glob(f"{number:012d}-*")]
    return root / f"{number:012d}-{max(there, default=-1) + 1}"


def unfinished(root: Path, number: int) -> Path:
    """Where a checkpoint is while it is written; other ranks put their part there too."""
    return root / f".new-{number:012d}"


def newest_checkpoint(root: Path) -> Path | None:
    """The directory of the last one, if there is any."""
    return max(root.glob("[0-9]*"), default=None)


def read_checkpoint(path: Path) -> Checkpoint:
    """What was saved, or the sentence that says why it cannot be used."""
    advice = f"remove {path} to go on from an older one"
    try:
        said = json.loads((path / FACTS).read_text())
        content = (path / ARRAYS).read_bytes()
        if said["format"] != _FORMAT:
            raise CheckpointError(f"{path}: is of format {said['format']}, and this version reads {_FORMAT}; {advice}")
        if xxhash.xxh3_128_hexdigest(content) != said["arrays"]:
            raise CheckpointError(f"{path}: its arrays are not those that were saved; {advice}")
        return Checkpoint(
            path=path, number=said["number"], state={**load(content), **said["state"]}, facts=said["facts"]
        )
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise CheckpointError(f"{path}: is not a whole checkpoint ({error}); {advice}") from None


def write_synced(path: Path, content: bytes) -> None:
    """A new file that is on the disk when this returns."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync_directory(directory: Path) -> None:
    """Names in it that are new, or gone, stay so."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

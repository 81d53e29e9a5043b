"""Checkpoints: all that a run needs to resume. A checkpoint directory is complete or absent, and old ones are removed.

000000012000-0/arrays.safetensors     all arrays of the state
000000012000-0/facts.json             format, number, everything that is JSON; the checksums of the arrays and of itself
000000012000-0/shards/                written by all ranks of a distributed run, one shard each
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from safetensors import SafetensorError
from safetensors.numpy import load, save

from understudy.core import UnderstudyError
from understudy.durable import files
from understudy.durable.checked_json import from_checked_json, to_checked_json

Array = np.ndarray[Any, Any]

ARRAYS, FACTS = "arrays.safetensors", "facts.json"
FORMAT = 2  # raised whenever an older checkpoint can no longer be read


class CheckpointError(UnderstudyError):
    """A checkpoint that is missing, damaged or of another format."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Checkpoint:
    """A saved state and its number, which grows as the run advances."""

    path: Path
    number: int
    state: dict[str, Any]  # the algorithm's, flat: arrays and JSON values
    facts: dict[str, Any]  # everything else, as JSON


def write_checkpoint(root: Path, number: int, state: Mapping[str, Any], facts: Mapping[str, Any], *, keep: int) -> Path:
    """Save a checkpoint, then remove all but the newest `keep`. A crash in here leaves the older ones intact."""
    return finish_checkpoint(begin_checkpoint(root, number), number, state, facts, keep=keep)


def begin_checkpoint(root: Path, number: int) -> Path:
    """Make the directory of a new checkpoint, which has no valid name yet. The caller may put files of its own there,
    and then calls `finish_checkpoint`; of each run, one checkpoint is written at a time."""
    root.mkdir(parents=True, exist_ok=True)
    for left in root.glob(".new-*"):  # left by a process that was killed
        shutil.rmtree(left)
    new = unfinished(root, number)
    new.mkdir()
    return new


def finish_checkpoint(new: Path, number: int, state: Mapping[str, Any], facts: Mapping[str, Any], *, keep: int) -> Path:
    """Write the rest of a checkpoint, sync it all and give it its name; then remove all but the newest `keep`."""
    if keep < 1:
        raise CheckpointError(f"keep: expected at least 1 checkpoint, got {keep}")
    root = new.parent
    arrays = {name: value for name, value in state.items() if isinstance(value, np.ndarray)}
    plain = {name: value for name, value in state.items() if name not in arrays}
    content = save({name: array.copy(order="C") for name, array in arrays.items()})  # safetensors wants C order
    meta = {"format": FORMAT, "number": number, "arrays": xxhash.xxh3_128_hexdigest(content), "state": plain}
    files.write_synced(new / ARRAYS, content)
    files.write_synced(new / FACTS, to_checked_json({**meta, "facts": dict(facts)}))
    path = _free_name(root, number)
    files.move_durably(new, path)
    _remove_old(root, keep)
    return path


def _remove_old(root: Path, keep: int) -> None:
    for old in sorted(root.glob("[0-9]*"), key=_order)[:-keep]:
        shutil.rmtree(old.rename(root / f".new-{old.name}"))  # renamed first: half a checkpoint never has a valid name


def _free_name(root: Path, number: int) -> Path:
    """The next free name for this number: a resumed run reaches the same number again."""
    taken = [int(path.name.partition("-")[2]) for path in root.glob(f"{number:012d}-*")]
    return root / f"{number:012d}-{max(taken, default=-1) + 1}"


def unfinished(root: Path, number: int) -> Path:
    """The directory of a checkpoint while it is being written; other ranks put their shards there too."""
    return root / f".new-{number:012d}"


def newest_checkpoint(root: Path) -> Path | None:
    """The directory of the last checkpoint, or None."""
    return max(root.glob("[0-9]*"), key=_order, default=None)


def _order(path: Path) -> tuple[int, int]:
    """The number of a checkpoint, and how many of this number were written before it."""
    number, _, again = path.name.partition("-")
    return int(number), int(again or 0)


def read_checkpoint(path: Path) -> Checkpoint:
    """Read and verify a checkpoint; raises CheckpointError with the reason if it cannot be used."""
    advice = f"remove {path} to resume from an older one"
    try:
        meta, intact = from_checked_json((path / FACTS).read_bytes())
        if meta["format"] != FORMAT:
            raise CheckpointError(
                f"{path}: is a checkpoint of format {meta['format']}, and this version of understudy reads format "
                f"{FORMAT}; start a new run, or resume this one with the version that wrote it"
            )
        if intact is False:
            raise CheckpointError(f"{path}: {FACTS} does not match its checksum; {advice}")
        content = (path / ARRAYS).read_bytes()
        if xxhash.xxh3_128_hexdigest(content) != meta["arrays"]:
            raise CheckpointError(f"{path}: {ARRAYS} does not match its checksum; {advice}")
        return Checkpoint(
            path=path, number=meta["number"], state={**load(content), **meta["state"]}, facts=meta["facts"]
        )
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise CheckpointError(f"{path}: is not a complete checkpoint ({error}); {advice}") from None

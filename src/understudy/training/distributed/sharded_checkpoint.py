"""Sharded: a checkpoint that all ranks write together, and that any number of ranks can read, also one without a group.

current                                   the name of the directory that counts; replaced in one go
000000000120-0/shard-*.safetensors        what each rank holds, and where in the whole it lies
000000000120-0/facts.json                 the number of updates and of ranks, the checksum of each shard

All ranks must see the same directory. Whoever is killed in here leaves the old one or the new one, whole.
"""

from __future__ import annotations

import itertools
import json
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xxhash
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from understudy.durable import files
from understudy.training.distributed.errors import RanksError
from understudy.training.distributed.ranks import Ranks

CURRENT, FACTS = "current", "facts.json"
_FORMAT = 1
_BLOCK_BYTES = 2**22


def save_tensors(
    ranks: Ranks, directory: Path, tensors: Mapping[str, Tensor], own: Mapping[str, Tensor], num_updates: int
) -> Path:
    """Write what all ranks hold of `tensors`, and what is each rank's `own`; then forget what was there before."""
    name = ""
    if ranks.first:
        directory.mkdir(parents=True, exist_ok=True)
        for left in directory.glob(".new-*"):  # by those who were killed
            shutil.rmtree(left)
        names = (f"{num_updates:012d}-{again}" for again in itertools.count())  # a resumed run may come here again
        name = next(name for name in names if not (directory / name).exists())
        (directory / f".new-{name}").mkdir()
    name = str(ranks.gather_json(name, name="save")[0])
    place = directory / f".new-{name}"
    _all_agree(ranks, place.is_dir(), f"{directory}: cannot be seen; put it on a file system that all ranks share")
    writer = HuggingFaceStorageWriter(str(place), save_distributed=True)
    with ranks.collective("save"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        state: dict[str, Any] = {**tensors, **{_own(key, ranks.rank): value for key, value in own.items()}}
        save(state, storage_writer=writer, process_group=ranks.host_group, no_dist=ranks.size == 1)
    sums = _checksums(place, ranks)
    if ranks.first:
        said = {"format": _FORMAT, "num_updates": num_updates, "num_ranks": ranks.size, "shards": sums}
        files.write_synced(place / FACTS, json.dumps(said, indent=1).encode())
        files.move_durably(place, directory / name)
        files.write_durably(directory / CURRENT, name.encode())
        for old in directory.glob("[0-9]*"):
            if old.name != name:
                shutil.rmtree(old.rename(directory / f".new-{old.name}"))
    ranks.barrier("saved")
    return directory / name


def load_tensors(ranks: Ranks, directory: Path, tensors: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> int:
    """Fill `tensors`, and `own` if as many ranks read as wrote; returns the number of updates.

    If it refuses, all ranks refuse, and nothing changed.
    """
    problem, said, place = "", {}, directory
    try:
        place = directory / (directory / CURRENT).read_text()
        said = json.loads((place / FACTS).read_text())
        if said["format"] != _FORMAT:
            problem = f"{place}: is of format {said['format']}, and this version reads {_FORMAT}"
    except (OSError, ValueError, KeyError) as error:
        problem = f"{directory}: holds no whole checkpoint ({error}); give a directory that save has written to"
    _all_agree(ranks, not problem, problem)
    wanted = dict(tensors)
    if said["num_ranks"] == ranks.size:
        wanted |= {_own(key, ranks.rank): value for key, value in own.items()}
    if _checksums(place, ranks) != said["shards"]:
        problem = f"{place}: its shards are not those that were saved; go on from another checkpoint"
    else:
        problem = _unfit(place, tensors, wanted)
    _all_agree(ranks, not problem, problem)
    with ranks.collective("load"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # that is what one process wants
        reader = HuggingFaceStorageReader(str(place))
        load(wanted, storage_reader=reader, process_group=ranks.host_group, no_dist=ranks.size == 1)
    return int(said["num_updates"])


def _unfit(place: Path, tensors: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> str:
    """Why what is there cannot be read into these tensors, or nothing."""
    there = HuggingFaceStorageReader(str(place)).read_metadata().state_dict_metadata
    shared = {name for name in there if not name.startswith(_own("", None))}
    different = sorted(shared ^ tensors.keys())
    if different:
        return f"{place}: {different[0]!r} and {len(different) - 1} more are only on one side; make the module as then"
    for name, value in wanted.items():
        if name not in there:
            return f"{place}: {name!r} is not there"
        size = list(getattr(there[name], "size", ()))
        if size != list(value.shape):
            return f"{place}: {name}: expected {list(value.shape)}, got {size}; make the module as it was made then"
    return ""


def _all_agree(ranks: Ranks, good: bool, problem: str) -> None:
    """Raise on all ranks what any of them has found."""
    for rank, found in enumerate(ranks.gather_json(None if good else problem, name="check")):
        if found is not None:
            raise RanksError(found if ranks.size == 1 else f"rank {rank}: {found}")


def _checksums(place: Path, ranks: Ranks) -> dict[str, str]:
    """Of all shards; each rank reads its share of them."""
    shards = sorted(path.name for path in place.glob("*.safetensors"))
    mine = {name: _checksum(place / name) for name in shards[ranks.rank :: ranks.size]}
    return {name: value for part in ranks.gather_json(mine, name="checksums") for name, value in sorted(part.items())}


def _checksum(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def _own(key: str, rank: int | None) -> str:
    return "rank/" if rank is None else f"rank/{rank}/{key}"

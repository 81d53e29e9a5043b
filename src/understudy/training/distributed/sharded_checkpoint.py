"""Sharded checkpoint: written by all ranks together, and read by any number of ranks.

current                                   the name of the valid directory; replaced atomically
000000000120-0/shard-*.safetensors        the tensors that each rank holds, and their position in the whole
000000000120-0/facts.json                 the number of updates and of ranks, the checksums of each shard and of itself

All ranks must see the same directory. A crash in here leaves either the old checkpoint or the new one complete.
"""

from __future__ import annotations

import itertools
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
from understudy.durable.checked_json import from_checked_json, to_checked_json
from understudy.training.distributed.errors import RanksError
from understudy.training.distributed.ranks import Ranks

CURRENT, FACTS = "current", "facts.json"
_FORMAT = 1
_BLOCK_BYTES = 2**22
_ADVICE = "build the same module as when it was saved"


def save_tensors(
    ranks: Ranks, directory: Path, tensors: Mapping[str, Tensor], own: Mapping[str, Tensor], num_updates: int
) -> Path:
    """Write the shards of `tensors` and each rank's `own` tensors, then remove the checkpoint before."""
    name = ""
    if ranks.first:
        directory.mkdir(parents=True, exist_ok=True)
        for left in directory.glob(".new-*"):  # left by processes that were killed
            shutil.rmtree(left)
        # A resumed run reaches the same number of updates again.
        names = (f"{num_updates:012d}-{again}" for again in itertools.count())
        name = next(name for name in names if not (directory / name).exists())
        (directory / f".new-{name}").mkdir()
    name = str(ranks.gather_json(name, name="save")[0])
    path = directory / f".new-{name}"
    unseen = f"{directory}: is not visible on every rank; put it on a file system that all ranks share"
    _raise_on_all(ranks, path.is_dir(), unseen)
    writer = HuggingFaceStorageWriter(str(path), save_distributed=True)
    with ranks.collective("save"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        state: dict[str, Any] = {**tensors, **{_own(key, ranks.rank): value for key, value in own.items()}}
        save(state, storage_writer=writer, process_group=ranks.host_group, no_dist=ranks.size == 1)
    sums = _checksums(path, ranks)
    if ranks.first:
        facts = {"format": _FORMAT, "num_updates": num_updates, "num_ranks": ranks.size, "shards": sums}
        files.write_synced(path / FACTS, to_checked_json(facts))
        files.move_durably(path, directory / name)
        files.write_durably(directory / CURRENT, name.encode())
        for old in directory.glob("[0-9]*"):
            if old.name != name:
                shutil.rmtree(old.rename(directory / f".new-{old.name}"))
    ranks.barrier("saved")
    return directory / name


def load_tensors(ranks: Ranks, directory: Path, tensors: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> int:
    """Fill `tensors`, and `own` if as many ranks read as wrote; returns the number of updates.

    If one rank raises, all raise, and nothing changed.
    """
    facts: dict[str, Any] = {}
    problem, path = "", directory
    try:
        path = directory / (directory / CURRENT).read_text()
        facts, intact = from_checked_json((path / FACTS).read_bytes())
        if facts["format"] != _FORMAT:
            problem = f"{path}: has format {facts['format']}, and this version of understudy reads format {_FORMAT}"
        elif intact is False:
            problem = f"{path}: {FACTS} does not match its checksum; resume from another checkpoint"
    except (OSError, ValueError, KeyError) as error:
        problem = f"{directory}: holds no complete checkpoint ({error}); give a directory that save has written"
    _raise_on_all(ranks, not problem, problem)
    wanted = dict(tensors)
    if facts["num_ranks"] == ranks.size:
        wanted |= {_own(key, ranks.rank): value for key, value in own.items()}
    if _checksums(path, ranks) != facts["shards"]:
        problem = f"{path}: its shards do not match their checksums; resume from another checkpoint"
    else:
        problem = _unfit(path, tensors, wanted)
    _raise_on_all(ranks, not problem, problem)
    with ranks.collective("load"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # as a single process wants
        reader = HuggingFaceStorageReader(str(path))
        load(wanted, storage_reader=reader, process_group=ranks.host_group, no_dist=ranks.size == 1)
    return int(facts["num_updates"])


def _unfit(path: Path, tensors: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> str:
    """Why the checkpoint cannot be loaded into these tensors; empty if it can."""
    there = HuggingFaceStorageReader(str(path)).read_metadata().state_dict_metadata
    shared = {name for name in there if not name.startswith(_own("", None))}
    different = sorted(shared ^ tensors.keys())
    if different:
        return f"{path}: {different[0]!r} and {len(different) - 1} more are only on one side; {_ADVICE}"
    for name, value in wanted.items():
        if name not in there:
            return f"{path}: {name!r} is missing"
        size = list(getattr(there[name], "size", ()))
        if size != list(value.shape):
            return f"{path}: {name}: expected {list(value.shape)}, got {size}; {_ADVICE}"
    return ""


def _raise_on_all(ranks: Ranks, good: bool, problem: str) -> None:
    """Raise on all ranks the problem that any of them found."""
    for rank, found in enumerate(ranks.gather_json(None if good else problem, name="check")):
        if found is not None:
            raise RanksError(found if ranks.size == 1 else f"rank {rank}: {found}")


def _checksums(path: Path, ranks: Ranks) -> dict[str, str]:
    """The checksums of all shards; each rank reads its share of them."""
    shards = sorted(path.name for path in path.glob("*.safetensors"))
    mine = {name: _checksum(path / name) for name in shards[ranks.rank :: ranks.size]}
    return {name: value for part in ranks.gather_json(mine, name="checksums") for name, value in sorted(part.items())}


def _checksum(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def _own(key: str, rank: int | None) -> str:
    return "rank/" if rank is None else f"rank/{rank}/{key}"

"""Sharded checkpoint: written by all ranks together, and read by any number of ranks.

current                                   the name of the valid directory; replaced atomically
000000000120-0/shard-*.safetensors        the tensors that each rank holds, and their position in the whole
000000000120-0/facts.json                 the number of updates and of ranks, the checksums of each shard and of itself

All ranks must see the same directory. A crash in here leaves either the old checkpoint or the new one complete.

Saving has two halves. `stage_tensors` makes all collective calls: the ranks agree on who writes what, by torch's
distributed checkpoint, and each copies its part to host memory. `StagedShards.write` makes none, so that a thread may
write while the ranks train: each rank writes and syncs its shard and reports its checksum (`rank_reports.py`), and the
first rank waits for the reports, then writes the facts, gives the directory its name, and replaces `current`.
"""

from __future__ import annotations

import itertools
import shutil
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from understudy.durable import files
from understudy.durable.checked_json import from_checked_json, to_checked_json
from understudy.training.distributed import shard_file
from understudy.training.distributed.errors import RanksError
from understudy.training.distributed.ranks import Ranks
from understudy.training.distributed.shard_file import Piece, file_name

CURRENT, FACTS = "current", "facts.json"
_FORMAT = 1
_BLOCK_BYTES = 2**22
_ADVICE = "build the same module as when it was saved"


class StagedShards:
    """What this rank will write of a checkpoint, copied to host memory: later updates do not change it."""

    def __init__(self, ranks: Ranks, directory: Path, name: str, pieces: Sequence[Piece], num_updates: int):
        self._ranks, self._directory, self._name = ranks, directory, name
        self._pieces = list(pieces)
        self._num_updates = num_updates
        self._reports = ranks.reports()

    def write(self, given_up: Callable[[], bool] = lambda: False) -> Path:
        """Write and sync the shard of this rank. The first rank then waits for those of the others, and makes the
        checkpoint the valid one; it raises once the caller has `given_up`.

        Any thread may call this, once: no collective call is made. What it wrote is not held any longer.
        """
        new, path = self._directory / f".new-{self._name}", self._directory / self._name
        try:
            name = file_name(self._ranks.rank)
            sums = {name: shard_file.write_shard(new / name, self._pieces)}
        except BaseException as error:
            self._reports.send({"failed": f"{type(error).__name__}: {error}"})
            raise
        finally:
            self._pieces = []
        self._reports.send({"sums": sums})
        if not self._ranks.first:
            return path
        shards: dict[str, str] = {}
        for rank, report in enumerate(self._reports.gather(given_up)):
            if "failed" in report:
                raise RanksError(f"rank {rank}: its shard was not written: {report['failed']}")
            shards |= report["sums"]
        facts = {"format": _FORMAT, "num_updates": self._num_updates, "num_ranks": self._ranks.size, "shards": shards}
        files.write_synced(new / FACTS, to_checked_json(facts))
        files.move_durably(new, path)
        files.write_durably(self._directory / CURRENT, self._name.encode())
        for old in self._directory.glob("[0-9]*"):
            if old.name != self._name:
                shutil.rmtree(old.rename(self._directory / f".new-{old.name}"))
        return path


def stage_tensors(
    ranks: Ranks, directory: Path, tensors: Mapping[str, Tensor], own: Mapping[str, Tensor], num_updates: int
) -> StagedShards:
    """Copy the shards of `tensors` and each rank's `own` tensors. All ranks call this; what is the same on several of
    them is copied and written by one."""
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
    stager = _Stager(str(path))
    with ranks.collective("save"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        state: dict[str, Any] = {**tensors, **{_own(key, ranks.rank): value for key, value in own.items()}}
        save(state, storage_writer=stager, process_group=ranks.host_group, no_dist=ranks.size == 1)
    return StagedShards(ranks, directory, name, stager.pieces, num_updates)


class _Stager(HuggingFaceStorageWriter):
    """Takes part in torch's plan of who writes what, and copies what this rank is to write instead of writing it."""

    def __init__(self, path: str):
        super().__init__(path, save_distributed=True)
        self.pieces: list[Piece] = []

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        for item in plan.items:
            found = planner.resolve_data(item)
            assert isinstance(found, Tensor)
            assert item.tensor_data is not None
            copied = found.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
            offsets = tuple(item.tensor_data.chunk.offsets)
            self.pieces.append(Piece(name=item.index.fqn, tensor=copied, offsets=offsets))
        nothing: Future[list[WriteResult]] = Future()
        nothing.set_result([])
        return nothing


def save_tensors(
    ranks: Ranks, directory: Path, tensors: Mapping[str, Tensor], own: Mapping[str, Tensor], num_updates: int
) -> Path:
    """Write the shards of `tensors` and each rank's `own` tensors, then remove the checkpoint before."""
    staged = stage_tensors(ranks, directory, tensors, own, num_updates)
    if ranks.size == 1:
        return staged.write()
    path, problem = directory, ""
    try:
        path = staged.write()
    except (OSError, RanksError) as error:
        problem = f"{directory}: {error}"
    _raise_on_all(ranks, not problem, problem)
    return path


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

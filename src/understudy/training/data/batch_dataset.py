"""BatchDataset: the batches of a sampler or mixture for torch's DataLoader, each drawn once, by any number of workers.

    def open_sampler() -> Sampler:
        return Sampler(Path("my-store"), DEMO, batch_size=256, seed=1)

    dataset = BatchDataset(open_sampler, num_batches=1000)
    loader = DataLoader(dataset, batch_size=None, num_workers=4, persistent_workers=True)
    for epoch in range(10):
        for batch in loader: ...  # batches 1000 * epoch to 1000 * epoch + 999

Batch number k is what `open_sampler()` draws k-th, as of the commit at which the dataset was made. Of the epoch that
begins with number s, worker w of W on rank r of R draws the numbers s + r + R * (w + W * i), for i = 0, 1, 2, ... A
DataLoader takes from its workers in turn, so that rank r gets s + r, s + r + R, s + r + 2R, ... in this order, with any
number of workers.
"""

from __future__ import annotations

import fcntl
import json
import os
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from understudy.core import StoreError
from understudy.core import tree as trees
from understudy.replay.sample.batch_source import BatchSource, EmptyError

MAX_EPOCHS_KEPT = 8  # workers of one epoch may begin it after others have begun later ones


class BatchDataset(IterableDataset[dict[str, Any]]):
    """The batches of a source, as dicts of tensors with the names of the batch's fields. Use with `batch_size=None`.

    `open_source` is called in this process, to fix the commit, and in every worker; with the start methods `spawn` and
    `forkserver` it must be a function of a module, or a `functools.partial` of one. Each pass over the dataset is an
    epoch: the next `num_batches` batches of all ranks together, from number `start` on. `state` (of another dataset)
    makes it draw as of that one's commit. Rank and world size are those of torch.distributed, unless they are given.
    """

    def __init__(
        self,
        open_source: Callable[[], BatchSource[Any]],
        *,
        num_batches: int,
        start: int = 0,
        state: Mapping[str, Any] | None = None,
        rank: int | None = None,
        world_size: int | None = None,
    ):
        source = open_source()
        try:
            if state is None and not source.follow():
                raise EmptyError("there is nothing to draw; record something before you make a dataset")
            self.state = dict(source.state() if state is None else state)  # small JSON; see `start` for the position
            has_parts = getattr(source, "world_size", 1) > 1
        finally:
            source.close()
        if has_parts and rank is not None:
            raise StoreError("rank: the source gives this rank's part of each batch already; make it without rank=")
        self.rank, self.world_size = (0, 1) if has_parts else _rank_and_world_size(rank, world_size)
        if num_batches < 1 or num_batches % self.world_size:
            raise StoreError(
                f"num_batches: expected a multiple of the {self.world_size} ranks, so that all get as many, "
                f"got {num_batches}"
            )
        if start < 0:
            raise StoreError(f"start: expected a number from 0, got {start}")
        self.num_batches = num_batches
        self._open_source = open_source
        self._epochs = _Epochs(start, num_batches)
        self._source: BatchSource[Any] | None = None
        self._process = 0  # which opened the source
        self._position = 0  # the number of the batch that the source draws next
        self._num_passes = 0  # begun in this process

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_source": None, "_num_passes": 0}

    @property
    def next_start(self) -> int:
        """The number with which the next epoch begins; with `state`, enough to continue there."""
        return self._epochs.next_start

    def __iter__(self) -> Iterator[dict[str, Any]]:
        worker = get_worker_info()
        if self._process != os.getpid():
            self._process, self._num_passes, self._source = os.getpid(), 0, None
        self._num_passes += 1
        if worker is None:
            return self._batches(self._epochs.begin(f"{os.getpid()}-{self._num_passes}", 0), 0, 1)
        seed = worker.seed - worker.id  # of this loader's iteration, or of all of them if the workers are persistent
        first = self._epochs.begin(f"{seed}-{worker.num_workers}-{self._num_passes}", worker.id)
        return self._batches(first, worker.id, worker.num_workers)

    def _batches(self, first: int, worker: int, num_workers: int) -> Iterator[dict[str, Any]]:
        start, stride = first + self.rank + self.world_size * worker, self.world_size * num_workers
        for number in range(start, first + self.num_batches, stride):
            yield to_tensors(self._draw(number))

    def _draw(self, number: int) -> Any:
        if self._source is None or number < self._position:
            if self._source is not None:
                self._source.close()
            self._source, self._position = self._open_source(), 0
            self._source.restore(self.state)
        self._source.skip(number - self._position)
        self._position = number + 1
        return self._source.sample()


def to_tensors(batch: Any) -> dict[str, Any]:
    """The fields of a batch as tensors that share its memory; texts and ragged fields are lists."""
    return {item.name: trees.map_leaves(_to_tensor, getattr(batch, item.name)) for item in fields(batch)}


def _to_tensor(leaf: Any) -> Any:
    if isinstance(leaf, np.ndarray) and leaf.dtype != object:
        return torch.from_numpy(leaf if leaf.flags.writeable else leaf.copy())
    return leaf if isinstance(leaf, str) else [_to_tensor(value) for value in leaf]


def _rank_and_world_size(rank: int | None, world_size: int | None) -> tuple[int, int]:
    if rank is None and world_size is None:
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return torch.distributed.get_rank(), torch.distributed.get_world_size()
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise StoreError(
                "rank: this is one of several processes (WORLD_SIZE), and torch.distributed does not know which; call "
                "init_process_group first, or pass rank= and world_size="
            )
        return 0, 1
    if rank is None or world_size is None or not 0 <= rank < world_size:
        raise StoreError(f"rank: expected a rank below world_size, and both, got {rank} of {world_size}")
    return rank, world_size


class _Epochs:
    """Which numbers each epoch has, in a small file: DataLoader tells no worker how often it was iterated over.

    The first worker of an epoch takes the next numbers, and the others find them under the epoch's key.
    """

    def __init__(self, start: int, num_batches: int):
        descriptor, name = tempfile.mkstemp(prefix="understudy-epochs-", suffix=".json")
        os.close(descriptor)
        self._path = Path(name)
        self._num_batches = num_batches
        self._path.write_text(json.dumps({"next": start, "epochs": []}))
        self._removal = weakref.finalize(self, _remove, self._path, os.getpid())

    def __getstate__(self) -> dict[str, Any]:
        return {"_path": self._path, "_num_batches": self._num_batches}

    @property
    def next_start(self) -> int:
        with self._path.open() as file:
            fcntl.flock(file, fcntl.LOCK_SH)
            return int(json.load(file)["next"])

    def begin(self, key: str, worker: int) -> int:
        """The first number of the epoch `key`. A worker that has begun it before begins another of the same key."""
        with self._path.open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            content = json.load(file)
            found = next((e for e in content["epochs"] if e["key"] == key and worker not in e["workers"]), None)
            if found is None:
                found = {"key": key, "first": content["next"], "workers": []}
                content["epochs"] = [found, *content["epochs"]][:MAX_EPOCHS_KEPT]
                content["next"] += self._num_batches
            found["workers"].append(worker)
            file.seek(0)
            file.truncate()
            file.write(json.dumps(content))
            file.flush()
            return int(found["first"])


def _remove(path: Path, process: int) -> None:
    if os.getpid() == process:  # a worker's copy is not the owner
        path.unlink(missing_ok=True)

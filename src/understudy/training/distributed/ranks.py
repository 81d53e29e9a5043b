"""Ranks: the processes that train one policy together, and the data they exchange besides gradients.

| who | blocks on | woken by |
|---|---|---|
| `join` | all other ranks joining | the last of them; `join_s` |
| `gather_json`, and what begins with it | the same call of all others | the last of them; one that is gone; a stall |
| gradients and large arrays | the same call of all others | the last of them; one that is gone; `timeout_s` |
| `reports`, in any thread | see `rank_reports.py` | |

A stall is `timeout_s` in which no rank made progress. A rank may be late for hours, because it evaluates or collects
episodes of a slow task, as long as it calls `progress`.

Ranks send JSON and raw bytes; nothing is pickled. Host data goes over gloo, also where gradients go over NCCL. Each
rank records in the rendezvous store which collective it is about to enter, so that a rank that waits in vain can say
for which one.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from understudy.training.distributed.errors import RanksError
from understudy.training.distributed.launcher_fds import die_with_launcher, take_listener
from understudy.training.distributed.rank_reports import FAILED, RankReports
from understudy.training.runs.device import AUTO, choose_device

Array = np.ndarray[Any, Any]

SETTLE_S = 0.1
MEETING_DAYS = 365  # gloo's own limit of a wait that lasts as long as there is progress
LOOK_S = 1.0  # how often a waiting rank looks for progress of the others
PIECE_BYTES = 2**28  # maximum size of a message
JOINED_BYTES = 2**16  # arrays up to this size go in one message: each costs a millisecond, however small it is
_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Ranks:
    """One of the processes that train together. All of them call every method, in the same order.

    with join() as ranks:
        losses = ranks.sum({"loss": mine})
        ranks.barrier("collected")
    """

    def __init__(
        self, rank: int, size: int, *, store: Store | None = None, device: str = "cpu", timeout_s: float = 300.0
    ):
        if not 0 <= rank < size:
            raise RanksError(f"rank: expected 0 to {size - 1}, got {rank}; ranks count from 0")
        if size > 1 and store is None:
            raise RanksError(f"size: {size} ranks need a process group; use join()")
        self.rank = rank
        self.size = size
        self.device = torch.device(device)
        self.timeout_s = timeout_s
        self._store = store
        self._grouped = store is not None  # whether `close` must leave a process group
        self._num_collectives = 0
        self._num_claims = 0  # calls of `claims`
        self._claimed: list[str] = []  # keys in the store that this rank was the first to claim
        self._num_reports = 0  # calls of `reports`
        self._num_progress, self._progress_s = 0, float("-inf")
        self._host: dist.ProcessGroup | None = None
        self._meeting: dist.ProcessGroup | None = None
        if size > 1:
            self._meeting = dist.new_group(backend="gloo", timeout=timedelta(days=MEETING_DAYS))
        if size > 1 and self.device.type != "cpu":
            self._host = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))

    def __enter__(self) -> Ranks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(error)

    @property
    def first(self) -> bool:
        """Whether this is rank 0, which prints and writes what is written once."""
        return self.rank == 0

    @property
    def host_group(self) -> dist.ProcessGroup | None:
        """The process group for tensors in host memory; None is the default group."""
        return self._host

    def sum(self, values: Mapping[str, float]) -> dict[str, float]:
        """The sum of each number over all ranks, added in the order of the ranks."""
        given = self.gather_json(dict(values), name="sum")
        for rank, other in enumerate(given):
            if other.keys() != given[0].keys():
                strange = sorted(other.keys() ^ given[0].keys())
                raise RanksError(f"sum: rank {rank} and rank 0 differ in {', '.join(strange)}; give the same names")
        return {name: math.fsum(other[name] for other in given) for name in values}

    def gather_json(self, value: Any, *, name: str = "gather") -> list[Any]:
        """The values of all ranks, in their order. Raises if the ranks are at calls of different names."""
        sent = json.dumps([name, value]).encode()
        if self.size == 1:
            return [json.loads(sent)[1]]
        with self.collective(name):
            lengths = torch.zeros(self.size, dtype=torch.int64)
            lengths[self.rank] = len(sent)
            self._meet(dist.all_reduce(lengths, group=self._meeting, async_op=True), name)
            longest = int(lengths.max())
            padded = torch.zeros(longest, dtype=torch.uint8)
            padded[: len(sent)] = torch.frombuffer(bytearray(sent), dtype=torch.uint8)
            received = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.size)]
            dist.all_gather(received, padded, group=self._host)
        gathered = [json.loads(bytes(t[:n].numpy())) for t, n in zip(received, lengths.tolist(), strict=True)]
        for rank, (theirs, _) in enumerate(gathered):
            if theirs != name:
                raise RanksError(
                    f"rank {self.rank} is at {name!r} and rank {rank} at {theirs!r}; all ranks must do the same"
                )
        return [value for _, value in gathered]

    def progress(self, doing: str) -> None:
        """Tell the ranks that wait for this one that it works; call it more often than each `timeout_s`."""
        now_s = time.monotonic()
        if now_s - self._progress_s > LOOK_S / 2:
            self._num_progress, self._progress_s = self._num_progress + 1, now_s
            self._record(f"progress/{self.rank}", [self._num_progress, doing])

    def claims(self) -> Callable[[int], bool]:
        """A function that says whether this rank is the first of all to claim a number, for work that the ranks share.

        All ranks call this, and meet in another call before they call it again; in between, each claims when it likes.
        """
        if self._store is None:
            return lambda number: True
        store, self._num_claims = self._store, self._num_claims + 1
        for key in self._claimed:  # of the last call, about which nobody asks any more
            store.delete_key(key)
        self._claimed = claimed = []
        prefix = f"claim/{self._num_claims}"

        def claim(number: int) -> bool:
            key = f"{prefix}/{number}"
            with self.translate_errors("claims"):
                if store.add(key, 1) > 1:
                    return False
            claimed.append(key)
            return True

        return claim

    def reports(self) -> RankReports:
        """What each rank will tell the first one, without a collective call, about one thing. All ranks call this."""
        self._num_reports += 1
        return RankReports(self.rank, self.size, self._store, self._num_reports)

    def barrier(self, name: str) -> None:
        """Wait until all ranks have reached the barrier of this name."""
        self.gather_json(None, name=name)

    def broadcast_arrays(self, arrays: Mapping[str, Array] | None, *, source: int = 0) -> dict[str, Array]:
        """Send the arrays of rank `source` to all ranks; the others pass None."""
        if self.rank == source and arrays is None:
            raise RanksError(f"broadcast_arrays: rank {source} is the source and passed None; pass its arrays")
        mine = {name: np.asarray(array, order="C") for name, array in (arrays or {}).items()}
        layout = [[name, array.dtype.str, list(array.shape)] for name, array in mine.items()]
        layouts = self.gather_json(layout if self.rank == source else None, name="broadcast_arrays")[source]
        if self.size == 1:
            return mine
        got = mine if self.rank == source else {name: np.empty(shape, dtype) for name, dtype, shape in layouts}
        small = [array for array in got.values() if array.nbytes <= JOINED_BYTES]
        joined = np.concatenate([np.zeros(0, np.uint8), *map(_bytes_of, small)])
        with self.collective("broadcast_arrays"):
            for array in [joined, *(array for array in got.values() if array.nbytes > JOINED_BYTES)]:
                for piece in pieces(array):
                    dist.broadcast(piece, src=source, group=self._host)
        if self.rank != source:
            ends = np.cumsum([array.nbytes for array in small])
            for array, end in zip(small, ends, strict=True):
                _bytes_of(array)[:] = joined[end - array.nbytes : end]
        return got

    @contextlib.contextmanager
    def collective(self, what: str) -> Iterator[None]:
        """Record that this rank enters a collective call of this name, and translate its errors."""
        self._num_collectives += 1
        self._record(f"at/{self.rank}", [self._num_collectives, what, time.time()])
        with self.translate_errors(what):
            yield

    @contextlib.contextmanager
    def translate_errors(self, what: str) -> Iterator[None]:
        """Turn torch's error about a rank that is gone or late into one that names the rank and its last collective."""
        try:
            yield
        except RuntimeError as error:
            if not _is_communication(error):
                raise
            raise RanksError(f"rank {self.rank} of {self.size}: {what!r}: {self._explain(error)}") from None

    def close(self, error: BaseException | None = None) -> None:
        """Leave the process group. An error is recorded for the other ranks, which then end too."""
        if error is not None:
            self._record(f"{FAILED}/{self.rank}", f"{type(error).__name__}: {error}"[:500])
        self._store = None
        if self._grouped and error is None:  # after an error others may wait for us, and leaving would wait for them
            # Gloo's thread releases its last tensors a moment after a call has returned, and needs the GIL for it.
            # Destroying the group meanwhile holds the GIL and waits for that thread: a deadlock.
            time.sleep(SETTLE_S)
            dist.destroy_process_group()
        self._grouped = False

    def group_of_one(self) -> None:
        """Create a process group of this process alone, for the parts of torch that need one."""
        if not dist.is_initialized():
            self._grouped = True
            dist.init_process_group(_backend(self.device), store=HashStore(), rank=0, world_size=1)

    def _meet(self, call: dist.Work, name: str) -> None:
        """Wait for a call of all ranks, for as long as those that are missing make progress."""
        seen, since_s = None, time.monotonic()
        while True:
            try:
                call.wait(timedelta(seconds=min(LOOK_S, self.timeout_s / 4)))
                return
            except RuntimeError:  # not yet, or a rank is gone
                if call.is_completed():  # perhaps only now: ask again, which raises if it failed
                    call.wait()
                    return
            now = [(self._read(f"at/{rank}"), self._read(f"progress/{rank}")) for rank in range(self.size)]
            if now != seen:
                seen, since_s = now, time.monotonic()
            elif time.monotonic() - since_s > self.timeout_s:
                raise RanksError(f"rank {self.rank} of {self.size}: {name!r}: {self._explain(None)}")

    def _record(self, key: str, value: Any) -> None:
        if self._store is not None:
            with contextlib.suppress(
                RuntimeError
            ):  # rank 0, which hosts the store, is gone; the collective itself will raise
                self._store.set(key, json.dumps(value))

    def _explain(self, error: RuntimeError | None) -> str:
        """A sentence about the rank for which this one waited in vain; without an error, too long."""
        late = []
        for rank in range(self.size):
            if rank == self.rank:
                continue
            try:
                failed, at, worked = (self._read(f"{key}/{rank}") for key in (FAILED, "at", "progress"))
            except RuntimeError:
                return "rank 0, which hosts the rendezvous store, is gone; see its own last lines"
            if failed is not None and "RanksError" not in failed:
                return f"rank {rank} failed with {failed}"
            if at is None or at[0] < self._num_collectives:
                seen = f"was last at {at[1]!r} {time.time() - at[2]:.0f} s ago" if at else "has entered no call yet"
                if worked is not None:
                    seen += f"; its last progress: {worked[1]}"
                late.append(f"rank {rank} did not arrive ({seen})")
        if late:
            timed_out = error is None or "imed out" in str(error)
            limit = f"; the limit without progress is {self.timeout_s:g} s" if timed_out else " and is gone"
            return f"{'; '.join(late)}{limit}"
        if error is None:
            return f"all ranks arrived, and the call did not end within {self.timeout_s:g} s; look at the network"
        return f"the connection to another rank broke: {_first_line(error)}; see the last lines of the others"

    def _read(self, key: str) -> Any:
        assert self._store is not None
        return json.loads(self._store.get(key)) if self._store.check([key]) else None


def single_rank(device: str = AUTO) -> Ranks:
    """The ranks of a process that trains by itself: only rank 0."""
    return Ranks(0, 1, device=choose_device(device).name)


def join(*, device: str = AUTO, timeout_s: float = 300.0, join_s: float = 300.0) -> Ranks:
    """Join the ranks that torchrun or launch.py has started, each with a device of its own; a single rank if neither
    has."""
    given = {name: os.environ.get(name) for name in _VARIABLES}
    if given["RANK"] is None and given["WORLD_SIZE"] in (None, "1"):
        return single_rank(device)
    absent = [name for name, value in given.items() if value is None]
    if absent:
        raise RanksError(f"{', '.join(absent)}: expected in the environment; start the ranks with torchrun or launch")
    rank, size = int(str(given["RANK"])), int(str(given["WORLD_SIZE"]))
    die_with_launcher()
    device = choose_device(device, num_ranks=size).name
    if device.startswith("cuda"):
        torch.cuda.set_device(device)
    if size == 1:
        return Ranks(0, 1, device=device)
    store = _rendezvous(rank, size, join_s)
    try:
        dist.init_process_group(
            _backend(torch.device(device)),
            store=PrefixStore("group", store),
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=timeout_s),
            device_id=None if device == "cpu" else torch.device(device),
        )
    except RuntimeError as error:
        raise RanksError(
            f"rank {rank} of {size}: the process group did not start: {_first_line(error)}; see the others' output"
        ) from None
    return Ranks(rank, size, store=PrefixStore("ranks", store), device=device, timeout_s=timeout_s)


def pieces(array: Array) -> Sequence[torch.Tensor]:
    """The bytes of an array, in place, as tensors of at most PIECE_BYTES."""
    if not array.nbytes:
        return []
    if not array.flags.writeable:  # torch accepts only writable memory, also for sending
        array = array.copy()
    return torch.split(torch.from_numpy(_bytes_of(array)), PIECE_BYTES)


def _bytes_of(array: Array) -> Array:
    """The bytes of a contiguous array, in place."""
    return array.reshape(-1).view(np.uint8)


def _rendezvous(rank: int, size: int, join_s: float) -> Store:
    """Wait until every rank has joined; raises RanksError with those that have not."""
    address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    deadline = time.monotonic() + join_s
    try:
        store = _open_store(rank, size, join_s)
        store.set(f"here/{rank}", "1")
        missing = [other for other in range(size) if other != rank]
        while missing := [other for other in missing if not store.check([f"here/{other}"])]:
            if time.monotonic() > deadline:
                raise RanksError(
                    f"rank {rank} of {size}: rank {', '.join(map(str, missing))} did not join at {address} "
                    f"within {join_s:g} s; see its output, or raise join_s"
                )
            time.sleep(0.02)
    except RuntimeError as error:
        raise RanksError(
            f"rank {rank} of {size}: no answer from rank 0 at {address} within {join_s:g} s ({_first_line(error)}); "
            f"is it started, and can it be reached from here?"
        ) from None
    return store


def _open_store(rank: int, size: int, join_s: float) -> Store:
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    limit = timedelta(seconds=join_s)
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # torchrun hosts one for all attempts
        store = TCPStore(host, port, size, is_master=False, timeout=limit)
        return PrefixStore(f"attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    return TCPStore(
        host,
        port,
        size,
        is_master=rank == 0,
        timeout=limit,
        wait_for_workers=False,
        master_listen_fd=take_listener() if rank == 0 else None,
    )


def _backend(device: torch.device) -> str:
    # Gloo also beside NCCL: offloaded shards and checkpoints are tensors in host memory.
    return "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"


def _is_communication(error: RuntimeError) -> bool:
    """Whether a rank is gone or late. Gloo raises plain RuntimeErrors, so their text is all there is to go by."""
    text = str(error)
    return isinstance(error, dist.DistError) or any(word in text for word in ("gloo", "NCCL", "Connection", "imed out"))


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0][:300]

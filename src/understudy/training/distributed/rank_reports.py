"""Rank reports: what each rank tells the first one, without a collective call.

    reports = ranks.reports()                      # all ranks, at the same place
    reports.send({"written": 3})                   # each rank, when it has got so far, from any thread
    reports.gather(lambda: given_up)               # the first rank, in any thread: the values of all, in their order

| caller | blocks on | woken by |
|---|---|---|
| `gather` | the `send` of every rank | the last of them; a rank that has failed; `given_up` |

Collective calls of two threads would meet the wrong partner on another rank. Reports go through the rendezvous store,
where each has a key of its own.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

from torch.distributed import Store  # type: ignore[attr-defined]

from understudy.training.distributed.errors import RanksError

LOOK_S = 0.05  # how often `gather` looks for what is missing
FAILED = "failed"  # prefix of the key in the store under which a rank says why it ended


class RankReports:
    """The reports of all ranks about one thing."""

    def __init__(self, rank: int, size: int, store: Store | None, number: int):
        """Without a store there is one rank."""
        self._rank, self._size, self._store = rank, size, store
        self._prefix = f"report/{number}"
        self._own: Any = None

    def send(self, value: Any) -> None:
        """Report plain JSON, once."""
        if self._store is None:
            self._own = value
        else:
            self._store.set(self._key(self._rank), json.dumps(value))

    def gather(self, given_up: Callable[[], bool] = lambda: False) -> list[Any]:
        """The reports of all ranks. Raises if a rank has failed without one, and once the caller has `given_up`."""
        store = self._store
        if store is None:
            return [self._own]
        for rank in range(self._size):
            while not store.check([self._key(rank)]):
                if store.check([f"{FAILED}/{rank}"]):
                    raise RanksError(f"rank {rank} failed with {json.loads(store.get(f'{FAILED}/{rank}'))}")
                if given_up():
                    raise RanksError(f"rank {rank} had not reported when this rank ended")
                time.sleep(LOOK_S)
        found = [json.loads(store.get(self._key(rank))) for rank in range(self._size)]
        for rank in range(self._size):
            store.delete_key(self._key(rank))
        return found

    def _key(self, rank: int) -> str:
        return f"{self._prefix}/{rank}"

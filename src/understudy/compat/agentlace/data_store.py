"""QueuedDataStore: a queue of transitions on an actor, which `TrainerClient.update` sends."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from understudy.compat.arrays import tree_to_numpy
from understudy.core import SpecError, StoreError
from understudy.core import tree as trees
from understudy.core.spec import describe
from understudy.core.step import NO_VERSION
from understudy.core.tree import AnyTree

logger = logging.getLogger(__name__)

_READ_INFOS = ("intervene_action", "succeed")


class QueuedDataStore:
    """A queue of at most `capacity` transitions. When it is full, the oldest is dropped, counted and logged.

    Any thread may insert; one client takes. Arrays are copied. An observation that ends one transition and begins the
    next is kept once.
    """

    def __init__(self, capacity: int):
        if capacity < 1:
            raise StoreError(f"capacity: expected a number from 1, got {capacity}")
        self.capacity = capacity
        self.num_dropped = 0  # because the queue was full
        self._lock = threading.Lock()
        self._queue: deque[tuple[int, dict[str, Any], int]] = deque()  # number, transition, policy version
        self._latest = -1
        self._last_next_observation: AnyTree = None
        self._owner: object = None
        self._check: Callable[[Mapping[str, Any]], object] | None = None
        self._version: Callable[[], int] = lambda: NO_VERSION

    def insert(self, data: Mapping[str, Any]) -> None:
        """Add a transition. One that does not fit the server's buffer is refused, once the client knows its spec."""
        if not isinstance(data, Mapping):
            raise SpecError(f"transition: expected a dict, got {describe(data)}; see docs/moving.md for its fields")
        with self._lock:
            kept = self._copy(data)
            if self._check is not None:
                self._check(kept)
            self._last_next_observation = kept.get("next_observations")
            if len(self._queue) == self.capacity:
                self._queue.popleft()
                self._count_dropped()
            self._latest += 1
            self._queue.append((self._latest, kept, self._version()))

    def batch_insert(self, batch_data: Iterable[Mapping[str, Any]]) -> None:
        for data in batch_data:
            self.insert(data)

    def _copy(self, data: Mapping[str, Any]) -> dict[str, Any]:
        kept = dict(data)
        if "infos" in data:
            infos = data["infos"] or {}
            kept["infos"] = {name: infos[name] for name in _READ_INFOS if name in infos}
        for name in kept.keys() - {"observations"}:
            kept[name] = trees.map_leaves(_copy_leaf, tree_to_numpy(kept[name], name))
        if "observations" in kept:
            now = tree_to_numpy(kept["observations"], "observations")
            same = self._last_next_observation is not None and trees.equal(now, self._last_next_observation)
            kept["observations"] = self._last_next_observation if same else trees.map_leaves(_copy_leaf, now)
        return kept

    def _count_dropped(self) -> None:
        self.num_dropped += 1
        if self.num_dropped & (self.num_dropped - 1) == 0:  # at 1, 2, 4, ..., so that the log stays readable
            logger.warning(
                "the queue of %d transitions is full, and the oldest was dropped; %d so far. "
                "Call update() more often, or see why the server cannot be reached",
                self.capacity,
                self.num_dropped,
            )

    def latest_data_id(self) -> int:
        """The number of the newest transition ever inserted, from 0; -1 if there was none."""
        return self._latest

    def get_latest_data(self, from_id: int) -> list[dict[str, Any]]:
        """The queued transitions after number `from_id`."""
        with self._lock:
            return [data for number, data, _ in self._queue if number > from_id]

    def __len__(self) -> int:
        """How many transitions are queued."""
        return len(self._queue)

    # ---- for a client

    def attach(self, owner: object, version: Callable[[], int]) -> None:
        """Belong to a client; `version` gives the policy version for each transition that is inserted."""
        with self._lock:
            if self._owner is not None:
                raise StoreError("data store: another client takes from this queue; make one for each client")
            self._owner, self._version = owner, version

    def check_with(self, check: Callable[[Mapping[str, Any]], object] | None) -> None:
        """Call `check` with each transition from now on; it raises to refuse one."""
        with self._lock:
            self._check = check

    def detach(self) -> None:
        with self._lock:
            self._owner, self._check, self._version = None, None, lambda: NO_VERSION

    def take(self, until: int | None = None) -> tuple[dict[str, Any], int] | None:
        """Remove and return the oldest transition, if its number is up to `until`, and its policy version."""
        with self._lock:
            if not self._queue or (until is not None and self._queue[0][0] > until):
                return None
            return self._queue.popleft()[1:]


def _copy_leaf(leaf: Any) -> Any:
    return np.array(leaf) if isinstance(leaf, np.ndarray) else leaf

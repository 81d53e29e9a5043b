"""The data sets of RLinf over its buffer: endless batches, half of them from demonstrations, for torch's DataLoader.

    dataset = ReplayBufferDataset(replay_buffer, demo_buffer, batch_size=256, min_replay_buffer_size=10,
                                  min_demo_buffer_size=1)
    loader = DataLoader(dataset, batch_size=1, collate_fn=replay_buffer_collate_fn)

| loop | takes from | blocks on | woken by |
|---|---|---|---|
| sampling thread of the Preload one | the buffers | a full queue, buffers that are not ready | the queue; `close` |

The classes are those of torch's IterableDataset, so they are made, and torch is imported, when they are asked for.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from understudy.compat.hil_serl import concat_batches
from understudy.compat.rlinf.buffer import TrajectoryReplayBuffer
from understudy.compat.rlinf.tensors import torch
from understudy.core import StoreError

POLL_S = 0.02
CLASSES = ("ReplayBufferDataset", "PreloadReplayBufferDataset")


def replay_buffer_collate_fn(batch: list[Any]) -> Any:
    """The batch itself: the DataLoader has put it into a list."""
    return batch[0]


@lru_cache(maxsize=1)
def dataset_classes() -> dict[str, Any]:
    """The two classes by name."""
    base = torch().utils.data.IterableDataset

    class ReplayBufferDataset(base):  # type: ignore[misc, valid-type]
        """Endless batches, once both buffers have as many trajectories as they should."""

        def __init__(
            self,
            replay_buffer: TrajectoryReplayBuffer,
            demo_buffer: TrajectoryReplayBuffer | None,
            batch_size: int,
            min_replay_buffer_size: int,
            min_demo_buffer_size: int,
            prefetch_size: int = 5,
            **others: Any,
        ):
            if batch_size < (1 if demo_buffer is None else 2):
                raise StoreError(f"batch_size: expected a number from 2, half of it for each buffer, got {batch_size}")
            self.replay_buffer = replay_buffer
            self.demo_buffer = demo_buffer
            self.batch_size = batch_size
            self.min_replay_buffer_size = min_replay_buffer_size
            self.min_demo_buffer_size = min_demo_buffer_size
            self.prefetch_size = prefetch_size
            self._stop = threading.Event()

        def __iter__(self) -> Iterator[Any]:
            while self._wait_until_ready():
                yield self._sample()

        def _wait_until_ready(self) -> bool:
            """Return True when there is something to sample, and False after `close`."""
            while not self._stop.is_set():
                demos = self.demo_buffer is None or self.demo_buffer.is_ready(self.min_demo_buffer_size)
                if demos and self.replay_buffer.is_ready(self.min_replay_buffer_size):
                    return True
                self._stop.wait(POLL_S)
            return False

        def _sample(self) -> Any:
            if self.demo_buffer is None:
                return self.replay_buffer.sample(self.batch_size)
            half = self.batch_size // 2
            online, demos = self.replay_buffer.sample(half), self.demo_buffer.sample(half)
            return concat_batches(*_common(online, demos), axis=0)

        def close(self) -> None:
            """End the iterators; the buffers stay open."""
            self._stop.set()

    class PreloadReplayBufferDataset(ReplayBufferDataset):
        """The same, with `prefetch_size` batches sampled ahead by a thread; what it raises is raised here."""

        def __iter__(self) -> Iterator[Any]:
            ahead: queue.Queue[Any] = queue.Queue(maxsize=self.prefetch_size)
            thread = threading.Thread(target=self._sample_ahead, args=(ahead,), name="rlinf-preload", daemon=True)
            thread.start()
            while True:
                found = ahead.get()
                if found is None:
                    return
                if isinstance(found, BaseException):
                    raise found
                yield found

        def _sample_ahead(self, ahead: queue.Queue[Any]) -> None:
            end: Exception | None = None
            try:
                while self._wait_until_ready():
                    self._put(ahead, self._sample())
            except Exception as error:  # noqa: BLE001 (the outermost loop of this thread)
                end = error
            while self._stop.is_set() and not ahead.empty():  # nobody takes them, and there must be room
                ahead.get()
            ahead.put(end)

        def _put(self, ahead: queue.Queue[Any], batch: Any) -> None:
            """Queue a batch, unless `close` is called while there is no room."""
            while not self._stop.is_set():
                try:
                    ahead.put(batch, timeout=POLL_S)
                except queue.Full:
                    continue
                return

    return {"ReplayBufferDataset": ReplayBufferDataset, "PreloadReplayBufferDataset": PreloadReplayBufferDataset}


def _common(a: Any, b: Any) -> tuple[Any, Any]:
    """Two batches with the fields that both have."""
    if not isinstance(a, dict) or not isinstance(b, dict):
        return a, b
    pairs = {name: _common(a[name], b[name]) for name in a if name in b}
    return {name: pair[0] for name, pair in pairs.items()}, {name: pair[1] for name, pair in pairs.items()}

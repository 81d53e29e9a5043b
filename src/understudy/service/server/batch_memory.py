"""BatchMemory: bounds the memory of all batches that a server makes and sends at once."""

from __future__ import annotations

import threading

from understudy.core import UnavailableError

SMALL_SHARE = 1 / 64  # of the limit: a batch below it may use all memory, larger ones half of it together


class BatchMemory:
    """Counts bytes. Any thread may call; nobody waits here: a client that is refused tries again.

    So one client that asks for large batches, or does not read them, never keeps others from drawing small ones.
    """

    def __init__(self, max_bytes: int):
        self.max_bytes = max_bytes
        self._lock = threading.Lock()
        self._num_bytes = self._num_large_bytes = 0

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def take(self, num_bytes: int) -> None:
        """Count them in; an UnavailableError if there is no room for them now."""
        large = num_bytes > self.max_bytes * SMALL_SHARE
        with self._lock:
            if self._num_bytes + num_bytes > self.max_bytes or (
                large and self._num_large_bytes + num_bytes > self.max_bytes // 2
            ):
                raise UnavailableError(
                    f"no room for a batch that takes {num_bytes} bytes: {self._num_bytes} of the {self.max_bytes} for "
                    f"batches are in use; try again, request fewer steps, or raise --max-batch-memory-mb of "
                    f"`understudy serve`"
                )
            self._num_bytes += num_bytes
            self._num_large_bytes += num_bytes if large else 0

    def give_back(self, num_bytes: int) -> None:
        """Count them out: the same number that was taken at once."""
        with self._lock:
            self._num_bytes -= num_bytes
            self._num_large_bytes -= num_bytes if num_bytes > self.max_bytes * SMALL_SHARE else 0

"""BatchMemory: large batches leave room for small ones, and all that was taken comes back."""

import pytest

from understudy.core import UnavailableError
from understudy.service.server.batch_memory import SMALL_SHARE, BatchMemory


def test_large_batches_take_half_and_small_ones_all() -> None:
    memory = BatchMemory(64_000)
    small = int(64_000 * SMALL_SHARE)
    memory.take(20_000)
    with pytest.raises(UnavailableError, match="no room for a batch that takes 20000 bytes: 20000 of the 64000 for"):
        memory.take(20_000)
    for _ in range(44):
        memory.take(small)
    with pytest.raises(UnavailableError):
        memory.take(small)
    memory.give_back(20_000)
    memory.take(20_000)
    for num_bytes in (20_000, *[small] * 44):
        memory.give_back(num_bytes)
    assert memory.num_bytes == 0
    memory.take(32_000)

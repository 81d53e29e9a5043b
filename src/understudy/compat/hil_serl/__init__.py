"""HIL-SERL's replay buffers, the calls of its scripts, and its files."""

from understudy.compat.hil_serl.batches import concat_batches, populate_data_store
from understudy.compat.hil_serl.buffer import (
    MemoryEfficientReplayBuffer,
    MemoryEfficientReplayBufferDataStore,
    ReplayBuffer,
    ReplayBufferDataStore,
)

__all__ = [
    "MemoryEfficientReplayBuffer",
    "MemoryEfficientReplayBufferDataStore",
    "ReplayBuffer",
    "ReplayBufferDataStore",
    "concat_batches",
    "populate_data_store",
]

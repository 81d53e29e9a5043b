"""Familiar faces of other projects, thin over the store. Numpy in, numpy out."""

from understudy.compat.hil_serl import MemoryEfficientReplayBuffer, MemoryEfficientReplayBufferDataStore
from understudy.compat.rlinf import TrajectoryReplayBuffer

__all__ = ["MemoryEfficientReplayBuffer", "MemoryEfficientReplayBufferDataStore", "TrajectoryReplayBuffer"]

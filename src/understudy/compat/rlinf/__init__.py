"""The trajectory replay buffer of RLinf over a store, and the files in which RLinf keeps its own."""

from understudy.compat.rlinf.buffer import TrajectoryReplayBuffer
from understudy.compat.rlinf.rollout import ChunkStepResult, EmbodiedRolloutResult
from understudy.compat.rlinf.trajectory import Trajectory

__all__ = ["ChunkStepResult", "EmbodiedRolloutResult", "Trajectory", "TrajectoryReplayBuffer"]

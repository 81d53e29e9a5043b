"""The trajectory replay buffer of RLinf over a store, and the files in which RLinf keeps its own."""

from typing import Any

from understudy.compat.rlinf.buffer import TrajectoryReplayBuffer
from understudy.compat.rlinf.dataset import CLASSES, dataset_classes, replay_buffer_collate_fn
from understudy.compat.rlinf.rollout import ChunkStepResult, EmbodiedRolloutResult
from understudy.compat.rlinf.trajectory import Trajectory

__all__ = [
    "ChunkStepResult",
    "EmbodiedRolloutResult",
    "PreloadReplayBufferDataset",
    "ReplayBufferDataset",
    "Trajectory",
    "TrajectoryReplayBuffer",
    "replay_buffer_collate_fn",
]


def __getattr__(name: str) -> Any:
    if name in CLASSES:
        return dataset_classes()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""The buffers and trainers of other projects, with their names and calls, over a store.

Those of agentlace need `pip install 'understudy-robotics[remote]'`; they are loaded when they are first used.
"""

from typing import TYPE_CHECKING, Any

from understudy.compat.agentlace.data_store import QueuedDataStore
from understudy.compat.hil_serl import (
    MemoryEfficientReplayBuffer,
    MemoryEfficientReplayBufferDataStore,
    ReplayBuffer,
    ReplayBufferDataStore,
    concat_batches,
    populate_data_store,
)
from understudy.compat.hil_serl.files import export_demos, export_run, load_run
from understudy.compat.rlds import (
    Trajectory,
    convert_rlds_to_trajectories,
    create_trajectory_data_spec,
    push_rlds_to_replay,
    push_rlds_to_reverb,
    replay_spec,
)
from understudy.compat.rlinf import TrajectoryReplayBuffer

if TYPE_CHECKING:
    from understudy.compat.agentlace.trainer import TrainerConfig, TrainerServer, make_trainer_config
    from understudy.compat.agentlace.trainer_client import TrainerClient

__all__ = [
    "MemoryEfficientReplayBuffer",
    "MemoryEfficientReplayBufferDataStore",
    "QueuedDataStore",
    "ReplayBuffer",
    "ReplayBufferDataStore",
    "TrainerClient",
    "TrainerConfig",
    "TrainerServer",
    "Trajectory",
    "TrajectoryReplayBuffer",
    "concat_batches",
    "convert_rlds_to_trajectories",
    "create_trajectory_data_spec",
    "export_demos",
    "export_run",
    "load_run",
    "make_trainer_config",
    "populate_data_store",
    "push_rlds_to_replay",
    "push_rlds_to_reverb",
    "replay_spec",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from understudy.compat.agentlace import trainer, trainer_client

    return trainer_client.TrainerClient if name == "TrainerClient" else getattr(trainer, name)

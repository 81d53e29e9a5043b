"""Training: puts worlds, teleoperation, policies and the store together.

The names below are loaded when they are first used, so that configs can be imported without worlds and stores.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from understudy.training.data.batch_dataset import BatchDataset
    from understudy.training.data.record import RecordConfig, RecordReport, open_target, record, record_script
    from understudy.training.data.run_episode import EpisodeResult, run_episode

__all__ = [
    "BatchDataset",
    "EpisodeResult",
    "RecordConfig",
    "RecordReport",
    "open_target",
    "record",
    "record_script",
    "run_episode",
]

_MODULES = {
    "data.batch_dataset": ("BatchDataset",),
    "data.record": ("RecordConfig", "RecordReport", "open_target", "record", "record_script"),
    "data.run_episode": ("EpisodeResult", "run_episode"),
}


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

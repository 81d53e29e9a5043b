"""Algorithms: update rules. They know no store, no world and no file.

Names are imported when they are first used: configs need no torch, everything else does.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from understudy.algorithms.algorithm import Algorithm, AlgorithmError, State
    from understudy.algorithms.offpolicy.classifier import ClassifierTraining, Frames
    from understudy.algorithms.offpolicy.cloning import Cloning
    from understudy.algorithms.offpolicy.config import ClassifierTrainingConfig, CloningConfig, SACConfig
    from understudy.algorithms.offpolicy.dsrl import DSRL
    from understudy.algorithms.offpolicy.sac import SAC

__all__ = [
    "DSRL",
    "SAC",
    "Algorithm",
    "AlgorithmError",
    "ClassifierTraining",
    "ClassifierTrainingConfig",
    "Cloning",
    "CloningConfig",
    "Frames",
    "SACConfig",
    "State",
]

_MODULES = {
    "algorithm": ("Algorithm", "AlgorithmError", "State"),
    "offpolicy.classifier": ("ClassifierTraining", "Frames"),
    "offpolicy.cloning": ("Cloning",),
    "offpolicy.config": ("ClassifierTrainingConfig", "CloningConfig", "SACConfig"),
    "offpolicy.dsrl": ("DSRL",),
    "offpolicy.sac": ("SAC",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value

"""RECAP: what a step is worth, and which steps are worth repeating.

`ValueTraining` needs torch and is imported when it is first used; the other names do not need it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from understudy.algorithms.recap.config import ValueTrainingConfig

if TYPE_CHECKING:
    from understudy.algorithms.recap.value_training import ValueSteps, ValueTraining

__all__ = ["ValueSteps", "ValueTraining", "ValueTrainingConfig"]


def __getattr__(name: str) -> Any:
    if name not in ("ValueSteps", "ValueTraining"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.value_training"), name)

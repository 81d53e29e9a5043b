"""Flow: a small policy that turns noise into a block of actions by flow matching. It needs torch and no transformers.

`FlowConfig` needs no torch; the other names need it and are imported when they are first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from understudy.policies.flow.config import FlowConfig

if TYPE_CHECKING:
    from understudy.policies.flow.model import FlowModel
    from understudy.policies.flow.policy import FlowPolicy

__all__ = ["FlowConfig", "FlowModel", "FlowPolicy"]

_MODULES = {"FlowModel": "model", "FlowPolicy": "policy"}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)

"""VLA: a small vision-language-action policy, built as large ones are.

`VLAConfig` needs no torch; the other names need it and are imported when they are first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from understudy.policies.vla.config import VLAConfig

if TYPE_CHECKING:
    from understudy.policies.vla.model import VLAModel
    from understudy.policies.vla.policy import VLAPolicy

__all__ = ["VLAConfig", "VLAModel", "VLAPolicy"]

_MODULES = {"VLAModel": "model", "VLAPolicy": "policy"}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)

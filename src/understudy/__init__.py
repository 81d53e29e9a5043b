"""Trains robot policies from demonstrations, online experience and human interventions.

    import understudy as us

    with us.Store.open("demos") as store: ...

The names below are loaded when they are first used, so that `import understudy` is fast and needs only numpy.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from understudy.core import ArraySpec, Episode, Source, Spec, Step, StepSpec, UnderstudyError
    from understudy.envs.world import World
    from understudy.policies.protocol import Policy
    from understudy.replay import (
        DEMO,
        EVERYTHING,
        ONLINE,
        Mixture,
        Prefetch,
        Reader,
        Sampler,
        Sequences,
        Store,
        Transitions,
        View,
        Writer,
    )
    from understudy.service import connect

__version__ = "0.1.0"

_MODULES = {
    "understudy.core": ("ArraySpec", "Episode", "Source", "Spec", "Step", "StepSpec", "UnderstudyError"),
    "understudy.envs.world": ("World",),
    "understudy.policies.protocol": ("Policy",),
    "understudy.replay": (
        *("DEMO", "EVERYTHING", "ONLINE", "Mixture", "Prefetch", "Reader", "Sampler", "Sequences", "Store"),
        *("Transitions", "View", "Writer"),
    ),
    "understudy.service": ("connect",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "DEMO",
    "EVERYTHING",
    "ONLINE",
    "ArraySpec",
    "Episode",
    "Mixture",
    "Policy",
    "Prefetch",
    "Reader",
    "Sampler",
    "Sequences",
    "Source",
    "Spec",
    "Step",
    "StepSpec",
    "Store",
    "Transitions",
    "UnderstudyError",
    "View",
    "World",
    "Writer",
    "connect",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

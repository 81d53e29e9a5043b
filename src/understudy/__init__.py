"""Trains robot policies from demonstrations, online experience and human interventions.

    import understudy as us

    with us.Store.open("demos") as store: ...

The names below are loaded when they are first used, so that `import understudy` is fast and needs only numpy.
"""

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from understudy.core import (
        H264,
        ArraySpec,
        Episode,
        EpisodeInfo,
        Jpeg,
        Png,
        Resize,
        Sensor,
        Sensors,
        SequenceBatch,
        Source,
        Spec,
        Step,
        StepSpec,
        TransitionBatch,
        UnderstudyError,
        ages,
        timed_spec,
    )
    from understudy.envs.registry import open_world
    from understudy.envs.world import World
    from understudy.policies.protocol import Policy
    from understudy.replay import (
        DEMO,
        EVERYTHING,
        ONLINE,
        Estimates,
        Fifo,
        FrameCache,
        Mixture,
        Prefetch,
        Prioritized,
        Reader,
        Sampler,
        Sequences,
        Store,
        Transitions,
        Uniform,
        UniformEpisodes,
        View,
        Writer,
    )
    from understudy.service import Server, connect
    from understudy.training import BatchDataset

__version__ = "0.1.0"

_MODULES = {
    "understudy.core": (
        "ArraySpec",
        "Episode",
        "EpisodeInfo",
        "H264",
        "Jpeg",
        "Png",
        "Resize",
        "Sensor",
        "Sensors",
        "SequenceBatch",
        "Source",
        "Spec",
        "Step",
        "StepSpec",
        "TransitionBatch",
        "UnderstudyError",
        "ages",
        "timed_spec",
    ),
    "understudy.envs.registry": ("open_world",),
    "understudy.envs.world": ("World",),
    "understudy.policies.protocol": ("Policy",),
    "understudy.replay": (
        "DEMO",
        "EVERYTHING",
        "ONLINE",
        "Estimates",
        "Fifo",
        "FrameCache",
        "Mixture",
        "Prefetch",
        "Prioritized",
        "Reader",
        "Sampler",
        "Sequences",
        "Store",
        "Transitions",
        "Uniform",
        "UniformEpisodes",
        "View",
        "Writer",
    ),
    "understudy.service": ("Server", "connect"),
    "understudy.training": ("BatchDataset",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "DEMO",
    "EVERYTHING",
    "H264",
    "ONLINE",
    "ArraySpec",
    "BatchDataset",
    "Episode",
    "EpisodeInfo",
    "Estimates",
    "Fifo",
    "FrameCache",
    "Jpeg",
    "Mixture",
    "Png",
    "Policy",
    "Prefetch",
    "Prioritized",
    "Reader",
    "Resize",
    "Sampler",
    "Sensor",
    "Sensors",
    "SequenceBatch",
    "Sequences",
    "Server",
    "Source",
    "Spec",
    "Step",
    "StepSpec",
    "Store",
    "TransitionBatch",
    "Transitions",
    "UnderstudyError",
    "Uniform",
    "UniformEpisodes",
    "View",
    "World",
    "Writer",
    "ages",
    "connect",
    "open_world",
    "timed_spec",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        # With `obj`, Python itself adds "Did you mean".
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name, obj=sys.modules[__name__])
    value = getattr(importlib.import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

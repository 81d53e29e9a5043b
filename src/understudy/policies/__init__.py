"""Policies and success classifiers, and the one file each is saved in.

The names below are loaded when they are first used: only the protocols can be used without torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from understudy.policies.actor import ActorConfig, ActorPolicy
    from understudy.policies.classifier import ClassifierConfig, SuccessClassifier
    from understudy.policies.encoder import EncoderConfig
    from understudy.policies.gripper import Gripper
    from understudy.policies.inputs import Inputs
    from understudy.policies.protocol import Acted, BlockPolicy, Evaluated, Policy, PolicyError, Sampling
    from understudy.policies.stats import Stats

_MODULES = {
    "actor": ("ActorConfig", "ActorPolicy"),
    "classifier": ("ClassifierConfig", "SuccessClassifier"),
    "encoder": ("EncoderConfig",),
    "gripper": ("Gripper",),
    "inputs": ("Inputs",),
    "protocol": ("Acted", "BlockPolicy", "Evaluated", "Policy", "PolicyError", "Sampling"),
    "stats": ("Stats",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "Acted",
    "ActorConfig",
    "ActorPolicy",
    "BlockPolicy",
    "ClassifierConfig",
    "EncoderConfig",
    "Evaluated",
    "Gripper",
    "Inputs",
    "Policy",
    "PolicyError",
    "Sampling",
    "Stats",
    "SuccessClassifier",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value

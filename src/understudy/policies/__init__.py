"""Policies: networks that choose actions or recognize success, and the one file each is saved in.

Names are imported when they are first used: configs and protocols need no torch, everything else does.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from understudy.policies.config import ActorConfig, ClassifierConfig, EncoderConfig, LoraConfig
    from understudy.policies.inputs import Inputs
    from understudy.policies.protocol import Acted, BlockPolicy, Evaluated, Policy, PolicyError, Sampling
    from understudy.policies.rlpd.actor import ActorPolicy
    from understudy.policies.rlpd.classifier import SuccessClassifier
    from understudy.policies.rlpd.gripper import Gripper
    from understudy.policies.stats import Stats

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
    "LoraConfig",
    "Policy",
    "PolicyError",
    "Sampling",
    "Stats",
    "SuccessClassifier",
]

_MODULES = {
    "rlpd.actor": ("ActorPolicy",),
    "rlpd.classifier": ("SuccessClassifier",),
    "config": ("ActorConfig", "ClassifierConfig", "EncoderConfig", "LoraConfig"),
    "rlpd.gripper": ("Gripper",),
    "inputs": ("Inputs",),
    "protocol": ("Acted", "BlockPolicy", "Evaluated", "Policy", "PolicyError", "Sampling"),
    "stats": ("Stats",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value

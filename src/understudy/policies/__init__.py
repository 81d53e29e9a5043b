"""Policies: networks that choose actions or recognize success, and the one file each is saved in.

Names are imported when they are first used: configs and protocols need no torch, everything else does.
"""

import importlib
import os
from typing import TYPE_CHECKING, Any

# torch multiplies matrices with MKL, which reads this when it is first used. By default the last bits of a row depend
# on its place in a batch (with AVX2 in most shapes, with AVX-512 in small ones), so an episode would depend on which
# others act with it. STRICT costs at most some percent.
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")

if TYPE_CHECKING:
    from understudy.policies.config import ActorConfig, ClassifierConfig, EncoderConfig, LoraConfig
    from understudy.policies.inputs import Inputs
    from understudy.policies.protocol import Acted, BlockPolicy, Evaluated, NoisePolicy, Policy, PolicyError, Sampling
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
    "NoisePolicy",
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
    "protocol": ("Acted", "BlockPolicy", "Evaluated", "NoisePolicy", "Policy", "PolicyError", "Sampling"),
    "stats": ("Stats",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value

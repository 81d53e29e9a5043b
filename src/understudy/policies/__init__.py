"""Policies: what acts, what judges success, and the one file each is kept in. Needs torch."""

from understudy.policies.actor import ActorConfig, ActorPolicy
from understudy.policies.classifier import ClassifierConfig, SuccessClassifier
from understudy.policies.encoder import EncoderConfig
from understudy.policies.gripper import Gripper
from understudy.policies.inputs import Inputs
from understudy.policies.protocol import Acted, BlockPolicy, Evaluated, Policy, PolicyError, Sampling
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
    "Policy",
    "PolicyError",
    "Sampling",
    "Stats",
    "SuccessClassifier",
]

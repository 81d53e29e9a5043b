"""A policy in another interpreter, with plain arrays between: for projects whose versions conflict with ours."""

from understudy.policies.subprocess.failures import (
    PolicyProcessDied,
    PolicyProcessError,
    PolicyProcessGarbage,
    PolicyProcessHung,
    PolicyProcessRaised,
)
from understudy.policies.subprocess.policy import ElsewherePolicy, Limits
from understudy.policies.subprocess.policy_factory import PlainPolicy, PolicySource

__all__ = [
    "ElsewherePolicy",
    "Limits",
    "PlainPolicy",
    "PolicyProcessDied",
    "PolicyProcessError",
    "PolicyProcessGarbage",
    "PolicyProcessHung",
    "PolicyProcessRaised",
    "PolicySource",
]

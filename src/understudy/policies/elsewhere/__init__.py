"""A policy in another interpreter, with plain arrays between: for projects whose versions conflict with ours."""

from understudy.policies.elsewhere.failures import (
    PolicyProcessDied,
    PolicyProcessError,
    PolicyProcessGarbage,
    PolicyProcessHung,
    PolicyProcessRaised,
)
from understudy.policies.elsewhere.policy import ElsewherePolicy, Limits
from understudy.policies.elsewhere.source import PlainPolicy, PolicySource

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

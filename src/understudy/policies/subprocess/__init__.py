"""A policy in another interpreter that exchanges plain arrays with us, for projects with conflicting versions."""

from understudy.policies.subprocess.failures import (
    PolicyProcessDied,
    PolicyProcessError,
    PolicyProcessGarbage,
    PolicyProcessHung,
    PolicyProcessRaised,
)
from understudy.policies.subprocess.policy import Limits, SubprocessPolicy
from understudy.policies.subprocess.policy_factory import PlainPolicy, PolicyFactory

__all__ = [
    "Limits",
    "PlainPolicy",
    "PolicyFactory",
    "PolicyProcessDied",
    "PolicyProcessError",
    "PolicyProcessGarbage",
    "PolicyProcessHung",
    "PolicyProcessRaised",
    "SubprocessPolicy",
]

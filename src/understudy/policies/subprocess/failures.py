"""The ways in which a policy in another process fails; the first line says what happened, the rest shows it."""

from __future__ import annotations

from understudy.processes.failures import ProcessDied, ProcessFailure, ProcessGarbage, ProcessHung, ProcessRaised


class PolicyProcessError(ProcessFailure):
    """Base of them. After any but PolicyProcessRaised the process is dead; the next call starts a new one.

    It was doing "build", "act", "evaluate" or "load".
    """

    holds = "policy"


class PolicyProcessRaised(ProcessRaised, PolicyProcessError):
    """The policy, or its construction, raised; `evidence` is the traceback."""


class PolicyProcessHung(ProcessHung, PolicyProcessError):
    """There was no answer in time; `evidence` is the stack at that moment."""


class PolicyProcessDied(ProcessDied, PolicyProcessError):
    """The process ended by itself or was killed by someone else; `evidence` is the end of its log."""


class PolicyProcessGarbage(ProcessGarbage, PolicyProcessError):
    """The answer makes no sense; `evidence` is the end of the log."""

"""The ways in which a subprocess fails. The first line of the message says what happened, the rest is evidence.

Worlds and policies derive their own classes from these, so that callers of a world catch only failures of worlds.
"""

from __future__ import annotations

import signal
from typing import ClassVar

from understudy.core import UnderstudyError


def describe_exit(exit_code: int) -> str:
    """An exit code in words; a negative code is minus the number of the signal that killed the process."""
    if exit_code >= 0:
        return f"ended with exit code {exit_code}"
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:  # a real-time signal
        name = f"signal {-exit_code}"
    return f"was killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")


class ProcessFailure(UnderstudyError):
    """Base of the failures of a subprocess."""

    holds: ClassVar[str]  # what runs in the process, such as "world"

    def __init__(self, summary: str, *, name: str, doing: str, evidence: str = ""):
        super().__init__(f"{name}: {summary}" + (f"\n{evidence.rstrip()}" if evidence.strip() else ""))
        self.name = name  # of what runs in the process
        self.doing = doing  # what it was asked for, such as "reset" or "act"
        self.evidence = evidence  # a traceback, a stack, or the last lines of the log


class ProcessRaised(ProcessFailure):
    """The object in the process, or its constructor, raised; `evidence` is the traceback."""

    def __init__(self, *, name: str, doing: str, error: str, traceback: str):
        summary = f"{doing} raised {error}; mend the {self.holds}, see its traceback"
        super().__init__(summary, name=name, doing=doing, evidence=traceback)
        self.error = error  # such as "ValueError: no such joint"


class ProcessHung(ProcessFailure):
    """The process did not answer in time; `evidence` is its stack at that moment."""

    def __init__(self, *, name: str, doing: str, limit_s: float, stack: str):
        summary = f"{doing} took longer than {limit_s:g} s and was killed; see its stack, or raise the limit"
        super().__init__(summary, name=name, doing=doing, evidence=stack or "(it gave no stack)")
        self.limit_s = limit_s


class ProcessDied(ProcessFailure):
    """The process exited, or somebody else killed it; `evidence` is the end of its log."""

    def __init__(self, *, name: str, doing: str, exit_code: int, log: str):
        summary = f"the process {describe_exit(exit_code)} during {doing}; see the end of its log"
        super().__init__(summary, name=name, doing=doing, evidence=log or "(it wrote nothing)")
        self.exit_code = exit_code


class ProcessGarbage(ProcessFailure):
    """The answer is not a valid message; `evidence` is the end of the log."""

    def __init__(self, *, name: str, doing: str, problem: str, log: str):
        super().__init__(f"{doing} gave no valid answer: {problem}", name=name, doing=doing, evidence=log)
        self.problem = problem

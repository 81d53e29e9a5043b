"""The ways in which a process fails; the first line says what happened, the rest shows it.

Each layer has its own kinds of them, so that who calls a world need not catch what policies do.
"""

from __future__ import annotations

import signal
from typing import ClassVar

from understudy.core import UnderstudyError


def how_ended(exit_code: int) -> str:
    """In words; a negative code is minus the number of the signal that killed it."""
    if exit_code >= 0:
        return f"ended with exit code {exit_code}"
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:  # a real-time signal
        name = f"signal {-exit_code}"
    return f"was killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")


class ProcessFailure(UnderstudyError):
    """Base of them."""

    holds: ClassVar[str]  # what lives in the process, such as "world"

    def __init__(self, summary: str, *, name: str, doing: str, evidence: str = ""):
        super().__init__(f"{name}: {summary}" + (f"\n{evidence.rstrip()}" if evidence.strip() else ""))
        self.name = name  # of who lives in the process
        self.doing = doing  # what it was asked for, such as "reset" or "act"
        self.evidence = evidence  # a traceback, a stack, or the last lines of the log


class ProcessRaised(ProcessFailure):
    """What lives there, or its construction, raised; `evidence` is the traceback."""

    def __init__(self, *, name: str, doing: str, error: str, traceback: str):
        summary = f"{doing} raised {error}; mend the {self.holds}, see its traceback"
        super().__init__(summary, name=name, doing=doing, evidence=traceback)
        self.error = error  # such as "ValueError: no such joint"


class ProcessHung(ProcessFailure):
    """There was no answer in time; `evidence` is the stack at that moment."""

    def __init__(self, *, name: str, doing: str, limit_s: float, stack: str):
        summary = f"{doing} took longer than {limit_s:g} s and was killed; see its stack, or raise the limit"
        super().__init__(summary, name=name, doing=doing, evidence=stack or "(it gave no stack)")
        self.limit_s = limit_s


class ProcessDied(ProcessFailure):
    """It ended by itself or was killed by someone else; `evidence` is the end of its log."""

    def __init__(self, *, name: str, doing: str, exit_code: int, log: str):
        summary = f"the process {how_ended(exit_code)} during {doing}; see the end of its log"
        super().__init__(summary, name=name, doing=doing, evidence=log or "(it wrote nothing)")
        self.exit_code = exit_code


class ProcessGarbage(ProcessFailure):
    """The answer makes no sense; `evidence` is the end of the log."""

    def __init__(self, *, name: str, doing: str, problem: str, log: str):
        super().__init__(f"{doing} gave no valid answer: {problem}", name=name, doing=doing, evidence=log)
        self.problem = problem

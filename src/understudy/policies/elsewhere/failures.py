"""The ways in which a policy in another process fails; the first line says what happened, the rest shows it."""

from __future__ import annotations

import signal

from understudy.core import UnderstudyError


class PolicyProcessError(UnderstudyError):
    """Base of them. After any but PolicyProcessRaised the process is dead; the next call starts a new one."""

    def __init__(self, summary: str, *, policy: str, doing: str, evidence: str = ""):
        super().__init__(f"{policy}: {summary}" + (f"\n{evidence.rstrip()}" if evidence.strip() else ""))
        self.doing = doing  # "build", "act", "evaluate" or "load"
        self.evidence = evidence  # a traceback, a stack, or the last lines of the log


class PolicyProcessRaised(PolicyProcessError):
    """The policy, or its construction, raised; `evidence` is the traceback."""

    def __init__(self, *, policy: str, doing: str, error: str, traceback: str):
        super().__init__(
            f"{doing} raised {error}; mend the policy, see its traceback",
            policy=policy,
            doing=doing,
            evidence=traceback,
        )
        self.error = error  # such as "ValueError: no such joint"


class PolicyProcessHung(PolicyProcessError):
    """There was no answer in time; `evidence` is the stack at that moment."""

    def __init__(self, *, policy: str, doing: str, limit_s: float, stack: str):
        super().__init__(
            f"{doing} took longer than {limit_s:g} s and was killed; see its stack, or raise the limit",
            policy=policy, doing=doing, evidence=stack or "(it gave no stack)",
        )  # fmt: skip
        self.limit_s = limit_s


class PolicyProcessDied(PolicyProcessError):
    """The process ended by itself or was killed by someone else; `evidence` is the end of its log."""

    def __init__(self, *, policy: str, doing: str, exit_code: int, log: str):
        if exit_code < 0:
            names = {int(one): one.name for one in signal.Signals}
            name = names.get(-exit_code, f"signal {-exit_code}")
            how = f"was killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
        else:
            how = f"ended with exit code {exit_code}"
        super().__init__(
            f"the process {how} during {doing}; see the end of its log",
            policy=policy, doing=doing, evidence=log or "(it wrote nothing)",
        )  # fmt: skip
        self.exit_code = exit_code  # minus the number of the signal that killed it


class PolicyProcessGarbage(PolicyProcessError):
    """The answer makes no sense; `evidence` is the end of the log."""

    def __init__(self, *, policy: str, doing: str, problem: str, log: str):
        super().__init__(f"{doing} gave no valid answer: {problem}", policy=policy, doing=doing, evidence=log)
        self.problem = problem

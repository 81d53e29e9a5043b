"""What is said of a process that failed, and who catches it; real ones fail in the tests of workers and policies."""

from __future__ import annotations

import signal

from understudy.envs.workers.outcomes import WorkerFailure, WorkerRaised
from understudy.policies.subprocess import PolicyProcessError, PolicyProcessRaised
from understudy.processes.failures import describe_exit


def test_how_a_process_ended() -> None:
    assert describe_exit(3) == "ended with exit code 3"
    assert describe_exit(-signal.SIGTERM) == "was killed by SIGTERM"
    assert describe_exit(-signal.SIGKILL) == "was killed by SIGKILL (out of memory?)"
    assert describe_exit(-40) == "was killed by signal 40"  # a real-time one, which has no name


def test_each_layer_has_its_own_kinds() -> None:
    world = WorkerRaised(name="toy", doing="step", error="ValueError: no", traceback="Traceback\n  here\n")
    policy = PolicyProcessRaised(name="vla", doing="act", error="ValueError: no", traceback="")
    assert str(world) == "toy: step raised ValueError: no; mend the world, see its traceback\nTraceback\n  here"
    assert str(policy) == "vla: act raised ValueError: no; mend the policy, see its traceback"
    assert isinstance(world, WorkerFailure)
    assert not isinstance(world, PolicyProcessError)
    assert isinstance(policy, PolicyProcessError)

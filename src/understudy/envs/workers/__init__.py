"""Workers run each world in a process of its own and restart it after a crash or a hang."""

from understudy.envs.workers.isolated import IsolatedWorld
from understudy.envs.workers.outcomes import WorkerFailure
from understudy.envs.workers.restarting_worker import Limits, Worker
from understudy.envs.workers.vector import Vector

__all__ = ["IsolatedWorld", "Limits", "Vector", "Worker", "WorkerFailure"]

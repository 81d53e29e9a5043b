"""Workers: worlds in processes of their own, which are replaced when they fail."""

from understudy.envs.workers.isolated import IsolatedWorld
from understudy.envs.workers.outcomes import WorkerFailure
from understudy.envs.workers.restarting_worker import Limits, Worker
from understudy.envs.workers.vector import Vector

__all__ = ["IsolatedWorld", "Limits", "Vector", "Worker", "WorkerFailure"]

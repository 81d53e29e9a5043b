"""Workers: worlds in processes of their own, which are replaced when they fail."""

from understudy.envs.workers.isolated import IsolatedWorld
from understudy.envs.workers.outcomes import WorkerFailure
from understudy.envs.workers.vector import Vector
from understudy.envs.workers.worker import Limits, Worker

__all__ = ["IsolatedWorld", "Limits", "Vector", "Worker", "WorkerFailure"]

"""Environments (worlds), their tasks, the checker for your own world, and the toy table."""

from understudy.envs.check import CheckError, Report, check_env
from understudy.envs.rewards import RewardedWorld
from understudy.envs.simulators.gym import GymWorld
from understudy.envs.suite import Suite, SuiteError, Task
from understudy.envs.toy import ToyTable, script
from understudy.envs.workers.isolated import IsolatedWorld
from understudy.envs.workers.outcomes import WorkerFailure
from understudy.envs.workers.restarting_worker import Limits, Worker
from understudy.envs.workers.vector import Vector
from understudy.envs.world import ExpertAction, World, WorldError, as_gymnasium
from understudy.envs.world_factory import WorldFactory

__all__ = [
    "CheckError",
    "ExpertAction",
    "GymWorld",
    "IsolatedWorld",
    "Limits",
    "Report",
    "RewardedWorld",
    "Suite",
    "SuiteError",
    "Task",
    "ToyTable",
    "Vector",
    "Worker",
    "WorkerFailure",
    "World",
    "WorldError",
    "WorldFactory",
    "as_gymnasium",
    "check_env",
    "script",
]

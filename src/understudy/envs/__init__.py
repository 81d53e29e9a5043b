"""Worlds: what is seen and acted on, the tasks in them, the check for your own, and a toy table."""

from understudy.envs.check import CheckError, Report, check_env
from understudy.envs.isolated import IsolatedWorld
from understudy.envs.outcomes import WorkerFailure
from understudy.envs.source import WorldSource
from understudy.envs.suite import Suite, SuiteError, Task
from understudy.envs.toy import ToyTable
from understudy.envs.toy_script import script
from understudy.envs.vector import Vector
from understudy.envs.worker import Limits, Worker
from understudy.envs.world import World, WorldError, as_gymnasium

__all__ = [
    "CheckError",
    "IsolatedWorld",
    "Limits",
    "Report",
    "Suite",
    "SuiteError",
    "Task",
    "ToyTable",
    "Vector",
    "Worker",
    "WorkerFailure",
    "World",
    "WorldError",
    "WorldSource",
    "as_gymnasium",
    "check_env",
    "script",
]

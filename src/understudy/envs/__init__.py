"""Worlds: what is seen and acted on, the tasks in them, the check for your own, and a toy table."""

from understudy.envs.check import CheckError, Report, check_env
from understudy.envs.suite import Suite, SuiteError, Task
from understudy.envs.toy import ToyTable
from understudy.envs.toy_script import script
from understudy.envs.world import World, WorldError, as_gymnasium

__all__ = [
    "CheckError",
    "Report",
    "Suite",
    "SuiteError",
    "Task",
    "ToyTable",
    "World",
    "WorldError",
    "as_gymnasium",
    "check_env",
    "script",
]

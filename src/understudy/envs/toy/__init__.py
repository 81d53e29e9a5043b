"""The toy table: pick-and-place in numpy, with two cameras, ten tasks and a scripted expert."""

from understudy.envs.toy.tasks import STATE_NAMES, SUITE, TASKS
from understudy.envs.toy.world import ToyTable, script

__all__ = ["STATE_NAMES", "SUITE", "TASKS", "ToyTable", "script"]

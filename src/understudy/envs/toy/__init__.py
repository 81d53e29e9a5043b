"""The toy table: pick-and-place in numpy, with two cameras, ten tasks and an expert."""

from understudy.envs.toy.expert import script
from understudy.envs.toy.world import STATE_NAMES, SUITE, TASKS, ToyTable

__all__ = ["STATE_NAMES", "SUITE", "TASKS", "ToyTable", "script"]

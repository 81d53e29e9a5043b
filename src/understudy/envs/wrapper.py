"""WorldWrapper: a world around another one, to which it passes every call on; subclasses change some of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from understudy.core import Tree
from understudy.envs.suite import Task
from understudy.envs.world import ExpertAction, World, WorldError


class WorldWrapper(World):
    """Has the tasks, versions and expert of `world`, and closes it."""

    def __init__(self, world: World):
        self._world = world
        self.step_spec = world.step_spec
        self.suite = world.suite
        self._task = world.task
        self.version_packages = world.version_packages
        self.deterministic, self.simulated, self.hz = world.deterministic, world.simulated, world.hz

    @property
    def wrapped(self) -> World:
        return self._world

    def begin(self, task: Task, start: int, rng: np.random.Generator) -> None:
        raise WorldError(f"{self._name}: its episodes are begun by reset")

    def advance(self, action: Tree) -> tuple[float, bool, bool, dict[str, Any]]:
        raise WorldError(f"{self._name}: its steps are taken by step")

    def reset_without_observation(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        chosen = {"task": self.task.name, **(options or {})}
        self._state = "not reset"
        info = self._world.reset_without_observation(seed=seed, options=chosen)
        self._task, self._num_steps, self._state = self.suite.task(info["task"]), 0, "running"
        return info

    def step_without_observation(self, action: Tree) -> tuple[float, bool, bool, dict[str, Any]]:
        if self._state != "running":
            self._refuse_step()
        reward, terminated, truncated, info = self._world.step_without_observation(action)
        self._num_steps += 1
        if terminated or truncated:
            self._state = "terminated" if terminated else "truncated"
        return reward, terminated, truncated, info

    def observe(self) -> Tree:
        return self._world.observe()

    def refresh(self) -> None:
        self._world.refresh()

    def extras(self) -> Tree:
        return self._world.extras()

    def labels(self) -> dict[str, str]:
        return self._world.labels()

    def expert_action(self, *, noise: float = 0.0, rng: np.random.Generator | None = None) -> ExpertAction:
        return self._world.expert_action(noise=noise, rng=rng)

    @property
    def has_expert(self) -> bool:
        return self._world.has_expert

    def versions(self) -> dict[str, str]:
        return self._world.versions()

    def close(self) -> None:
        self._world.close()

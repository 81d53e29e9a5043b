"""RewardedWorld: any world with a reward or a success function of your own in place of its own.

In the name of a world, the options `reward` and `success` are Python paths: toy:press_button?success=mine:pressed

    def reward(observation, action, next_observation) -> float: ...
    def success(observation) -> bool: ...  # of the observation after a step
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeAlias

from understudy.core import ArraySpec, Tree
from understudy.core.spec import describe
from understudy.envs.world import World, WorldError
from understudy.envs.world_factory import build
from understudy.envs.wrapper import WorldWrapper
from understudy.processes.python_path import import_object

RewardFunction: TypeAlias = Callable[[Tree, Tree, Tree], float]  # observation, action, next observation
SuccessFunction: TypeAlias = Callable[[Tree], bool]  # of the observation after a step

OPTIONS = ("reward", "success")  # of a world's name


class RewardedWorld(WorldWrapper):
    """Passes every call on to `world`, and observes after every step.

    `success` replaces the world's verdict: the episode terminates when it is true, and the reward is 1 then and 0
    before, unless `reward` says otherwise. An episode that the world itself ends stays ended.
    """

    def __init__(
        self, world: World, *, reward: RewardFunction | None = None, success: SuccessFunction | None = None
    ) -> None:
        super().__init__(world)
        self._reward = reward
        self._success = success
        if reward is not None:
            self.step_spec = replace(world.step_spec, reward=ArraySpec(shape=(), dtype="float32"))
        self._before: Tree = {}  # the observation that the next action answers
        self._fresh: Tree | None = None  # the same, until `observe` has handed it out

    @staticmethod
    def build(
        factory: str, options: Mapping[str, Any], *, reward: str | None = None, success: str | None = None
    ) -> World:
        """Build the world of a factory, with functions by their Python paths."""
        functions = [None if path is None else import_object(path, WorldError) for path in (reward, success)]
        return RewardedWorld(build(factory, options), reward=functions[0], success=functions[1])

    def reset_without_observation(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        info = super().reset_without_observation(seed=seed, options=options)
        self._before = self._fresh = self._world.observe()
        return info

    def refresh(self) -> None:
        super().refresh()
        self._before = self._fresh = self._world.observe()

    def step_without_observation(self, action: Tree) -> tuple[float, bool, bool, dict[str, Any]]:
        before = self._before
        reward, terminated, truncated, info = super().step_without_observation(action)
        after = self._before = self._fresh = self._world.observe()
        if self._success is not None:
            success = bool(self._success(after))
            info = {**info, "success": success}
            reward, terminated = float(success), terminated or success
            truncated = truncated and not terminated
        if self._reward is not None:
            reward = self._checked_reward(self._reward(before, action, after))
        if terminated or truncated:
            self._state = "terminated" if terminated else "truncated"
        return reward, terminated, truncated, info

    def observe(self) -> Tree:
        fresh, self._fresh = self._fresh, None
        return self._world.observe() if fresh is None else fresh

    def _checked_reward(self, reward: Any) -> float:
        try:
            number = float(reward)
        except (TypeError, ValueError):
            number = math.nan
        if not math.isfinite(number):
            raise WorldError(f"reward: expected your function to return a finite number, got {describe(reward)}")
        return number

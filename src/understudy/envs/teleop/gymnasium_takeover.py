"""Takeovers for any Gymnasium environment, as HIL-SERL's intervention wrapper has them.

env = takeover_env(gymnasium.make("PandaPickCube-v0"), Takeover(SpaceMouse(...)))
observation, reward, terminated, truncated, info = env.step(policy_action)
action = info.get("intervene_action", policy_action)  # what was executed
"""

from __future__ import annotations

import importlib
from typing import Any

from understudy.core import Tree
from understudy.envs.teleop.takeover import Takeover, step_with_takeover


def takeover_env(env: Any, takeover: Takeover) -> Any:
    """Wrap a gymnasium.Env: in a takeover `step` executes the device's action; `info` is that of TakeoverWorld."""
    gymnasium = importlib.import_module("gymnasium")  # is there, because `env` is one of its environments

    class TakeoverEnv(gymnasium.Wrapper):  # type: ignore[misc, name-defined]  # gymnasium is optional
        """Passes every other call on to the environment."""

        def reset(self, **options: Any) -> tuple[Tree, dict[str, Any]]:
            takeover.begin()
            observation, info = self.env.reset(**options)
            return observation, info

        def step(self, action: Tree) -> tuple[Any, ...]:
            return step_with_takeover(self.env.step, takeover, action)

        def close(self) -> None:
            takeover.device.close()
            self.env.close()

    return TakeoverEnv(env)

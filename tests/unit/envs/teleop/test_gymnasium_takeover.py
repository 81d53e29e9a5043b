"""Takeovers in a Gymnasium environment that knows nothing of Understudy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.unit.envs.teleop.test_takeover import HUMAN, POLICY, Planned

from understudy.core import Source
from understudy.envs.teleop import Takeover, takeover_env

gymnasium = pytest.importorskip("gymnasium")


class Line(gymnasium.Env):  # type: ignore[misc, name-defined]
    observation_space = gymnasium.spaces.Box(-1, 9, (1,), np.float32)
    action_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32)

    def __init__(self) -> None:
        self.executed: list[float] = []

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.executed = []
        return np.float32([0]), {"seed": seed}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.executed.append(float(action[0]))
        return np.float32([len(self.executed)]), 0.0, False, len(self.executed) == 4, {"left": True}


def test_the_person_acts_and_the_info_is_that_of_hil_serl() -> None:
    device = Planned([False, True, True, False])
    env = takeover_env(Line(), Takeover(device))
    assert env.action_space == Line.action_space
    for _ in range(2):  # counts begin anew with each episode
        assert env.reset(seed=3)[1] == {"seed": 3}
        infos = [env.step(POLICY)[-1] for _ in range(4)]
        assert env.unwrapped.executed == [0.0, 1.0, 1.0, 0.0]
        assert [info.get("intervene_action") is HUMAN for info in infos] == [False, True, True, False]
        assert [info["source"] for info in infos] == [Source.POLICY, Source.HUMAN, Source.HUMAN, Source.POLICY]
        assert all(info["left"] for info in infos)
        assert (infos[-1]["intervention_count"], infos[-1]["intervention_steps"]) == (1, 2)
    env.close()
    assert device.closed

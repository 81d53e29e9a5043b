"""For ../libero_vla.py: libero_spatial with a scripted expert, which looks at the true places of bowl and plate.

Its bowl is always `akita_black_bowl_1`, to be put on `plate_1`. The hand takes it by the rim, its fingers pointing down
as they do at the beginning of an episode.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from understudy.envs.simulators.libero import LiberoWorld
from understudy.envs.world import ExpertAction

BOWL, PLATE = "akita_black_bowl_1", "plate_1"
RIM = np.array([0.0, -0.048, 0.028])  # metres from the bowl's place to that part of its rim which the fingers take
NEAR_M, HELD_M = 0.012, 0.03  # from there, within which fingers that close take it, and closed ones have it
ABOVE_M = 0.1  # how far above things the hand travels
CLOSED_M = 0.02  # between fingers that have the rim, or nothing; open ones are 0.08 apart
GAIN = 12.0  # of an action for a metre


class BowlsWorld(LiberoWorld):
    """Some tasks of libero_spatial, and how to do them."""

    def expert_action(self, *, noise: float = 0.0, rng: np.random.Generator | None = None) -> ExpertAction:
        """It remembers nothing: where hand, bowl and plate are says what comes next. Progress is 1 on the plate."""
        state = self._running.state()
        hand, opening = state[7:10].astype(np.float64), float(state[14] - state[15])
        bowl, plate = self._place(BOWL), self._place(PLATE)
        way, close = _way(hand, opening, bowl, plate)
        action = np.zeros(7)
        action[:3] = GAIN * way
        if noise and rng is not None:
            action[:3] += noise * rng.normal(size=3)
        action[6] = 1.0 if close else -1.0
        far = float(np.linalg.norm((plate - bowl)[:2]))
        return ExpertAction(action=np.clip(action, -1, 1).astype(np.float32), progress=1.0 - far)

    def _place(self, name: str) -> np.ndarray[Any, Any]:
        scene = self._running
        return np.array(scene._data.xpos[scene._env.obj_body_id[name]])


def _way(hand: Any, opening: float, bowl: Any, plate: Any) -> tuple[Any, bool]:
    """Where the hand is to go, in metres, and whether the fingers are to close."""
    rim = bowl + RIM
    if np.linalg.norm(hand - rim) < (NEAR_M if opening > CLOSED_M else HELD_M):
        if opening > CLOSED_M:
            return rim - hand, True
        aside, height = (plate - bowl)[:2], bowl[2] - plate[2]
        if np.linalg.norm(aside) < 0.015:
            return np.array([*aside, -0.03]), height > 0.005
        if height < ABOVE_M / 2:
            return np.array([0.0, 0.0, ABOVE_M]), True
        return np.array([*aside, ABOVE_M - height]), True
    aside = (rim - hand)[:2]
    if np.linalg.norm(aside) < 0.01:
        return rim - hand, False
    return np.array([*aside, rim[2] + ABOVE_M - hand[2]]), False

"""A Gymnasium environment of your own with a scripted expert: demonstrations, cloning, RLPD and a score, from Python.

python examples/own_env.py

From the command line it is `understudy record runs/reach/store --env own_env:world` and so on, see docs/guides/own.md.
"""

from pathlib import Path

import gymnasium as gym
import numpy as np

from understudy.envs import GymWorld
from understudy.training import record_script
from understudy.training.offpolicy.cloning import CloningRunConfig, run_cloning
from understudy.training.offpolicy.local_run import LocalRun
from understudy.training.offpolicy.rlpd import InterventionConfig, RLPDConfig
from understudy.training.runs.evaluate import EvaluationConfig, last_success_rate
from understudy.training.runs.run import Run


class Reach(gym.Env):
    """A point in the plane that is to come to a goal."""

    observation_space = gym.spaces.Box(-2, 2, (4,), np.float32)
    action_space = gym.spaces.Box(-1, 1, (2,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.at, self.goal = self.np_random.uniform(-1, 1, (2, 2))
        return np.float32([*self.at, *self.goal]), {}

    def step(self, action):
        self.at = np.clip(self.at + 0.1 * action, -1, 1)
        there = bool(np.linalg.norm(self.goal - self.at) < 0.15)
        return np.float32([*self.at, *self.goal]), float(there), there, False, {"success": there}


def expert(observation):
    return np.clip(8 * (observation[2:] - observation[:2]), -1, 1)


def world() -> GymWorld:
    """What the name own_env:world builds, here and in the processes of a run."""
    return GymWorld(Reach(), max_steps=40, expert=expert, simulated=True)


def main(folder: str = "runs", demos: int = 20, updates: int = 300, steps: int = 1500, episodes: int = 50) -> None:
    store = Path(folder) / "reach-demos"
    with world() as reach:
        record_script(reach, store, successes=demos)
    evaluation = EvaluationConfig(episodes=episodes)
    cloning = CloningRunConfig(env="own_env:world", demos=str(store), updates=updates, evaluation=evaluation)
    print(
        "behaviour cloning:", run_cloning(Run.create(f"{folder}/reach-clone", "cloning", cloning), print).success_rate
    )
    rlpd = RLPDConfig(
        env="own_env:world",
        demos=str(store),
        steps=steps,
        intervention=InterventionConfig(source="script"),  # the expert takes over when the return stops rising
        evaluation=evaluation,
    )
    run = Run.create(f"{folder}/reach-rlpd", "rlpd", rlpd)
    with LocalRun(run) as training:
        training.run()
    print("RLPD:", last_success_rate(run.metrics))


if __name__ == "__main__":
    main()

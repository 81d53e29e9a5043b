"""Makes data.tar.xz and wanted.json with the real Minari.

    pip install 'minari[all]==0.5.4' pillow; python make.py

Two data sets of one environment: `hdf5-v0` with a Dict of a picture (kept as JPEG), numbers, a number and a text in a
Tuple, and infos; `arrow-v0` the same as Arrow files. wanted.json is what Minari itself reads from the first.
"""

import hashlib
import json
import os
import tarfile
import tempfile
import warnings
from pathlib import Path

import gymnasium as gym
import numpy as np
from gymnasium import spaces

HERE = Path(__file__).parent
warnings.simplefilter("ignore")


class Toy(gym.Env):
    observation_space = spaces.Dict(
        {
            "picture": spaces.Box(0, 255, (32, 40, 3), np.uint8),
            "pose": spaces.Box(-1, 1, (3,), np.float64),
            "goal": spaces.Tuple((spaces.Discrete(5), spaces.Text(20))),
        }
    )
    action_space = spaces.Tuple((spaces.Box(-1, 1, (2,), np.float32), spaces.Discrete(3)))

    def see(self):
        return {
            "picture": np.full((32, 40, 3), 10 * self.time, np.uint8),
            "pose": self.np_random.uniform(-1, 1, 3),
            "goal": (np.int64(self.time), f"goål {self.time}"),
        }

    def info(self):
        return {"success": self.time == 4, "contact": {"force": np.arange(2.0) + self.time}}

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        return self.see(), self.info()

    def step(self, action):
        self.time += 1
        return self.see(), 0.25 * self.time, self.time == 4, False, self.info()


with tempfile.TemporaryDirectory() as folder:
    os.environ["MINARI_DATASETS_PATH"] = folder
    import minari

    for kept in ("hdf5", "arrow"):
        env = minari.DataCollector(Toy(), record_infos=True, data_format=kept)
        env.action_space.seed(0)
        for seed, num_steps in ((7, 4), (8, 2)):
            env.reset(seed=seed)
            for _ in range(num_steps):
                env.step(env.action_space.sample())
        made = env.create_dataset(f"toy/{kept}-v0", algorithm_name="random", author="Understudy", description="Toy")
        env.close()
        if kept == "hdf5":
            wanted = [
                {
                    "pose": episode.observations["pose"].tolist(),
                    "goal": [episode.observations["goal"][0].tolist(), list(episode.observations["goal"][1])],
                    "pictures": hashlib.sha256(episode.observations["picture"].tobytes()).hexdigest(),
                    "arm": episode.actions[0].tolist(),
                    "gripper": episode.actions[1].tolist(),
                    "rewards": episode.rewards.tolist(),
                    "terminations": episode.terminations.tolist(),
                    "truncations": episode.truncations.tolist(),
                    "force": episode.infos["contact"]["force"].tolist(),
                }
                for episode in made.iterate_episodes()
            ]
    (HERE / "wanted.json").write_text(json.dumps(wanted, indent=1) + "\n")
    with tarfile.open(HERE / "data.tar.xz", "w:xz") as archive:
        for kept in ("hdf5", "arrow"):
            archive.add(Path(folder) / "toy" / f"{kept}-v0", f"{kept}-v0")

"""Makes the pickles here as HIL-SERL's scripts do.

    pip install numpy==1.26.4; python make.py

record_demos.py and train_rlpd.py need a robot, so the transitions are made up; their fields, shapes, dtypes and copies
are those of the scripts, and the files are pickled by Python with numpy 1.26, as HIL-SERL's users have it.

    demo_data/*.pkl                 two demonstrations that succeed; idle where the person held still
    run/buffer/transitions_*.pkl    15 steps in files of 5: an episode, one that is reset without done, one still open
    run/demo_buffer/...             those of them that a person chose
"""

import copy
import pickle
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
RNG = np.random.default_rng(0)


def see():
    return {"state": RNG.random((1, 5)).astype(np.float32), "wrist_1": RNG.integers(0, 256, (1, 8, 8, 3), np.uint8)}


def dump(path, transitions):
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        pickle.dump(transitions, file)


def record_demos():
    transitions = []
    for _ in range(2):
        obs = see()
        for time in range(4):
            actions, info = np.zeros((7,)), {"left": False, "right": False, "grasp_penalty": -0.02 * (time == 2)}
            if time != 1:
                info["intervene_action"] = actions = RNG.random(7)
            next_obs, done = see(), time == 3
            info["succeed"] = bool(done)
            transition = {
                "observations": obs,
                "actions": actions,
                "next_observations": next_obs,
                "rewards": int(done),
                "masks": 1.0 - done,
                "dones": done,
                "infos": info,
            }
            transitions.append(copy.deepcopy(transition))
            obs = next_obs
    dump(HERE / "demo_data" / "pick_2_demos_2024-11-05_12-00-00.pkl", transitions)


def train():
    transitions, demo_transitions, obs = [], [], see()
    for step in range(1, 16):
        human = step in (2, 3, 9)
        actions = RNG.random(7) if human else RNG.random(7).astype(np.float32)
        next_obs, done, truncated = see(), step == 6, step == 11
        transition = {
            "observations": obs,
            "actions": actions,
            "next_observations": next_obs,
            "rewards": float(done),
            "masks": 1.0 - done,
            "dones": done,
            "grasp_penalty": 0.0,
        }
        transitions.append(copy.deepcopy(transition))
        if human:
            demo_transitions.append(copy.deepcopy(transition))
        obs = see() if done or truncated else next_obs
        if step % 5 == 0:
            dump(HERE / "run" / "buffer" / f"transitions_{step}.pkl", transitions)
            dump(HERE / "run" / "demo_buffer" / f"transitions_{step}.pkl", demo_transitions)
            transitions, demo_transitions = [], []


record_demos()
train()

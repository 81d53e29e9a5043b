"""Makes the files here.

    pip install h5py numpy; python make.py

robomimic.hdf5 is laid out as robomimic's dataset_states_to_obs.py does it, libero.hdf5 as LIBERO's create_dataset.py:
it steps first and records then, so that obs/joint_states[t] is states[t + 1]. Both scripts need a simulator, so the
numbers are made up.
"""

import json
from pathlib import Path

import h5py
import numpy as np

HERE = Path(__file__).parent
RNG = np.random.default_rng(0)


def robomimic():
    with h5py.File(HERE / "robomimic.hdf5", "w") as file:
        data = file.create_group("data")
        data.attrs["env_args"] = json.dumps({"env_name": "Lift", "type": 1, "env_kwargs": {"reward_shaping": False}})
        for demo, length in (("demo_0", 4), ("demo_2", 3), ("demo_10", 5)):
            group = data.create_group(demo)
            seen = {
                "object": RNG.random((length + 1, 10)),
                "agentview_image": RNG.integers(0, 256, (length + 1, 8, 8, 3), np.uint8),
            }
            for name, rows in seen.items():
                group.create_dataset(f"obs/{name}", data=rows[:-1], compression="gzip")
                group.create_dataset(f"next_obs/{name}", data=rows[1:], compression="gzip")
            group["actions"], group["states"] = RNG.random((length, 7)), RNG.random((length, 32))
            group["rewards"] = np.array([0.0] * (length - 2) + [1.0, 1.0])
            group["dones"] = np.array([0] * (length - 2) + [1, 1])
            group.attrs["num_samples"], group.attrs["model_file"] = length, "<mujoco/>"
        data.attrs["total"] = 12
        file["mask/train"] = np.array(["demo_0", "demo_10"], "S")
        file["mask/valid"] = np.array(["demo_2"], "S")


def libero():
    with h5py.File(HERE / "libero.hdf5", "w") as file:
        data = file.create_group("data")
        data.attrs["env_name"] = "Libero_Object_Tabletop_Manipulation"
        problem = {"problem_name": "libero_floor_manipulation", "language_instruction": ["pick up the milk"]}
        data.attrs["problem_info"] = json.dumps(problem)
        data.attrs["bddl_file_name"] = "chiliocosm/bddl_files/libero_object/pick_up_the_milk.bddl"
        data.attrs["env_args"] = json.dumps(
            {"type": 1, "env_name": "Libero_Object_Tabletop_Manipulation", "env_kwargs": {}}
        )
        for number in range(2):
            group, states = data.create_group(f"demo_{number}"), RNG.random((6, 12))
            group["obs/joint_states"] = states[1:, 1:8]
            group["obs/agentview_rgb"] = RNG.integers(0, 256, (5, 8, 8, 3), np.uint8)
            group["actions"], group["states"] = RNG.random((5, 7)), states[:-1]
            group["robot_states"] = RNG.random((5, 9))
            group["rewards"] = group["dones"] = np.array([0, 0, 0, 0, 1], np.uint8)
            group.attrs["num_samples"], group.attrs["model_file"], group.attrs["init_state"] = 5, "<mujoco/>", states[0]
        data.attrs["num_demos"], data.attrs["total"] = 2, 10


robomimic()
libero()

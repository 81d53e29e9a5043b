"""For ../libero.py: LiberoWorld and LIBERO's own environment, as worlds that say how far they are and what it took.

Both see, besides pictures and state: `physics`, a digest of all positions and velocities; `cpu_s` of the process when
the look was over; `rss_bytes` of it; and `num_built`, how often a simulation was constructed.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from understudy.core import ArraySpec, Spec, StepSpec, Tree
from understudy.envs.simulators.libero import LiberoWorld
from understudy.envs.simulators.libero_scene import SETTLE_ACTION, SETTLE_STEPS, Scene
from understudy.envs.suite import Task

DIGEST_BYTES = 16
MEASURED = {
    "physics": ArraySpec(shape=(DIGEST_BYTES,), dtype="uint8"),
    "cpu_s": ArraySpec(shape=(), dtype="float64"),
    "rss_bytes": ArraySpec(shape=(), dtype="int64"),
    "num_built": ArraySpec(shape=(), dtype="int64"),
}


class Ours(LiberoWorld):
    """LiberoWorld, measured."""

    num_built = 0

    def __init__(self, suite: str, tasks: Sequence[str] | None = None, **options: Any):
        super().__init__(suite, tasks, **options)
        assert isinstance(self.step_spec.observation.tree, dict)
        fields = {**self.step_spec.observation.tree, **MEASURED}
        self.step_spec = StepSpec(observation=Spec(fields), action=self.step_spec.action)

    def observe(self) -> Tree:
        return self._measured(super().observe(), self._running.physics())

    def _scene(self, task: Task) -> Scene:
        self.num_built += task.name not in self._scenes
        return super()._scene(task)

    def _measured(self, seen: Tree, physics: np.ndarray) -> Tree:
        digest = hashlib.blake2b(physics.tobytes(), digest_size=DIGEST_BYTES).digest()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return {
            **seen,
            "physics": np.frombuffer(digest, np.uint8).copy(),
            "num_built": np.asarray(self.num_built),
            "rss_bytes": np.asarray(pages * os.sysconf("SC_PAGE_SIZE")),
            "cpu_s": np.asarray(time.process_time()),
        }


class Stock(Ours):
    """LIBERO's OffScreenRenderEnv as it comes: both cameras after every step, everything loaded anew at each reset.

    Two things are mended, without which LIBERO does not repeat itself: the solver's memory is cleared when an episode
    begins, and so is a list that grows with each reset and has it draw more and more random numbers.

    With `cameras=False` it is the same environment with its pictures turned off, and sees black.
    """

    env: Any = None

    def __init__(self, suite: str, tasks: Sequence[str] | None = None, cameras: bool = True, **options: Any):
        super().__init__(suite, tasks, **options)
        self._with_cameras = cameras

    def begin(self, task: Task, start: int, rng: np.random.Generator) -> None:
        self.close()
        libero = importlib.import_module("libero.libero.envs.env_wrapper")
        file = str(self._bddl_files[task.name])
        if self._with_cameras:
            self.env = libero.OffScreenRenderEnv(
                bddl_file_name=file, camera_heights=self._size, camera_widths=self._size
            )
        else:
            self.env = libero.ControlEnv(bddl_file_name=file, use_camera_obs=False, has_offscreen_renderer=False)
        self.num_built += 1
        self.env.env.object_property_initializers.clear()
        self.env.seed(start)
        self.env.reset()
        self.env.set_init_state(self._starts[task.name][start])
        self.env.sim.data.qacc_warmstart[:] = 0.0
        for _ in range(SETTLE_STEPS):
            self.seen = self.env.step(SETTLE_ACTION)[0]

    def advance(self, action: Tree) -> tuple[float, bool, bool, dict[str, Any]]:
        self.seen, reward, success, _ = self.env.step(action.astype(np.float64))
        return float(reward), bool(success), False, {"success": bool(success)}

    def observe(self) -> Tree:
        black = np.zeros((self._size, self._size, 3), np.uint8)
        theirs = {"agentview": "agentview_image", "wrist": "robot0_eye_in_hand_image"}
        seen = {ours: self.seen.get(name, black)[::-1].copy() for ours, name in theirs.items()}
        seen["state"] = self._arm().astype(np.float32)
        return self._measured(seen, np.concatenate([self.env.sim.data.qpos, self.env.sim.data.qvel]))

    def _arm(self) -> np.ndarray:
        joints, position, quaternion, fingers = (
            self.seen[f"robot0_{part}"] for part in ("joint_pos", "eef_pos", "eef_quat", "gripper_qpos")
        )
        if len(self.state_names) == 16:
            return np.concatenate([joints, position, quaternion, fingers])
        turn = importlib.import_module("robosuite.utils.transform_utils").quat2axisangle(quaternion.copy())
        return np.concatenate([position, turn, fingers])

    def close(self) -> None:
        if self.env is not None:
            self.env.close()
            self.env = None

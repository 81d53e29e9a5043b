"""SimulatedFranka: a Franka Panda with its hand in MuJoCo, simulated in real time, as an Arm.

| loop | does | blocks on | woken by |
|---|---|---|---|
| `franka`, one thread | 500 steps a second: the follower, joint torques towards it, physics | sleep | the clock |

Late steps are made up for. After a pause of more than 50 ms they are skipped: simulated time stood still.
"""

from __future__ import annotations

import importlib
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from understudy.robots.arm import Arm, ArmError, ArmLimits, ArmState, Array
from understudy.robots.kinematics import NUM_JOINTS, Arm7, Follower

logger = logging.getLogger(__name__)

MODEL = Path(__file__).with_name("franka.xml")
HOME_JOINTS = (0.0, 0.0316, 0.0, -2.4247, 0.0, 2.4563, math.pi / 4)
LIMITS = ArmLimits(low=(0.4, -0.2, 0.013), high=(0.65, 0.2, 0.4), max_turn_rad=0.4, max_lag_m=0.01, max_lag_rad=0.1)
OPEN_M = 0.04  # of each finger
MAX_BEHIND_S = 0.05

STIFFNESS = 2000.0  # N/m at the tool point, approximately: the springs are in the joints
STIFFNESS_RANGE = (100.0, 3000.0)
FELT_MASS = 5.0  # kg at the tool point, in the middle of the box
FORCE_RATE = 60.0  # rad/s: of the low-pass filter on measured forces
BRAKE_SHARE = 0.88  # of the maximum speeds: the joints brake above it
BRAKE_RATE = 200.0  # 1/s


class SimulatedFranka(Arm):
    """Seven joints under torque control, two fingers, a table and a cube."""

    simulated = True

    def __init__(self, limits: ArmLimits = LIMITS):
        os.environ.setdefault("MUJOCO_GL", "egl")  # before the import: renders without a screen
        self._mujoco: Any = importlib.import_module("mujoco")
        self.limits = limits
        self.model: Any = self._mujoco.MjModel.from_xml_path(str(MODEL))
        self.data: Any = self._mujoco.MjData(self.model)
        self.lock = threading.Lock()  # held during each step, and by those who read `data`
        # Called after each step with the simulated state, for tests: seconds of the monotonic clock, and the state.
        self.watch: Callable[[float, ArmState], None] | None = None
        self._arm = Arm7(self.model, self.data)
        self._fingers = np.array([self.model.joint(name).qposadr[0] for name in ("left_finger", "right_finger")])
        self._torque_limits = self.model.actuator_ctrlrange[:NUM_JOINTS, 1].copy()
        self._stiffness = STIFFNESS
        self._force = np.zeros(6)
        self.data.qpos[self._arm.qpos] = HOME_JOINTS
        self.data.qpos[self._fingers] = OPEN_M
        self.data.ctrl[NUM_JOINTS:] = OPEN_M
        self._mujoco.mj_forward(self.model, self.data)
        self.home = self._arm.pose()
        self._target = self.home.copy()
        self._follower = Follower(self.model, np.array(HOME_JOINTS), limits)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="franka", daemon=True)
        self._thread.start()

    # --- the five methods ---

    def state(self) -> ArmState:
        with self.lock:
            self._check_running()
            return self._state()

    def move(self, pose: Array) -> None:
        with self.lock:
            self._check_running()
            self._target = np.array(pose, float)

    def grip(self, opening: float) -> None:
        with self.lock:
            self.data.ctrl[NUM_JOINTS:] = OPEN_M * min(1.0, max(0.0, opening))

    def recover(self) -> None:
        """A simulated arm has no error state."""

    def close(self) -> None:
        self._stop.set()
        self._thread.join()

    def tune(self, values: Mapping[str, float]) -> list[str]:
        """Set the stiffness; damping is always critical."""
        rest = dict(values)
        stiffness = rest.pop("translational_stiffness", self._stiffness)
        least, most = STIFFNESS_RANGE
        if not least <= stiffness <= most:
            raise ArmError(f"translational_stiffness: expected {least:g} to {most:g} N/m, got {stiffness:g}")
        with self.lock:
            self._stiffness = stiffness
        return list(rest)

    # --- the scene, which only a simulation can set ---

    def place_cube(self, x: float, y: float) -> None:
        """Put the cube on the table, at rest."""
        cube = self.model.joint("cube")
        with self.lock:
            self.data.qpos[cube.qposadr[0] : cube.qposadr[0] + 7] = (x, y, 0.02, 1.0, 0.0, 0.0, 0.0)
            self.data.qvel[cube.dofadr[0] : cube.dofadr[0] + 6] = 0.0

    def show_target(self, position: tuple[float, float, float]) -> None:
        """Move the green ball; it can be seen but not touched."""
        with self.lock:
            self.data.mocap_pos[0] = position

    # --- the loop ---

    def _run(self) -> None:
        dt = float(self.model.opt.timestep)
        due = time.monotonic()
        while not self._stop.is_set():
            now = time.monotonic()
            if now < due:
                time.sleep(due - now)
                continue
            if now - due > MAX_BEHIND_S:
                due = now
            with self.lock:
                self._step(dt)
                if self.watch is not None:
                    self.watch(time.monotonic(), self._state())
            due += dt

    def _step(self, dt: float) -> None:
        self._mujoco.mj_step1(self.model, self.data)
        self._follower.advance(self._target, dt)
        self.data.ctrl[:NUM_JOINTS] = self._torques()
        self._mujoco.mj_step2(self.model, self.data)
        jacobian = self._arm.jacobian()
        outside = jacobian @ self.data.qfrc_constraint[self._arm.dofs]
        outside = np.linalg.solve(jacobian @ jacobian.T + 1e-4 * np.eye(6), outside)
        self._force += (outside - self._force) * (1.0 - math.exp(-FORCE_RATE * dt))

    def _torques(self) -> Array:
        """Critically damped springs from each joint to the follower's, with gravity and inertia compensated."""
        data, arm, follower = self.data, self._arm, self._follower
        rate = math.sqrt(self._stiffness / FELT_MASS)
        wanted = rate**2 * (follower.q - data.qpos[arm.qpos]) + 2 * rate * (follower.dq - data.qvel[arm.dofs])
        full = np.zeros((self.model.nv, self.model.nv))
        self._mujoco.mj_fullM(self.model, full, data.qM)
        mass = full[np.ix_(arm.dofs, arm.dofs)]
        found = mass @ self._braked(wanted + follower.ddq) + data.qfrc_bias[arm.dofs] - data.qfrc_passive[arm.dofs]
        return np.asarray(np.clip(found, -self._torque_limits, self._torque_limits))

    def _braked(self, acceleration: Array) -> Array:
        """Slow the tool down where it is faster than the follower ever is: the springs would throw it forward when an
        obstacle that held it back lets go."""
        jacobian = self._arm.jacobian()
        vel = jacobian @ self.data.qvel[self._arm.dofs]
        for rows, most in ((slice(0, 3), self.limits.max_speed), (slice(3, 6), self.limits.max_turn_speed)):
            speed = float(np.linalg.norm(vel[rows]))
            if speed <= BRAKE_SHARE * most:
                continue
            along = jacobian[rows].T @ (vel[rows] / speed)  # [joints] the change of this speed by each joint's
            excess = float(along @ acceleration) + BRAKE_RATE * (speed - BRAKE_SHARE * most)
            acceleration = acceleration - along * (max(0.0, excess) / float(along @ along))
        return acceleration

    # --- what is measured ---

    def _state(self) -> ArmState:
        data, arm = self.data, self._arm
        jacobian, rotation = arm.jacobian(), arm.rotation()
        dq = data.qvel[arm.dofs]
        return ArmState(
            pose=arm.pose(),
            vel=jacobian @ dq,
            force=rotation.T @ self._force[:3],
            torque=rotation.T @ self._force[3:],
            q=data.qpos[arm.qpos].copy(),
            dq=dq.copy(),
            jacobian=jacobian,
            gripper=float(data.qpos[self._fingers].sum() / (2 * OPEN_M)),
        )

    def _check_running(self) -> None:
        if not self._thread.is_alive():
            raise ArmError("the simulation has ended; start it again")

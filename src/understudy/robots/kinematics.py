"""Follower: joint angles that follow a commanded pose smoothly, inside the limits of joints and tool. No dynamics.

The simulated arm follows this ideal arm. What the joints cannot reach, the ideal arm does not reach either, so the
simulated arm is never commanded to an impossible pose.
"""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np

from understudy.core.rotation import between
from understudy.robots.arm import ArmLimits, Array

NUM_JOINTS = 7
JOINT_SPEEDS = np.array([2.175, 2.175, 2.175, 2.175, 2.61, 2.61, 2.61])  # rad/s, the Panda's own limits, [7]
FILTER_RATE = 100.0  # rad/s: the commanded pose comes in small jumps, and the follower is some 20 ms behind them
POSTURE_RATE = 2.0  # 1/s: how fast the elbow goes to where it is at home
JOINT_MARGIN = 0.04  # rad from the end of a joint's range, to be reached by slowing down:
JOINT_BRAKE = 8.0  # 1/s
SHARE = 0.9  # of all speeds: for the tool, between what is commanded and what is allowed
JOINT_ACCELERATION = 40.0  # rad/s^2, of the fastest
BALK = 0.25  # joints that could make only this share of a change of speed stop instead
RESTING = 0.1  # rad/s
# Singular values of the Jacobian below which the tool slows down, instead of the joints speeding up.
SINGULAR_M, SINGULAR_RAD = 0.02, 0.1


class Arm7:
    """The frames of the arm in one MuJoCo state: where its joints are, and what follows from them."""

    def __init__(self, model: Any, data: Any):
        self._mujoco: Any = importlib.import_module("mujoco")
        self.model, self.data = model, data
        joints = [model.joint(f"joint{number + 1}") for number in range(NUM_JOINTS)]
        self.qpos = np.array([joint.qposadr[0] for joint in joints])
        self.dofs = np.array([joint.dofadr[0] for joint in joints])
        self.ranges = np.array([joint.range for joint in joints])  # [7, 2]
        self._site = model.site("tool").id

    def pose(self) -> Array:
        quat = np.empty(4)
        self._mujoco.mju_mat2Quat(quat, self.data.site_xmat[self._site])
        return np.concatenate([self.data.site_xpos[self._site], quat[1:], quat[:1]])

    def rotation(self) -> Array:
        return np.asarray(self.data.site_xmat[self._site]).reshape(3, 3)

    def jacobian(self) -> Array:
        full = np.zeros((6, self.model.nv))
        self._mujoco.mj_jacSite(self.model, self.data, full[:3], full[3:], self._site)
        return full[:, self.dofs]

    def place(self, q: Array) -> None:
        """Set the joint angles, and update all frames."""
        self.data.qpos[self.qpos] = q
        self._mujoco.mj_kinematics(self.model, self.data)
        self._mujoco.mj_comPos(self.model, self.data)


class Follower:
    """An arm without mass."""

    def __init__(self, model: Any, home: Array, limits: ArmLimits):
        self._arm = Arm7(model, importlib.import_module("mujoco").MjData(model))
        self._home = np.asarray(home, float)
        self._most = SHARE * np.array([limits.max_speed, limits.max_turn_speed])
        self._low, self._high = self._arm.ranges[:, 0] + JOINT_MARGIN, self._arm.ranges[:, 1] - JOINT_MARGIN
        self.q = self._home.copy()
        self.dq = np.zeros(NUM_JOINTS)
        self.ddq = np.zeros(NUM_JOINTS)
        self._vel = np.zeros(6)  # of the tool
        self._arm.place(self.q)
        self.pose = self._arm.pose()

    def advance(self, target: Array, dt: float) -> None:
        error = np.concatenate([target[:3] - self.pose[:3], between(self.pose[3:], target[3:])])
        wanted = self._vel + dt * (FILTER_RATE**2 * error - 2 * FILTER_RATE * self._vel)
        jacobian = self._arm.jacobian()
        dq = self._joint_speeds(jacobian, wanted * self._slowing(wanted))
        dq = dq * min(1.0, *self._slowing(jacobian @ dq)[[0, 3]])
        # A part of the way from the old speeds to the new ones, or to rest, is within all limits that both ends keep.
        change = dq - self.dq
        if np.abs(change).max() * BALK > JOINT_ACCELERATION * dt and np.abs(self.dq).max() > RESTING:
            change = -self.dq  # near the end of a joint, speeds may jump
        change = change * min(1.0, JOINT_ACCELERATION * dt / max(1e-9, np.abs(change).max()))
        self.ddq = change / dt
        self.dq = self.dq + change
        self._vel = jacobian @ self.dq
        self.q = self.q + dt * self.dq
        self._arm.place(self.q)
        self.pose = self._arm.pose()

    def _slowing(self, vel: Array) -> Array:
        """The factors [6] that bring a speed and a turning speed within their limits."""
        sizes = np.sqrt([vel[:3] @ vel[:3], vel[3:] @ vel[3:]])
        return np.repeat(np.minimum(1.0, self._most / np.maximum(sizes, 1e-9)), 3)

    def _joint_speeds(self, jacobian: Array, vel: Array) -> Array:
        """Joint speeds in range: first for the tool's way, then for its turn as far as that leaves the way alone, last
        for the posture. A joint at its end stands, and the others do what they can."""
        least = np.maximum(JOINT_BRAKE * (self._low - self.q), -SHARE * JOINT_SPEEDS)
        most = np.minimum(JOINT_BRAKE * (self._high - self.q), SHARE * JOINT_SPEEDS)
        fixed = np.zeros(NUM_JOINTS)
        free = np.ones(NUM_JOINTS)
        speeds = fixed
        for _ in range(3):
            left = np.diag(free)  # the motions that nothing before has asked for
            speeds = fixed
            for rows, wanted, smallest in ((jacobian[:3], vel[:3], SINGULAR_M), (jacobian[3:], vel[3:], SINGULAR_RAD)):
                part = rows @ left
                back = part.T @ np.linalg.inv(part @ part.T + smallest**2 * np.eye(3))
                speeds = speeds + back @ (wanted - rows @ speeds)
                left = left - back @ part
            speeds = speeds + left @ (POSTURE_RATE * (self._home - self.q))
            held = np.clip(speeds, least, most)
            over = (held != speeds) & (free > 0)
            if not over.any():
                break
            fixed[over], free[over] = held[over], 0.0
        return np.clip(speeds, least, most)

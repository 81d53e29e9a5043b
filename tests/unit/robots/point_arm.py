"""The smallest arm there can be: a point that goes where it is told. For the server's tests; the docs show it, too."""

from collections.abc import Mapping

import numpy as np

from understudy.robots import Arm, ArmError, ArmLimits, ArmState


class PointArm(Arm):
    limits = ArmLimits(low=(0.2, -0.3, 0.0), high=(0.8, 0.3, 0.5))
    home = np.array([0.5, 0.0, 0.3, 1.0, 0.0, 0.0, 0.0])

    def __init__(self) -> None:
        self.pose = self.home.copy()
        self.opening = 1.0
        self.num_recovered = 0
        self.vel = np.zeros(6)
        self.broken = False
        self.tuned: dict[str, float] = {}
        self.closed = False
        self.num_joint_resets = 0

    def state(self) -> ArmState:
        if self.broken:
            raise OSError("the cable is out")
        return ArmState(
            pose=self.pose.copy(),
            vel=self.vel.copy(),
            force=np.array([1.0, 2.0, 3.0]),
            torque=np.zeros(3),
            q=np.arange(7.0),
            dq=np.zeros(7),
            jacobian=np.ones((6, 7)),
            gripper=self.opening,
        )

    def move(self, pose: np.ndarray) -> None:
        self.pose = pose.copy()

    def grip(self, opening: float) -> None:
        self.opening = opening

    def recover(self) -> None:
        self.num_recovered += 1
        self.broken = False

    def close(self) -> None:
        self.closed = True

    def reset_joints(self) -> None:
        self.num_joint_resets += 1

    def tune(self, values: Mapping[str, float]) -> list[str]:
        if any(value < 0 for value in values.values()):
            raise ArmError("stiffness: expected 0 or more")
        self.tuned.update(values)
        return []

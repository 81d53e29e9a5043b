"""Robots: an arm behind one small server, and what to write for another arm.

`understudy.robots.server` needs the extra `robot` (FastAPI, uvicorn), `understudy.robots.franka` MuJoCo as well.
"""

from understudy.robots.arm import Arm, ArmError, ArmLimits, ArmState

__all__ = ["Arm", "ArmError", "ArmLimits", "ArmState"]

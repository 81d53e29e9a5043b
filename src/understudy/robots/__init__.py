"""Robots: an HTTP server for an arm, the interface to implement for your own arm, and a simulated Franka.

`understudy.robots.server` needs the extra `robot` (FastAPI, uvicorn), `understudy.robots.franka` MuJoCo as well.
"""

from understudy.robots.arm import Arm, ArmError, ArmLimits, ArmState

__all__ = ["Arm", "ArmError", "ArmLimits", "ArmState"]

"""Teleoperation: input devices of operators, and the takeover that replaces the policy's action by theirs."""

from understudy.envs.teleop.gymnasium_takeover import takeover_env
from understudy.envs.teleop.takeover import (
    AlwaysScript,
    Choice,
    Device,
    Reading,
    ScriptedHuman,
    Takeover,
    TakeoverError,
    TakeoverWorld,
)

__all__ = [
    "AlwaysScript",
    "Choice",
    "Device",
    "Reading",
    "ScriptedHuman",
    "Takeover",
    "TakeoverError",
    "TakeoverWorld",
    "takeover_env",
]

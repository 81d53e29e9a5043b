"""People: what they hold, and who acts when somebody does."""

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
]

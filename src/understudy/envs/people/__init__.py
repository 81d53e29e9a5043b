"""People: what they hold, and who acts when somebody does."""

from understudy.envs.people.takeover import (
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

"""LeRobotConfig: what a policy of lerobot does not say of itself. Importing it does not import torch."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from typing import Any

from understudy.policies.protocol import PolicyError

PYTHON_VARIABLE = "UNDERSTUDY_LEROBOT_PYTHON"


@dataclass(frozen=True, kw_only=True)
class LeRobotConfig:
    """How a policy of lerobot is used."""

    python: str | None = None
    """Path of the interpreter that has lerobot. None takes that of the variable UNDERSTUDY_LEROBOT_PYTHON."""
    cameras: tuple[str, ...] | None = None
    """Paths of the camera fields of the observation, in the order of the policy's images. None takes the fields with
    the names of its images, or the only camera for the only image."""
    state: tuple[str, ...] | None = None
    """Paths of the fields that together are the policy's state, in order. None takes the field with the name of it, or
    the only field that is no camera."""
    block_steps: int | None = None
    """Number of actions of a block that are executed. None takes n_action_steps of the policy."""
    tokenizer: str | None = None
    """Directory of the tokenizer, for one that is not in the cache of Hugging Face. None takes that of the policy."""

    def __post_init__(self) -> None:
        if self.block_steps is not None and self.block_steps < 1:
            raise PolicyError(f"block_steps: expected a number from 1, got {self.block_steps}")
        for name in ("cameras", "state"):
            given = getattr(self, name)
            if given is not None and not 1 <= len(set(given)) == len(given):
                raise PolicyError(f"{name}: expected different paths of fields, at least one, got {given}")

    @property
    def interpreter(self) -> str:
        """The path of the interpreter."""
        found = self.python or os.environ.get(PYTHON_VARIABLE)
        if not found:
            raise PolicyError(
                f"python: expected the path of an interpreter that has lerobot, got none; give --lerobot.python or set "
                f"{PYTHON_VARIABLE}"
            )
        return found

    def to_json(self) -> dict[str, Any]:
        """The options that decide on actions: all but the path of the interpreter."""
        return {name: value for name, value in asdict(self).items() if name != "python"}

"""The toy table's tasks: their goals, instructions and suite, and the names of the numbers in its state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from understudy.envs.suite import Suite, Task
from understudy.envs.toy.physics import NOTHING

RED, BLUE, PURPLE = 0, 1, 2
COLOURS = ("red", "blue", "purple")
NUM_STARTS = 500
MAX_STEPS = 100


@dataclass(frozen=True)
class Goal:
    """The goal of a task."""

    kind: Literal["pick", "place", "push", "stack", "press", "touch"]
    block: int = NOTHING
    other: int = NOTHING  # the block to stack on

    @property
    def names(self) -> set[str]:
        """The prefixes of the state names that the goal refers to, and those of the gripper."""
        blocks = {COLOURS[block] for block in (self.block, self.other) if block != NOTHING}
        target = {"place": {"plate"}, "push": {"zone"}, "press": {"button"}}.get(self.kind, set())
        return {"gripper", "opening", "held", *blocks, *target}


# name: instruction, goal
TASKS: dict[str, tuple[str, Goal]] = {
    "pick_red": ("pick up the red block", Goal("pick", RED)),
    "pick_blue": ("pick up the blue block", Goal("pick", BLUE)),
    "red_on_plate": ("put the red block on the green plate", Goal("place", RED)),
    "purple_on_plate": ("put the purple block on the green plate", Goal("place", PURPLE)),
    "push_blue": ("push the blue block to the yellow zone", Goal("push", BLUE)),
    "push_purple": ("push the purple block to the yellow zone", Goal("push", PURPLE)),
    "stack_red_on_blue": ("stack the red block on the blue block", Goal("stack", RED, BLUE)),
    "stack_blue_on_purple": ("stack the blue block on the purple block", Goal("stack", BLUE, PURPLE)),
    "press_button": ("press the button", Goal("press")),
    "touch_purple": ("touch the purple block", Goal("touch", PURPLE)),
}

SUITE = Suite(
    name="toy",
    tasks=tuple(
        Task(name=name, instruction=instruction, num_starts=NUM_STARTS, max_steps=MAX_STEPS)
        for name, (instruction, _) in TASKS.items()
    ),
)

STATE_NAMES = (
    "gripper_x",
    "gripper_y",
    "gripper_z",
    "opening",
    "held",
    *(f"{colour}_{axis}" for colour in COLOURS for axis in "xyz"),
    *(f"{target}_{axis}" for target in ("plate", "zone", "button") for axis in "xy"),
)

"""Slalom: a point that drives past posts, each on the left or on the right as it likes; for benchmarks of acting.

The demonstrations decide at random before each post, so a policy that imitates them has two ways from the same
observation. Two blocks of actions that follow each other may each choose their own, and between them is the post.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from understudy.core import ArraySpec, Spec, StepSpec, Tree
from understudy.envs.suite import Suite, Task
from understudy.envs.world import World

Array = np.ndarray[Any, Any]

INSTRUCTION = "drive past the posts"
MAX_STEPS = 300  # 10 s at 30 Hz
STEP = 1 / 64  # way of one step at full speed; posts are 1 apart
SPEED = 0.8  # along the way, in shares of full speed
SWING = 0.16  # how far beside a post the demonstrations pass it
RADIUS = 0.06  # of a post
LAG = 0.3  # share of the difference to the wanted speed that a step makes up for


class Slalom(World):
    """Observed are the phase between two posts, the distance from the line through them, and the speed."""

    simulated = True
    suite = Suite(
        name="slalom",
        tasks=(Task(name="drive", instruction=INSTRUCTION, num_starts=100, max_steps=MAX_STEPS),),
    )
    step_spec = StepSpec(
        observation=Spec({"state": ArraySpec(shape=(5,), dtype="float32")}),
        action=Spec(ArraySpec(shape=(2,), dtype="float32", low=-1.0, high=1.0)),
    )

    def begin(self, task: Task, start: int, rng: np.random.Generator) -> None:
        del task, rng
        placed = np.random.default_rng(start)
        self.at = np.array([placed.uniform(-0.1, 0.1), placed.normal(0.0, 0.02)])
        self.speed = np.zeros(2)
        self.side = 1.0  # on which the expert passes the next post

    def advance(self, action: Tree) -> tuple[float, bool, bool, dict[str, Any]]:
        self.speed += LAG * (np.asarray(action, float) - self.speed)
        self.at = self.at + STEP * self.speed
        post = math.floor(self.at[0]) + 0.5
        hit = math.dist(self.at, (post, 0.0)) < RADIUS
        ended = self._num_steps + 1 >= MAX_STEPS
        return float(ended and not hit), hit or ended, False, {"success": ended and not hit}

    def observe(self) -> Tree:
        turn = 2 * math.pi * self.at[0]
        return {"state": np.array([math.sin(turn), math.cos(turn), 5 * self.at[1], *self.speed], np.float32)}

    def close(self) -> None:
        """Nothing to release."""

    def demonstrated(self, rng: np.random.Generator) -> Array:
        """The demonstrator's action; at each post it chooses a side anew."""
        x, y = self.at
        if math.floor(x) != math.floor(x - STEP * self.speed[0]):
            self.side = rng.choice((-1.0, 1.0))
        wanted = self.side * SWING * math.sin(math.pi * x) ** 2
        slope = self.side * SWING * math.pi * math.sin(2 * math.pi * x)
        return np.clip([SPEED, SPEED * slope + 6.0 * (wanted - y)], -1, 1).astype(np.float32)


def demonstrations(num_episodes: int, block_steps: int, *, seed: int) -> tuple[Array, Array]:
    """States [N, 5] and the blocks of actions [N, H, 2] that follow them; the point is pushed about a little."""
    rng = np.random.default_rng(seed)
    world = Slalom()
    states, blocks = [], []
    for episode in range(num_episodes):
        observation, _ = world.reset(seed=seed, options={"start": episode % 80})
        world.side = rng.choice((-1.0, 1.0))
        seen: list[Any] = []
        done: list[Any] = []
        ended = False
        while not ended:
            seen.append(observation["state"])
            done.append(world.demonstrated(rng))
            world.at[1] += rng.normal(0.0, 0.002)
            observation, _, ended, _, _ = world.step(done[-1])
        for at in range(len(done) - block_steps):
            states.append(seen[at])
            blocks.append(np.stack(done[at : at + block_steps]))
    return np.stack(states), np.stack(blocks)

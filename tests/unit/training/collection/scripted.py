"""A block policy that is the toy table's expert with noise, and tickets for it; for tests."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from understudy.core import ArraySpec, Spec, Tree
from understudy.envs import ToyTable
from understudy.envs.toy import script
from understudy.envs.toy.physics import Table
from understudy.envs.toy.tasks import TASKS
from understudy.policies import Acted, Evaluated, Sampling
from understudy.training.collection.task_start_plan import Plan, PlanConfig, PlannedTask, Ticket

BINS = 256
GOALS = dict(TASKS.values())  # by instruction


class Scripted:
    """Sees the state, thinks H steps ahead on a table of its own, and adds noise from the row's generator."""

    version = 7
    block_steps = 5
    log_prob_size = 4
    replay_spec = Spec({"tokens": ArraySpec(shape=(5, 4), dtype="int32")})
    has_value = False

    def __init__(self, noise: float = 0.0, good: float = 1.0, has_value: bool = False):
        self.noise, self.good, self.has_value = noise, good, has_value  # `good`: share of blocks that are not random
        self.num_rows: list[int] = []  # of each call
        self.samplings: list[Sampling] = []

    def act(
        self, observation: Tree, instructions: Sequence[str], *, rngs: Sequence[np.random.Generator], sampling: Sampling
    ) -> Acted:
        self.num_rows.append(len(instructions))
        self.samplings.append(sampling)
        rows = [
            self._block(state, instruction, rng, sampling)
            for state, instruction, rng in zip(observation["state"], instructions, rngs, strict=True)
        ]
        tokens = np.stack(rows)
        action = (2 * (tokens + 0.5) / BINS - 1).astype(np.float32)
        log_prob = -np.abs(action) - np.float32(sampling.temperature)
        value = observation["state"][:, 2].astype(np.float32) if self.has_value else None
        return Acted(
            action=action, replay={"tokens": tokens}, log_prob=log_prob.astype(np.float32), value=value, version=7
        )

    def evaluate(
        self, observation: Tree, instructions: Sequence[str], replay: Mapping[str, Any], *, sampling: Sampling
    ) -> Evaluated:
        raise NotImplementedError

    def _block(self, state: Any, instruction: str, rng: np.random.Generator, sampling: Sampling) -> Any:
        world = ToyTable.__new__(ToyTable)
        world.table, world.goal = copy.deepcopy(_table(state)), GOALS[instruction]
        wild = not sampling.greedy and rng.random() >= self.good
        tokens = np.zeros((self.block_steps, 4), np.int32)
        for step in range(self.block_steps):
            action = script(world)
            if not sampling.greedy:
                action = action + self.noise * rng.normal(size=4)
                action = rng.uniform(-1, 1, 4) if wild else action
            tokens[step] = np.clip((action + 1) / 2 * BINS, 0, BINS - 1).astype(np.int32)
            world.table.act(*(2 * (tokens[step] + 0.5) / BINS - 1).tolist())
        return tokens


def _table(state: Any) -> Table:
    numbers = [float(number) for number in state]
    blocks = [numbers[5 + 3 * index : 8 + 3 * index] for index in range(3)]
    near = min(range(3), key=lambda index: float(np.abs(np.subtract(blocks[index], numbers[:3])).sum()))
    return Table(
        gripper=numbers[:3],
        opening=numbers[3],
        held=near if numbers[4] else -1,
        blocks=blocks,
        plate=(numbers[14], numbers[15]),
        zone=(numbers[16], numbers[17]),
        button=(numbers[18], numbers[19]),
    )


def make_plan(*names: str, starts: int = 40, **options: Any) -> Plan:
    tasks = [PlannedTask(name=name, starts=tuple(range(starts))) for name in names or ("press_button", "touch_purple")]
    return Plan(PlanConfig(**options), tasks)


def make_tickets(num_groups: int, *names: str, **options: Any) -> tuple[Ticket, ...]:
    n_samples = options.setdefault("n_samples", 4)
    plan = make_plan(*names, **{"data_batch_size": n_samples * num_groups, **options})
    plan.next_iteration()
    return plan.wave(num_groups)

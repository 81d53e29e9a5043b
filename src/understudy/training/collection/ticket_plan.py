"""Plan: which episodes are lived next. Its tickets are a pure function of its state: no clock, no worker, no luck.

plan = Plan(PlanConfig(n_samples=8, data_batch_size=64), [PlannedTask(name="pick_red", starts=(0, 1, 2))])
plan.next_iteration()
tickets = plan.wave(8)  # of eight groups
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from understudy.training.runs.config import ConfigError, to_json


@dataclass(frozen=True, kw_only=True)
class Ticket:
    """One promised episode. It is lived, or it is known why not; it is never missing."""

    number: int  # from 0, in all iterations
    iteration: int  # in which it was given out
    task: str
    start: int
    seed: int  # of the policy's draws
    group: int  # from 0, in all iterations
    slot: int  # in its group
    world_seed: int  # of the world's own chance; the same in a group that shares its start


@dataclass(frozen=True, kw_only=True)
class PlannedTask:
    """A task and the start states that it may begin from, in the order in which they are used."""

    name: str
    starts: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.starts or len(set(self.starts)) < len(self.starts):
            raise ConfigError(
                f"task {self.name!r}/starts: expected different ones, at least one, got {list(self.starts)[:20]}"
            )


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """What an iteration asks for."""

    n_samples: int = 8  # K: the episodes of a group, which are compared with each other
    data_batch_size: int = 64  # the episodes of an iteration, in whole groups
    group_by: Literal["start", "task"] = "start"  # K episodes from one start, or from K starts of one task
    tasks_per_iteration: int | None = None  # None: as many as there are groups; 1: one after the other
    max_waves: int = 8  # of an iteration: how often groups are asked for before it goes on with what there is
    wave_groups: int = 1  # a wave has at least so many, to fill the workers; a number of the plan, not of a machine
    skip_solved_for: int = 0  # iterations in which a start is passed over once all of its group succeeded
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (
            ("n_samples", 1),
            ("data_batch_size", 1),
            ("max_waves", 1),
            ("wave_groups", 1),
            ("skip_solved_for", 0),
            ("seed", 0),
        ):
            if type(getattr(self, name)) is not int or getattr(self, name) < least:
                raise ConfigError(f"{name}: expected a whole number from {least}, got {getattr(self, name)!r}")
        if self.tasks_per_iteration is not None and self.tasks_per_iteration < 1:
            raise ConfigError(f"tasks_per_iteration: expected 1 or more, or None, got {self.tasks_per_iteration}")
        if self.group_by not in ("start", "task"):
            raise ConfigError(f"group_by: expected 'start' or 'task', got {self.group_by!r}")
        if self.data_batch_size % self.n_samples:
            near = max(self.data_batch_size // self.n_samples, 1) * self.n_samples
            raise ConfigError(
                f"data_batch_size: expected a multiple of n_samples ({self.n_samples}), since groups are whole, got "
                f"{self.data_batch_size}; choose {near}"
            )

    @property
    def num_groups(self) -> int:
        """Of an iteration."""
        return self.data_batch_size // self.n_samples


class Plan:
    """A ring over tasks, and for each task a ring over its starts. Both move by what was given out, and no further."""

    def __init__(self, config: PlanConfig, tasks: Sequence[PlannedTask]):
        self.config = config
        self.tasks = tuple(tasks)
        self._starts = {task.name: task.starts for task in self.tasks}
        if not self.tasks or len(self._starts) < len(self.tasks):
            raise ConfigError(
                f"tasks: expected different names, at least one, got {[task.name for task in self.tasks]}"
            )
        for task in self.tasks:
            if config.group_by == "task" and len(task.starts) < config.n_samples:
                raise ConfigError(
                    f"task {task.name!r}: has {len(task.starts)} starts, and group_by='task' compares "
                    f"{config.n_samples} different ones; lower n_samples, or use group_by='start'"
                )
        self._iteration = -1
        self._cursor = 0  # of the tasks
        self._rings = {task.name: 0 for task in self.tasks}
        self._active: list[int] = []  # tasks of this iteration, known from its first wave on
        self._dealt = 0  # groups of this iteration
        self._next_ticket = self._next_group = 0
        self._skipped: dict[str, dict[int, int]] = {task.name: {} for task in self.tasks}  # start: last iteration

    @property
    def iteration(self) -> int:
        """The present one, from 0; -1 before the first."""
        return self._iteration

    def next_iteration(self) -> int:
        """Begin an iteration; its tasks are chosen when the first wave is asked for."""
        self._iteration += 1
        self._active, self._dealt = [], 0
        for skipped in self._skipped.values():
            for start in [start for start, until in skipped.items() if until < self._iteration]:
                del skipped[start]
        return self._iteration

    def wave(self, num_groups: int) -> tuple[Ticket, ...]:
        """The tickets of the next groups, dealt to the iteration's tasks in turn. The first wave chooses these: as many
        as it has groups, unless `tasks_per_iteration` says fewer."""
        if self._iteration < 0 or num_groups < 1:
            raise ConfigError(f"wave: expected a number from 1 within an iteration, got {num_groups}; see Plan")
        if not self._active:
            num_tasks = min(self.config.tasks_per_iteration or num_groups, num_groups, len(self.tasks))
            self._active = [(self._cursor + index) % len(self.tasks) for index in range(num_tasks)]
            self._cursor = (self._cursor + num_tasks) % len(self.tasks)
        tickets: list[Ticket] = []
        for _ in range(num_groups):
            tickets += self._group(self.tasks[self._active[self._dealt % len(self._active)]].name)
            self._dealt += 1
        return tuple(tickets)

    def solved(self, task: str, starts: Sequence[int]) -> None:
        """Say that every episode of a group succeeded, so that its starts are passed over for a while."""
        for start in starts if self.config.skip_solved_for else ():
            self._skipped[task][start] = self._iteration + self.config.skip_solved_for

    def share(self, tickets: Sequence[Ticket], rank: int, world_size: int) -> list[Ticket]:
        """The tickets that one of several processes lives: those of its tasks."""
        mine = {self.tasks[index].name for index in shares(len(self.tasks), world_size)[rank]}
        return [ticket for ticket in tickets if ticket.task in mine]

    def state(self) -> dict[str, Any]:
        """All that the next tickets depend on, as plain JSON."""
        return {
            "config": to_json(self.config),
            "tasks": {task.name: list(task.starts) for task in self.tasks},
            "iteration": self._iteration,
            "cursor": self._cursor,
            "rings": dict(self._rings),
            "active": list(self._active),
            "dealt": self._dealt,
            "next_ticket": self._next_ticket,
            "next_group": self._next_group,
            "skipped": {name: [list(pair) for pair in skipped.items()] for name, skipped in self._skipped.items()},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on as the plan that the state was taken of would have. If it refuses, nothing changed."""
        mine = self.state()
        if missing := mine.keys() - state.keys():
            raise ConfigError(f"plan/{min(missing)}: expected it in the saved state, got nothing; save all of state()")
        for name, value in mine["config"].items():
            if state["config"].get(name) != value:
                raise ConfigError(
                    f"plan/{name}: the state was saved with {state['config'].get(name)!r}, this plan has {value!r}; "
                    f"resume with the saved config, or begin a new run"
                )
        if list(state["tasks"].items()) != list(mine["tasks"].items()):
            raise ConfigError(
                f"plan/tasks: the state was saved with {list(state['tasks'])}, this plan has {list(mine['tasks'])}, or "
                f"with other starts; resume with the same world and tasks"
            )
        self._iteration, self._cursor = int(state["iteration"]), int(state["cursor"])
        self._rings = {name: int(state["rings"][name]) for name in self._rings}
        self._active, self._dealt = [int(index) for index in state["active"]], int(state["dealt"])
        self._next_ticket, self._next_group = int(state["next_ticket"]), int(state["next_group"])
        self._skipped = {
            name: {int(start): int(until) for start, until in state["skipped"][name]} for name in self._skipped
        }

    # --- stages of `wave` ---

    def _group(self, task: str) -> list[Ticket]:
        size, shared = self.config.n_samples, self.config.group_by == "start"
        starts = self._take(task, 1) * size if shared else self._take(task, size)
        number, group = self._next_ticket, self._next_group
        seeds = [derived_seed(self.config.seed, number + slot) for slot in range(size)]
        self._next_ticket, self._next_group = number + size, group + 1
        return [
            Ticket(
                number=number + slot,
                iteration=self._iteration,
                task=task,
                start=start,
                seed=seed,
                group=group,
                slot=slot,
                world_seed=seeds[0] if shared else seed,
            )
            for slot, (start, seed) in enumerate(zip(starts, seeds, strict=True))
        ]

    def _take(self, task: str, num_starts: int) -> list[int]:
        """The next different starts of a task's ring, past those that are skipped, as long as there are others."""
        starts, first, skipped = self._starts[task], self._rings[task], self._skipped[task]
        lap = [(first + step) % len(starts) for step in range(len(starts))]
        places = [place for place in lap if starts[place] not in skipped][:num_starts]
        if len(places) < num_starts:  # nearly all are solved: those are better than none
            places += [place for place in lap if starts[place] in skipped][: num_starts - len(places)]
        self._rings[task] = (first + max((place - first) % len(starts) for place in places) + 1) % len(starts)
        return [starts[place] for place in places]


def shares(num_tasks: int, world_size: int) -> list[list[int]]:
    """Which tasks each of several processes lives; with more processes than tasks some have none."""
    return [list(range(rank, num_tasks, world_size)) for rank in range(world_size)]


def derived_seed(seed: int, number: int) -> int:
    """The seed of ticket `number`, 63 bits that depend on nothing else."""
    return int(np.random.SeedSequence([seed, number]).generate_state(1, np.uint64)[0] >> 1)

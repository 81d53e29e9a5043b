"""Plan: which task and start state come next. Its tickets depend on its state alone, not on time or workers.

plan = Plan(PlanConfig(n_samples=8, data_batch_size=64), [PlannedTask(name="pick_red", starts=(0, 1, 2))])
plan.next_iteration()
tickets = plan.wave(8)  # the tickets of eight groups
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from understudy.training.runs.config import ConfigError, to_json


@dataclass(frozen=True, kw_only=True)
class Ticket:
    """One requested episode. It is run, or the reason why not is known; it is never missing."""

    number: int  # from 0, over all iterations
    iteration: int  # that requested it
    task: str
    start: int
    seed: int  # of the policy's sampling
    group: int  # from 0, over all iterations
    slot: int  # position in its group
    world_seed: int  # of the world's own randomness; the same in a group that shares its start


@dataclass(frozen=True, kw_only=True)
class PlannedTask:
    """A task and its start states, in the order in which they are used."""

    name: str
    starts: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.starts or len(set(self.starts)) < len(self.starts):
            raise ConfigError(
                f"task {self.name!r}/starts: expected different ones, at least one, got {list(self.starts)[:20]}"
            )


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """Which episodes an iteration requests."""

    n_samples: int = 8
    """Number of episodes in a group; they are compared with each other."""
    data_batch_size: int = 64
    """Number of episodes that an iteration learns from, a multiple of the group size."""
    group_by: Literal["start", "task"] = "start"
    """Whether the episodes of a group share one start state, or only the task and have different start states."""
    tasks_per_iteration: int | None = None
    """Number of different tasks in an iteration; None takes as many as there are groups."""
    max_waves: int = 8
    """Number of times that an iteration requests further groups for rejected ones before it learns from fewer."""
    wave_groups: int = 1
    """Minimum number of groups that are requested at once, to keep all workers busy."""
    skip_solved_for: int = 0
    """Number of iterations for which a start state is skipped after all episodes of its group succeeded."""
    seed: int = 0
    """Seed of the episodes, added to the seed of the run."""

    def __post_init__(self) -> None:
        for name, minimum in (
            ("n_samples", 1),
            ("data_batch_size", 1),
            ("max_waves", 1),
            ("wave_groups", 1),
            ("skip_solved_for", 0),
            ("seed", 0),
        ):
            if type(getattr(self, name)) is not int or getattr(self, name) < minimum:
                raise ConfigError(f"{name}: expected a whole number from {minimum}, got {getattr(self, name)!r}")
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
        """Number of groups of an iteration."""
        return self.data_batch_size // self.n_samples


class Plan:
    """Cycles over the tasks, and over the starts of each task. Both advance by what was requested, and no further."""

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
        self._cursor = 0  # the next task
        self._rings = {task.name: 0 for task in self.tasks}
        self._active: list[int] = []  # tasks of this iteration, chosen by its first wave
        self._dealt = 0  # groups of this iteration so far
        self._next_ticket = self._next_group = 0
        self._skipped: dict[str, dict[int, int]] = {task.name: {} for task in self.tasks}  # start: last iteration

    @property
    def iteration(self) -> int:
        """The present iteration, from 0; -1 before the first."""
        return self._iteration

    def next_iteration(self) -> int:
        """Begin an iteration; its first wave chooses its tasks."""
        self._iteration += 1
        self._active, self._dealt = [], 0
        for skipped in self._skipped.values():
            for start in [start for start, until in skipped.items() if until < self._iteration]:
                del skipped[start]
        return self._iteration

    def wave(self, num_groups: int) -> tuple[Ticket, ...]:
        """The tickets of the next groups, assigned to the iteration's tasks in turn.

        The first wave chooses the tasks: as many as it has groups, unless `tasks_per_iteration` says fewer.
        """
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
        """Report that every episode of a group succeeded, so that its starts are skipped for some iterations."""
        for start in starts if self.config.skip_solved_for else ():
            self._skipped[task][start] = self._iteration + self.config.skip_solved_for

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
        """Continue as the plan that the state was taken from. If this raises, nothing changed."""
        mine = self.state()
        if missing := mine.keys() - state.keys():
            raise ConfigError(f"plan/{min(missing)}: expected it in the saved state, got nothing; save all of state()")
        for name, value in mine["config"].items():
            if state["config"].get(name) != value:
                raise ConfigError(
                    f"plan/{name}: the state was saved with {state['config'].get(name)!r}, this plan has {value!r}; "
                    f"resume with the saved config, or start a new run"
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
        """The next different starts of a task. Skipped ones are used only if there are not enough others."""
        starts, first, skipped = self._starts[task], self._rings[task], self._skipped[task]
        lap = [(first + step) % len(starts) for step in range(len(starts))]
        positions = [position for position in lap if starts[position] not in skipped][:num_starts]
        if len(positions) < num_starts:  # nearly all are solved: solved ones are better than none
            positions += [position for position in lap if starts[position] in skipped][: num_starts - len(positions)]
        self._rings[task] = (first + max((position - first) % len(starts) for position in positions) + 1) % len(starts)
        return [starts[position] for position in positions]


def derived_seed(seed: int, number: int) -> int:
    """The seed of ticket `number`: 63 bits that depend on these two numbers alone."""
    return int(np.random.SeedSequence([seed, number]).generate_state(1, np.uint64)[0] >> 1)

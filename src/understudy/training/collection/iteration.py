"""Iteration: waves of tickets until there are as many good groups as were asked for, or it is said why not.

Groups are judged when their whole wave is over, in the order of their tickets. Those that are not needed any more are
carried over to the next iteration, with the log-probs and versions they were lived with.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeAlias

from understudy.core import EpisodeError
from understudy.training.collection.groups import FilterConfig, Group, Reason, in_groups, judge
from understudy.training.collection.rollout import Rollout
from understudy.training.collection.ticket_plan import Plan, PlanConfig, Ticket

# Lives tickets, here or in many processes; the rollouts come back in the order of the tickets.
Collect: TypeAlias = Callable[[Sequence[Ticket]], Sequence[Rollout]]


@dataclass(kw_only=True)
class TaskReport:
    """What came of a task's groups in one iteration."""

    kept: int = 0  # groups in the batch
    carried: int = 0  # groups for the next iteration
    dropped: dict[Reason, int] = field(default_factory=dict)
    episodes: int = 0  # lived in this iteration, whatever became of them
    successes: int = 0
    failures: int = 0  # tickets that failed for good


@dataclass(frozen=True, kw_only=True)
class Report:
    """What came of an iteration, task by task."""

    iteration: int
    num_waves: int
    num_wanted: int  # groups
    tasks: dict[str, TaskReport]
    failures: tuple[str, ...]  # what happened to tickets that failed for good

    @property
    def num_kept(self) -> int:
        return sum(task.kept for task in self.tasks.values())

    @property
    def num_episodes(self) -> int:
        return sum(task.episodes for task in self.tasks.values())

    @property
    def num_successes(self) -> int:
        return sum(task.successes for task in self.tasks.values())

    @property
    def dropped(self) -> dict[Reason, int]:
        total: Counter[Reason] = Counter()
        for task in self.tasks.values():
            total.update(task.dropped)
        return dict(total)

    def __str__(self) -> str:
        carried = sum(task.carried for task in self.tasks.values())
        reasons = ", ".join(f"{count} {reason}" for reason, count in self.dropped.items())
        return (
            f"iteration {self.iteration}: {self.num_kept} of {self.num_wanted} groups after {self.num_waves} wave"
            f"{'s' if self.num_waves != 1 else ''}, "
            f"{carried} carried over, dropped: {reasons or 'none'}; "
            f"{self.num_successes} of {self.num_episodes} episodes succeeded"
        )

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "kept": self.num_kept, "dropped": self.dropped, "failures": list(self.failures)}


@dataclass(frozen=True, kw_only=True, eq=False)
class Collected:
    """The batch of an iteration, what is left for the next, and how it came about."""

    groups: tuple[Group, ...]
    carried: tuple[Group, ...]
    report: Report
    lived: tuple[Rollout, ...]  # all of this iteration, those that were dropped too: for the store

    @property
    def rollouts(self) -> list[Rollout]:
        """Exactly `data_batch_size`, in whole groups, unless `short`."""
        return [rollout for group in self.groups for rollout in group.rollouts]

    @property
    def short(self) -> bool:
        """Whether `max_waves` came before the batch was full; the report says which groups were dropped and why."""
        return self.report.num_kept < self.report.num_wanted


def collect_iteration(plan: Plan, collect: Collect, filters: FilterConfig, carried: Sequence[Group] = ()) -> Collected:
    """The next iteration of a plan: groups that were carried over, then waves of new ones."""
    iteration, config = plan.next_iteration(), plan.config
    tasks = {task.name: TaskReport() for task in plan.tasks}
    kept: list[Group] = []
    lived: list[Rollout] = []
    num_waves = 0
    for group in carried:
        if _too_old(group, iteration, filters):
            _drop(tasks, group, "too old")
        else:
            kept.append(group)
    while len(kept) < config.num_groups and num_waves < config.max_waves:
        tickets = plan.wave(_wave_size(config, len(kept)))
        rollouts = _promised(tickets, collect(tickets))
        num_waves += 1
        lived += rollouts
        for group in in_groups(rollouts, config.n_samples):
            _count(tasks[group.task], group)
            if group.solved:
                plan.solved(group.task, group.starts)
            reason = judge(group, filters)
            if reason is None:
                kept.append(group)
            else:
                _drop(tasks, group, reason)
    batch, surplus = kept[: config.num_groups], kept[config.num_groups :]
    for group in batch:
        tasks[group.task].kept += 1
    left = _surplus(surplus, tasks, filters, iteration)
    report = Report(
        iteration=iteration,
        num_waves=num_waves,
        num_wanted=config.num_groups,
        tasks=tasks,
        failures=tuple(rollout.failure for rollout in lived if rollout.failure is not None),
    )
    return Collected(groups=tuple(batch), carried=left, report=report, lived=tuple(lived))


def first_wave(plan: Plan, filters: FilterConfig, carried: Sequence[Group] = ()) -> tuple[Ticket, ...]:
    """The tickets with which the next iteration will begin; the plan stays where it is."""
    plan = copy.deepcopy(plan)
    iteration = plan.next_iteration()
    num_kept = sum(not _too_old(group, iteration, filters) for group in carried)
    return plan.wave(_wave_size(plan.config, num_kept)) if num_kept < plan.config.num_groups else ()


def _wave_size(config: PlanConfig, num_kept: int) -> int:
    return max(config.num_groups - num_kept, config.wave_groups)


def _too_old(group: Group, iteration: int, filters: FilterConfig) -> bool:
    return iteration - group.iteration > filters.max_age


def _promised(tickets: Sequence[Ticket], rollouts: Sequence[Rollout]) -> Sequence[Rollout]:
    """Refuse rollouts that are not those of the tickets."""
    if [rollout.ticket for rollout in rollouts] != list(tickets):
        raise EpisodeError(
            f"collect: expected the rollouts of {len(tickets)} tickets in their order, got {len(rollouts)}; return one "
            f"for each, those that failed included"
        )
    return rollouts


def _count(task: TaskReport, group: Group) -> None:
    task.episodes += len(group.rollouts)
    task.successes += group.num_successes
    task.failures += sum(rollout.failed for rollout in group.rollouts)


def _surplus(
    groups: Sequence[Group], tasks: dict[str, TaskReport], filters: FilterConfig, iteration: int
) -> tuple[Group, ...]:
    """Those that the next iteration may still use."""
    left = []
    for group in groups:
        if _too_old(group, iteration + 1, filters):
            _drop(tasks, group, "too old")
        else:
            left.append(group)
            tasks[group.task].carried += 1
    return tuple(left)


def _drop(tasks: dict[str, TaskReport], group: Group, reason: Reason) -> None:
    dropped = tasks[group.task].dropped
    dropped[reason] = dropped.get(reason, 0) + 1

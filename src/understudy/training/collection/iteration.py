"""Iteration: collects waves of tickets until enough groups are kept, or reports why there are fewer.

The filter sees groups when their whole wave is finished, in the order of their tickets. Surplus groups are carried over
to the next iteration, with the log-probs and policy versions of their episodes.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeAlias

from understudy.core import EpisodeError
from understudy.training.collection.group_filter import FilterConfig, RejectionReason, rejection_reason
from understudy.training.collection.groups import Group, group_rollouts
from understudy.training.collection.rollout import Rollout
from understudy.training.collection.task_start_plan import Plan, PlanConfig, Ticket

# Runs tickets, in this process or in many; returns the rollouts in the order of the tickets.
Collect: TypeAlias = Callable[[Sequence[Ticket]], Sequence[Rollout]]


@dataclass(kw_only=True)
class TaskReport:
    """The groups of one task in one iteration."""

    kept: int = 0  # groups in the batch
    carried: int = 0  # groups for the next iteration
    rejected: dict[RejectionReason, int] = field(default_factory=dict)  # groups
    episodes: int = 0  # of this iteration, those of rejected groups included
    successes: int = 0
    failures: int = 0  # tickets that failed for good


@dataclass(frozen=True, kw_only=True)
class IterationReport:
    """The groups of one iteration, by task."""

    iteration: int
    num_waves: int
    num_requested: int  # groups
    tasks: dict[str, TaskReport]
    failures: tuple[str, ...]  # why tickets failed for good

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
    def rejected(self) -> dict[RejectionReason, int]:
        """Number of rejected groups by reason."""
        total: Counter[RejectionReason] = Counter()
        for task in self.tasks.values():
            total.update(task.rejected)
        return dict(total)

    def __str__(self) -> str:
        carried = sum(task.carried for task in self.tasks.values())
        reasons = ", ".join(f"{count} {reason}" for reason, count in self.rejected.items())
        return (
            f"iteration {self.iteration}: {self.num_kept} of {self.num_requested} groups after {self.num_waves} wave"
            f"{'s' if self.num_waves != 1 else ''}, "
            f"{carried} carried over, rejected: {reasons or 'none'}; "
            f"{self.num_successes} of {self.num_episodes} episodes succeeded"
        )

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "kept": self.num_kept, "rejected": self.rejected, "failures": list(self.failures)}


@dataclass(frozen=True, kw_only=True, eq=False)
class CollectedIteration:
    """The groups to learn from, those carried over to the next iteration, and a report."""

    groups: tuple[Group, ...]
    carried: tuple[Group, ...]
    report: IterationReport
    all_rollouts: tuple[Rollout, ...]  # of this iteration, those of rejected groups included

    @property
    def rollouts(self) -> list[Rollout]:
        """The rollouts to learn from: exactly `data_batch_size`, unless `short`."""
        return [rollout for group in self.groups for rollout in group.rollouts]

    @property
    def short(self) -> bool:
        """Whether `max_waves` ended the iteration before the batch was full; see `report.rejected`."""
        return self.report.num_kept < self.report.num_requested


def collect_iteration(
    plan: Plan, collect: Collect, filters: FilterConfig, carried: Sequence[Group] = ()
) -> CollectedIteration:
    """Collect the next iteration of a plan: groups that were carried over, then waves of new ones."""
    iteration, config = plan.next_iteration(), plan.config
    tasks = {task.name: TaskReport() for task in plan.tasks}
    kept: list[Group] = []
    all_rollouts: list[Rollout] = []
    num_waves = 0
    for group in carried:
        if _too_old(group, iteration, filters):
            _reject(tasks, group, "too old")
        else:
            kept.append(group)
    while len(kept) < config.num_groups and num_waves < config.max_waves:
        tickets = plan.wave(_wave_size(config, len(kept)))
        rollouts = _checked(tickets, collect(tickets))
        num_waves += 1
        all_rollouts += rollouts
        for group in group_rollouts(rollouts, config.n_samples):
            _count(tasks[group.task], group)
            if group.solved:
                plan.solved(group.task, group.starts)
            reason = rejection_reason(group, filters)
            if reason is None:
                kept.append(group)
            else:
                _reject(tasks, group, reason)
    batch, surplus = kept[: config.num_groups], kept[config.num_groups :]
    for group in batch:
        tasks[group.task].kept += 1
    left = _surplus(surplus, tasks, filters, iteration)
    report = IterationReport(
        iteration=iteration,
        num_waves=num_waves,
        num_requested=config.num_groups,
        tasks=tasks,
        failures=tuple(rollout.failure for rollout in all_rollouts if rollout.failure is not None),
    )
    return CollectedIteration(groups=tuple(batch), carried=left, report=report, all_rollouts=tuple(all_rollouts))


def first_wave(plan: Plan, filters: FilterConfig, carried: Sequence[Group] = ()) -> tuple[Ticket, ...]:
    """The tickets of the next iteration's first wave; the plan does not advance."""
    plan = copy.deepcopy(plan)
    iteration = plan.next_iteration()
    num_kept = sum(not _too_old(group, iteration, filters) for group in carried)
    return plan.wave(_wave_size(plan.config, num_kept)) if num_kept < plan.config.num_groups else ()


def _wave_size(config: PlanConfig, num_kept: int) -> int:
    return max(config.num_groups - num_kept, config.wave_groups)


def _too_old(group: Group, iteration: int, filters: FilterConfig) -> bool:
    return iteration - group.iteration > filters.max_age


def _checked(tickets: Sequence[Ticket], rollouts: Sequence[Rollout]) -> Sequence[Rollout]:
    """The rollouts, if they are those of the tickets; raises EpisodeError otherwise."""
    if [rollout.ticket for rollout in rollouts] != list(tickets):
        raise EpisodeError(
            f"collect: expected the rollouts of {len(tickets)} tickets in their order, got {len(rollouts)}; return one "
            f"for each ticket, failed ones included"
        )
    return rollouts


def _count(task: TaskReport, group: Group) -> None:
    task.episodes += len(group.rollouts)
    task.successes += group.num_successes
    task.failures += sum(rollout.failed for rollout in group.rollouts)


def _surplus(
    groups: Sequence[Group], tasks: dict[str, TaskReport], filters: FilterConfig, iteration: int
) -> tuple[Group, ...]:
    """The surplus groups that the next iteration may still use."""
    left = []
    for group in groups:
        if _too_old(group, iteration + 1, filters):
            _reject(tasks, group, "too old")
        else:
            left.append(group)
            tasks[group.task].carried += 1
    return tuple(left)


def _reject(tasks: dict[str, TaskReport], group: Group, reason: RejectionReason) -> None:
    rejected = tasks[group.task].rejected
    rejected[reason] = rejected.get(reason, 0) + 1

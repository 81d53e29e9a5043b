"""Rollouts made by a rule, in no time: for tests of what is done with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from understudy.core import ArraySpec, Episode, EpisodeInfo, Spec, Step, StepSpec
from understudy.core.spec import text
from understudy.training.collection.iteration import Collect
from understudy.training.collection.rollout import CLIPPED, Rollout
from understudy.training.collection.task_start_plan import Ticket

SPEC = StepSpec(
    observation=Spec(
        {
            "state": ArraySpec(shape=(3,), dtype="float32"),
            "said": text(),
            "points": ArraySpec(shape=(None, 2), dtype="float32"),
        }
    ),
    action=Spec(ArraySpec(shape=(4, 2), dtype="float32")),
    extras=Spec(
        {
            "replay": {"tokens": ArraySpec(shape=(4, 2), dtype="int32")},
            "log_prob": ArraySpec(shape=(4, 2), dtype="float32"),
            "executed": ArraySpec(shape=(4,), dtype="bool"),
        }
    ),
    reward=ArraySpec(shape=(4,), dtype="float32"),
)


def make_rollout(ticket: Ticket, success: bool, *, truncated: bool = False, clipped: int = 0) -> Rollout:
    """An episode of two blocks whose numbers are the ticket's own."""
    rng = np.random.default_rng(ticket.seed)

    def look() -> dict[str, object]:
        return {
            "state": rng.normal(size=3).astype(np.float32),
            "said": f"ticket {ticket.number}",
            "points": rng.normal(size=(int(rng.integers(3)), 2)).astype(np.float32),
        }

    steps = [
        Step(
            observation=look(),
            action=rng.normal(size=(4, 2)).astype(np.float32),
            reward=np.array([0, 0, 0, last and success], np.float32),  # type: ignore[arg-type]
            terminated=last and not truncated,
            truncated=last and truncated,
            policy_version=ticket.iteration,
            extras={
                "replay": {"tokens": rng.integers(9, size=(4, 2)).astype(np.int32)},
                "log_prob": rng.normal(size=(4, 2)).astype(np.float32),
                "executed": np.ones(4, bool),
            },
        )
        for last in (False, True)
    ]
    info = EpisodeInfo(
        task=ticket.task,
        instruction=f"do {ticket.task}",
        init_state=ticket.start,
        group=str(ticket.group),
        success=success,
        labels={CLIPPED: str(clipped)} if clipped else {},
    )
    episode = Episode.from_steps(SPEC, steps, look(), info)
    return Rollout(ticket=ticket, episode=episode, failure=None, attempts=1)


def failed_rollout(ticket: Ticket) -> Rollout:
    return Rollout(ticket=ticket, episode=None, failure="toy[0]: the process was killed by SIGKILL", attempts=3)


def by_rule(succeeds: Callable[[Ticket], bool], seen: list[tuple[Ticket, ...]] | None = None) -> Collect:
    """A way to live tickets, of which this decides who succeeds."""

    def collect(tickets: Sequence[Ticket]) -> list[Rollout]:
        if seen is not None:
            seen.append(tuple(tickets))
        return [make_rollout(ticket, succeeds(ticket)) for ticket in tickets]

    return collect


def by_half(ticket: Ticket) -> bool:
    """Every other episode of a group."""
    return ticket.slot % 2 == 0

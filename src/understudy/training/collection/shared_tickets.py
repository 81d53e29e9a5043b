"""Shared tickets: how several processes run the tickets of one wave, so that none is idle while others have work left.

Each begins with a share of its own, of few tasks, and then takes tickets that the others have not begun. The episode of
a ticket depends on the ticket and the policy alone, so it does not matter who runs it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from understudy.training.collection.task_start_plan import Ticket


@dataclass(frozen=True, kw_only=True)
class Sharing:
    """What a process needs to know of the others that run tickets of the same wave."""

    others: Sequence[Ticket]  # of their shares, in the order in which this process would take them
    claim: Callable[[Ticket], bool]  # whether no other process has taken this ticket; from then on it is this one's

    @classmethod
    def of(cls, tickets: Sequence[Ticket], rank: int, world_size: int, claim: Callable[[int], bool]) -> Sharing:
        """Of one of several processes. `claim` takes the number of a ticket. The others' last tickets come first."""
        shares = [share(tickets, (rank + step) % world_size, world_size) for step in range(1, world_size)]
        others = tuple(ticket for one in shares for ticket in reversed(one))
        return cls(others=others, claim=lambda ticket: claim(ticket.number))


def share(tickets: Sequence[Ticket], rank: int, world_size: int) -> list[Ticket]:
    """The tickets that one of several processes begins with: equally many, and of few tasks each."""
    tasks = sorted({ticket.task for ticket in tickets})
    ordered = sorted(tickets, key=lambda ticket: (tasks.index(ticket.task), ticket.number))
    first, after = (len(ordered) * number // world_size for number in (rank, rank + 1))
    return sorted(ordered[first:after], key=lambda ticket: ticket.number)

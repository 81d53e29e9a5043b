"""Shared tickets: each is run once, by whoever is free; equal shares to begin with, of few tasks each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.unit.training.collection.faulty_worlds import faulty
from tests.unit.training.collection.scripted import Scripted

from understudy.policies import Sampling
from understudy.training.collection.collector import Collector
from understudy.training.collection.shared_tickets import Sharing, share
from understudy.training.collection.task_start_plan import Ticket


def tickets_of(num_tasks: int, each: int) -> list[Ticket]:
    return [
        Ticket(
            number=10 + number,
            iteration=0,
            task="abcdefghi"[number % num_tasks],
            start=0,
            seed=number,
            group=number,
            slot=0,
            world_seed=number,
        )
        for number in range(num_tasks * each)
    ]


def claims() -> Callable[[int], bool]:
    taken: set[int] = set()

    def claim(number: int) -> bool:
        new = number not in taken
        taken.add(number)
        return new

    return claim


@pytest.mark.parametrize("num_tasks", range(1, 10))
@pytest.mark.parametrize("world_size", range(1, 5))
def test_shares_are_equal_and_of_few_tasks(num_tasks: int, world_size: int) -> None:
    tickets = tickets_of(num_tasks, each=4)
    parts = [share(tickets, rank, world_size) for rank in range(world_size)]
    assert sorted((t for part in parts for t in part), key=lambda t: t.number) == tickets
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    changes = sum(len({ticket.task for ticket in part}) for part in parts) - len({t.task for t in tickets})
    assert changes < world_size  # a task is shared only where one part ends and the next begins
    for rank in range(world_size):
        sharing = Sharing.of(tickets, rank, world_size, claims())
        assert {t.number for t in sharing.others} == {t.number for t in tickets} - {t.number for t in parts[rank]}
        assert [t.number for t in sharing.others[:1]] == [t.number for t in parts[(rank + 1) % world_size][-1:]][
            : world_size - 1
        ]


@pytest.fixture
def toys() -> Iterator[tuple[Collector, Collector]]:
    with Collector("toy", num_parallel_envs=2) as one, Collector("toy", num_parallel_envs=2) as other:
        yield one, other


def toy_tickets(collector: Collector, count: int) -> list[Ticket]:
    task = collector.tasks[0]
    return [
        Ticket(
            number=n,
            iteration=0,
            task=task.name,
            start=collector.suite.starts(task, "train")[0],
            seed=n,
            group=n,
            slot=0,
            world_seed=n,
        )
        for n in range(count)
    ]


def test_who_is_free_takes_what_others_have_not_begun(toys: tuple[Collector, Collector]) -> None:
    tickets, claim = toy_tickets(toys[0], 12), claims()
    streams = [
        toy.stream(share(tickets, rank, 2), Scripted(), Sampling(), sharing=Sharing.of(tickets, rank, 2, claim))
        for rank, toy in enumerate(toys)
    ]
    first = next(streams[1])  # this one has begun with two, perhaps three, and waits from here on
    busy = list(streams[0])
    late = [first, *streams[1]]
    numbers = [rollout.ticket.number for rollout in [*busy, *late]]
    assert sorted(numbers) == list(range(12))  # each once
    assert len(busy) >= 9
    assert {one.ticket.number for one in late} <= set(range(6, 12))  # it had enough of its own
    with Collector("toy", num_parallel_envs=1) as alone:
        wanted = {one.ticket.number: one for one in alone.stream(tickets, Scripted(), Sampling())}
    for rollout in [*busy, *late]:
        known = wanted[rollout.ticket.number]
        assert (rollout.num_steps, rollout.success, rollout.total_reward) == (
            known.num_steps,
            known.success,
            known.total_reward,
        )


def test_nothing_left_to_claim_ends_a_stream(toys: tuple[Collector, Collector]) -> None:
    tickets = toy_tickets(toys[0], 6)
    nothing = Sharing.of(tickets, 0, 2, lambda number: False)
    assert list(toys[0].stream(share(tickets, 0, 2), Scripted(), Sampling(), sharing=nothing)) == []


def test_a_ticket_whose_worker_failed_is_tried_again_by_who_claimed_it(tmp_path: Path) -> None:
    world = faulty(place=str(tmp_path), share=1.0, times=1, faults="exit")
    with Collector(world, num_parallel_envs=2) as collector:
        tickets = toy_tickets(collector, 4)
        sharing = Sharing.of(tickets, 0, 2, claims())
        found = list(collector.stream(share(tickets, 0, 2), Scripted(), Sampling(), sharing=sharing))
    assert sorted(one.ticket.number for one in found) == [0, 1, 2, 3]
    assert not any(one.failed for one in found)
    assert any(one.attempts > 1 for one in found)


def test_busy_time_is_counted(toys: tuple[Collector, Collector]) -> None:
    collector = toys[0]
    assert (collector.busy_s, collector.num_envs) == (0.0, 2)
    list(collector.stream(toy_tickets(collector, 4), Scripted(), Sampling()))
    assert collector.busy_s > 0.0

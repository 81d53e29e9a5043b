"""Prefetch: tickets are run in a thread until somebody asks for them, and nothing of them is lost."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import pytest
from tests.processes import children
from tests.unit.training.collection.scripted import Scripted, make_tickets

from understudy.policies import Sampling
from understudy.processes.stop import Stopped, StopRequest
from understudy.training.collection.prefetch import Prefetch
from understudy.training.collection.prefetching_collector import PrefetchingCollector
from understudy.training.collection.rollout import Rollout
from understudy.training.collection.task_start_plan import Ticket

WORLD = "toy?cameras=false"
TICKETS = make_tickets(2, "pick_red", "press_button")


def failed(tickets: Sequence[Ticket]) -> list[Rollout]:
    return [Rollout(ticket=ticket, episode=None, failure="for a test", attempts=1) for ticket in tickets]


def test_a_stream_runs_while_its_caller_does_something_else() -> None:
    begun, go_on = threading.Event(), threading.Event()

    def stream() -> Iterator[Rollout]:
        begun.set()
        assert go_on.wait(60)
        yield from failed(TICKETS)

    prefetch = Prefetch()
    prefetch.begin(TICKETS, stream())
    assert begun.wait(60)
    go_on.set()
    assert prefetch.take(TICKETS[1:]) is None  # those of others are kept
    taken = prefetch.take(TICKETS)
    assert taken is not None
    assert [one.ticket for one in taken] == list(TICKETS)
    assert prefetch.take(TICKETS) is None  # once
    prefetch.close()


def test_what_was_finished_comes_before_the_error() -> None:
    def stream() -> Iterator[Rollout]:
        yield failed(TICKETS)[0]
        raise ValueError("the second one fails")

    prefetch = Prefetch()
    prefetch.begin(TICKETS, stream())
    prefetch.wait()  # raises nothing
    taken = prefetch.take(TICKETS)
    assert taken is not None
    assert next(taken).ticket == TICKETS[0]
    with pytest.raises(ValueError, match="the second one fails"):
        next(taken)
    prefetch.close()


def test_rollouts_are_taken_as_they_finish() -> None:
    go_on = threading.Event()

    def stream() -> Iterator[Rollout]:
        first, *others = failed(TICKETS)
        yield first
        assert go_on.wait(60)
        yield from others

    prefetch = Prefetch()
    prefetch.begin(TICKETS, stream())
    taken = prefetch.take(TICKETS)
    assert taken is not None
    assert next(taken).ticket == TICKETS[0]
    go_on.set()
    assert [one.ticket for one in taken] == list(TICKETS[1:])
    prefetch.close()


def test_prefetched_episodes_are_those_of_a_plain_stream() -> None:
    policy = Scripted(noise=0.3, good=0.5)
    with PrefetchingCollector(WORLD, num_parallel_envs=2) as collector:
        wanted = collector.collect(TICKETS, policy, Sampling())
        collector.prefetch(TICKETS, policy, Sampling())
        others = make_tickets(1, "touch_purple")
        assert [one.ticket for one in collector.collect(others, policy, Sampling())] == list(others)  # in between
        found = collector.collect(TICKETS, policy, Sampling())
        assert all(a.equals(b) for a, b in zip(found, wanted, strict=True))
        collector.prefetch((), policy, Sampling())  # nothing to do


def test_close_ends_what_is_prefetched() -> None:
    before = children()
    with PrefetchingCollector(WORLD, num_parallel_envs=2) as collector:
        collector.prefetch(make_tickets(2000, "pick_red"), Scripted(noise=0.3, good=0.5), Sampling())
    assert children() == before
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("prefetch")]


def test_a_stop_request_keeps_what_is_finished() -> None:
    stop = StopRequest()
    many = make_tickets(40, "pick_red")
    with PrefetchingCollector(WORLD, num_parallel_envs=2, stop=stop) as collector:
        collector.prefetch(many, Scripted(noise=0.3, good=0.5), Sampling())
        stop.request()
        found = []
        with pytest.raises(Stopped):
            found += collector.stream(many, Scripted(), Sampling())
        assert len(found) < len(many)

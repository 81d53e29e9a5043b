"""Many workers: each slot goes on by itself, fails by itself, and comes back by itself."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest
from tests.processes import children, dies, num_descriptors
from tests.unit.envs.broken_worlds import EPISODE_STEPS, Numbers, action, break_down, source
from tests.waiting import wait_for

from understudy.core import tree as trees
from understudy.envs.workers.outcomes import (
    Observe,
    Observed,
    Outcome,
    Reset,
    Stepped,
    Steps,
    WorkerDied,
    WorkerHung,
    WorkerRaised,
)
from understudy.envs.workers.restarting_worker import Limits
from understudy.envs.workers.vector import Vector
from understudy.envs.world import WorldError
from understudy.envs.world_factory import WorldFactory

GO_ON = action(0.25)


@pytest.fixture(scope="module")
def pair() -> Iterator[Vector]:
    """Two workers that break down as asked."""
    before, descriptors = children(), num_descriptors()
    with Vector([source(at_step="raise,sleep,kill", step=EPISODE_STEPS)] * 2, limits=Limits(step_s=3.0)) as vector:
        vector.start()
        yield vector
    wait_for(lambda: children() <= before and num_descriptors() <= descriptors)  # others may end meanwhile


def take(vector: Vector, slot: int, timeout_s: float = 60.0) -> Outcome:
    """The next outcome, which is this slot's."""
    deadline = time.monotonic() + timeout_s
    while not (outcomes := vector.ready(timeout_s=1.0)):
        assert time.monotonic() < deadline
    assert [slot] == [found for found, _ in outcomes]
    return outcomes[0][1]


def ask(vector: Vector, slot: int, command: Reset | Steps | Observe) -> Outcome:
    vector.send(slot, command)
    return take(vector, slot)


def test_a_slow_slot_holds_up_nobody(pair: Vector) -> None:
    for slot in range(2):
        assert isinstance(ask(pair, slot, Reset(seed=slot)), Observed)
    pair.send(0, Steps(actions=[break_down("sleep", ["raise", "sleep", "kill"])]))
    num_steps = 0
    outcome: Outcome | None = None
    while outcome is None:
        if not pair.workers[1].pending:
            pair.send(1, Steps(actions=[GO_ON]) if num_steps % 10 else Reset(seed=1))
        for slot, found in pair.ready(timeout_s=1.0):
            if slot == 0:
                outcome = found
            else:
                assert isinstance(found, Observed | Stepped)
                num_steps += 1
    assert isinstance(outcome, WorkerHung)
    assert num_steps > 10
    if pair.workers[1].pending:
        take(pair, 1)


@pytest.mark.parametrize(("how", "kind"), [("raise", WorkerRaised), ("kill", WorkerDied)])
def test_a_slot_that_failed_comes_back_by_itself(pair: Vector, how: str, kind: type) -> None:
    here = Numbers()
    wanted, _ = here.reset(seed=3)
    assert isinstance(ask(pair, 0, Reset(seed=1)), Observed)
    num_starts = pair.workers[0].num_starts
    assert isinstance(ask(pair, 0, Steps(actions=[break_down(how, ["raise", "sleep", "kill"])])), kind)
    with pytest.raises(WorldError, match=r"Broken\[0\]: there is no episode"):
        pair.send(0, Steps(actions=[GO_ON]))
    seen = ask(pair, 0, Reset(seed=3))  # sent at once: it waits for the new process
    assert isinstance(seen, Observed)
    assert trees.equal(seen.observation, wanted)
    assert pair.workers[0].num_starts == num_starts + 1


def test_a_death_between_commands_is_the_outcome_of_the_next(pair: Vector) -> None:
    assert isinstance(ask(pair, 0, Reset(seed=1)), Observed)
    pid = pair.workers[0].pid or 0
    os.kill(pid, signal.SIGKILL)
    assert dies(pid)
    assert pair.ready(timeout_s=0.3) == []  # nobody asked; the new one starts meanwhile
    assert pair.workers[0].pid != pid
    pair.start()  # and is up before the step is sent, which it must not get
    assert isinstance(ask(pair, 0, Steps(actions=[GO_ON])), WorkerDied)
    assert isinstance(ask(pair, 0, Reset(seed=1)), Observed)
    pid = pair.workers[0].pid or 0
    os.kill(pid, signal.SIGKILL)
    assert dies(pid)
    assert pair.ready(timeout_s=0.3) == []
    assert isinstance(ask(pair, 0, Reset(seed=1)), Observed)  # no episode was lost


def test_a_slot_takes_one_command_at_a_time(pair: Vector) -> None:
    assert isinstance(ask(pair, 1, Reset(seed=1)), Observed)
    pair.send(1, Observe())
    assert pair.num_pending == 1
    with pytest.raises(WorldError, match=r"Broken\[1\]: a command is pending"):
        pair.send(1, Observe())
    assert isinstance(take(pair, 1), Observed)
    assert pair.ready(timeout_s=0.0) == []


def test_a_world_that_never_starts_answers_every_command_and_does_not_spin() -> None:
    with Vector([WorldFactory(factory="no_such_module:World")]) as vector:
        for _ in range(3):
            outcome = ask(vector, 0, Reset())
            assert isinstance(outcome, WorkerRaised)
            assert outcome.error.startswith("SpecError: no_such_module:World: there is no module 'no_such_module'")
        starts = vector.workers[0].num_starts
        assert starts <= 5
        with pytest.raises(WorkerRaised, match="no_such_module"):
            vector.start()


def test_only_some_start_at_once_and_close_leaves_nobody() -> None:
    before = children()
    vector = Vector([source("Numbers")] * 3, max_starting=1)
    assert len(children() - before) == 1
    for slot in range(3):
        vector.send(slot, Reset(seed=slot))
    assert vector.num_pending == 3
    outcomes: dict[int, Outcome] = {}
    while len(outcomes) < 3:
        assert len(children() - before) <= 3
        assert sum(worker.state == "starting" for worker in vector.workers) <= 1
        outcomes.update(vector.ready(timeout_s=1.0))
    assert all(isinstance(outcome, Observed) for outcome in outcomes.values())
    vector.close()
    assert children() == before
    with pytest.raises(WorldError, match="vector: it is closed"):
        vector.ready(timeout_s=0.0)
    with pytest.raises(WorldError, match="expected at least one source"):
        Vector([])

"""One worker: a real process for each test, and every way in which it can fail."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.processes import alive, children, dies, num_descriptors
from tests.unit.envs.broken_worlds import EPISODE_STEPS, ROOT, Numbers, action, break_down, source
from tests.waiting import wait_for

from understudy.core import SpecError
from understudy.core import tree as trees
from understudy.envs.suite import SuiteError
from understudy.envs.toy import ToyTable
from understudy.envs.workers.isolated import IsolatedWorld
from understudy.envs.workers.outcomes import (
    Observe,
    Observed,
    Reset,
    Stepped,
    Steps,
    WorkerDied,
    WorkerFailure,
    WorkerGarbage,
    WorkerHung,
    WorkerRaised,
    WorkerTooLarge,
)
from understudy.envs.workers.restarting_worker import Limits, Worker
from understudy.envs.world import WorldError
from understudy.envs.world_factory import WorldFactory

QUICK = Limits(step_s=0.4, reset_s=20.0, start_s=60.0, close_s=0.4, stack_s=10.0)
GO_ON = action(0.25)


# --- a good world ---


def test_a_world_in_a_worker_gives_the_same_bits_as_here() -> None:
    here = Numbers()
    with IsolatedWorld(source("Numbers")) as there:
        assert there.step_spec == here.step_spec
        assert there.suite == here.suite
        for seed in range(3):
            options = {"task": "draw", "start": seed}
            (seen, info), (wanted, wanted_info) = (w.reset(seed=seed, options=options) for w in (there, here))
            assert trees.equal(seen, wanted)
            assert info == wanted_info
            assert there.task == here.task
            while True:
                seen, *rest, info = there.step(GO_ON)
                wanted, *wanted_rest, wanted_info = here.step(GO_ON)
                assert trees.equal(seen, wanted)
                assert rest == wanted_rest
                assert info["state"] == wanted_info["state"].tolist()
                if any(rest[1:]):
                    break
        assert trees.equal(there.observe(), here.observe())


def test_what_the_caller_was_given_stays_as_it_is() -> None:
    with IsolatedWorld(source("Numbers")) as world:
        first, _ = world.reset(seed=1)
        kept = trees.map_leaves(lambda leaf: leaf if isinstance(leaf, str) else leaf.copy(), first)
        second = world.step(GO_ON)[0]
        assert not np.array_equal(first["state"], second["state"])
        world.worker.restart()
    assert trees.equal(first, kept)
    first["state"][:] = 0  # it is the caller's own


def test_a_block_looks_once_and_stops_at_the_end() -> None:
    with IsolatedWorld(source("Numbers")) as world:
        world.reset(seed=1)
        stepped = world.step_block([GO_ON, GO_ON, GO_ON])
        assert len(stepped) == 3
        assert not stepped.last
        assert stepped.reward.shape == (3,)
        assert stepped.info["looks"] == 1  # that of the reset
        assert world.step_block([GO_ON]).info["looks"] == 2
        assert world.step_block([GO_ON], observe=False).observation is None
        assert world.step_block([GO_ON]).info["looks"] == 3
        stepped = world.step_block([GO_ON, action(1.0), GO_ON, GO_ON])
        assert len(stepped) == 2
        assert stepped.terminated.tolist() == [False, True]
        assert stepped.success.tolist() == [False, True]
        with pytest.raises(WorldError, match="Numbers: there is no episode, or it has ended; reset before step"):
            world.step_block([GO_ON])
        assert world.observe()["state"].shape == (4,)
        world.reset(seed=1)
        stepped = world.step_block([GO_ON] * (EPISODE_STEPS + 5))
        assert len(stepped) == EPISODE_STEPS
        assert stepped.truncated[-1]


def test_blocks_give_the_same_bits_as_steps() -> None:
    here = Numbers()
    here.reset(seed=5)
    with IsolatedWorld(source("Numbers")) as there:
        there.reset(seed=5)
        for _ in range(3):
            stepped = there.step_block([GO_ON] * 4)
            outcomes = [here.step(GO_ON) for _ in range(4)]
            assert trees.equal(stepped.observation, outcomes[-1][0])
            assert stepped.reward.tolist() == [outcome[1] for outcome in outcomes]


def test_one_process_serves_many_episodes() -> None:
    with Worker(source("Numbers")) as worker:
        pids = set()
        for seed in range(20):
            worker.call(Reset(seed=seed))
            stepped = worker.call(Steps(actions=[GO_ON] * EPISODE_STEPS))
            assert isinstance(stepped, Stepped)
            pids.add(stepped.info["pid"])
        assert pids == {worker.pid}
        assert worker.num_starts == 1


def test_what_the_caller_gets_wrong_costs_no_process() -> None:
    with Worker(source("Numbers"), limits=Limits(block_steps=4)) as worker:
        with pytest.raises(WorldError, match="reset before step"):
            worker.call(Steps(actions=[GO_ON]))
        worker.start()
        worker.call(Reset(seed=1))
        pid = worker.pid
        with pytest.raises(SpecError, match=r"action: expected float32 \[2\], got float64 \[2\]"):
            worker.call(Steps(actions=[np.zeros(2)]))
        with pytest.raises(SpecError, match=r"action\[0\]: expected a value from -1 to 1, got 2;"):
            worker.call(Steps(actions=[action(2.0)]))
        with pytest.raises(WorldError, match="actions: expected 1 to 4, got 5; send several blocks"):
            worker.call(Steps(actions=[GO_ON] * 5))
        with pytest.raises(SuiteError, match="did you mean 'draw'"):
            worker.call(Reset(options={"task": "drow"}))
        with pytest.raises(WorldError, match="options: no option 'seed'; reset knows task, start, split"):
            worker.call(Reset(options={"seed": 1}))
        worker.begin(Observe())
        with pytest.raises(WorldError, match="a command is pending; poll its outcome before the next"):
            worker.begin(Observe())
        while (outcome := worker.poll()) is None:
            time.sleep(0.001)
        assert isinstance(outcome, Observed)
        assert isinstance(worker.call(Steps(actions=[GO_ON])), Stepped)
        assert worker.pid == pid
    with pytest.raises(WorldError, match="it is closed; make a new one"):
        worker.call(Reset())


def test_limits_are_checked() -> None:
    with pytest.raises(WorldError, match="limits/step_s: expected more than 0, got 0"):
        Limits(step_s=0)


# --- failures, and the life after them ---

FAILURES = {
    "raise": (WorkerRaised, "step raised RuntimeError: no such joint; mend the world"),
    "sleep": (WorkerHung, r"step took longer than 0.8 s and was killed"),
    "busy": (WorkerHung, r"step took longer than 0.8 s and was killed"),
    "exit": (WorkerDied, "the process ended with exit code 7 during step; see the end of its log\nabout to: exit"),
    "sys_exit": (WorkerDied, "the process ended with exit code 3 during step"),
    "kill": (WorkerDied, "the process was killed by SIGKILL .out of memory.. during step"),
    "segfault": (WorkerDied, "(?s)the process was killed by SIGSEGV during step.*in break_down"),
    "fork_and_exit": (WorkerDied, "the process ended with exit code 5"),
    "close_channel": (WorkerGarbage, "it closed its channel and is still running"),
    "garbage": (WorkerGarbage, "step gave no valid answer: "),
    "text": (WorkerGarbage, "expected a message, got b'Hello, I am a simulator!"),
    "number": (WorkerGarbage, "expected a message, got b'7"),
    "lie": (WorkerGarbage, "an answer to request 1000000, which was not sent"),
    "nan": (WorkerGarbage, "reward: expected a finite number, got nan; check the world"),
    "object": (WorkerGarbage, "info: expected values that JSON knows, got object is no JSON value"),
}


@pytest.fixture(scope="module")
def fragile() -> Iterator[Worker]:
    """One worker for all these failures, since a new process after each is what they are about."""
    with Worker(source(at_step=",".join(FAILURES), step=EPISODE_STEPS), limits=QUICK) as worker:
        yield worker


@pytest.mark.parametrize("how", FAILURES)
def test_each_failure_has_its_type_and_the_next_reset_a_new_process(how: str, fragile: Worker) -> None:
    kind, text = FAILURES[how]
    num_starts, num_failures = fragile.num_starts, fragile.num_failures
    fragile.call(Reset(seed=1))
    assert fragile.num_starts == num_starts + 1
    assert isinstance(fragile.call(Steps(actions=[GO_ON, GO_ON])), Stepped)
    pid = fragile.pid
    assert pid
    with pytest.raises(kind, match=text) as caught:
        fragile.call(Steps(actions=[GO_ON, break_down(how, FAILURES)]))
    assert caught.value.doing == "step"  # type: ignore[attr-defined]
    if kind is WorkerHung:
        assert "in break_down" in caught.value.evidence  # type: ignore[attr-defined]
    assert not alive(pid)
    assert fragile.num_failures == num_failures + 1
    with pytest.raises(WorldError, match="reset before step"):
        fragile.call(Steps(actions=[GO_ON]))


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("shape", r"observation/state: expected float64 \[4\], got float64 \[3\]"),
        ("dtype", r"observation/state: expected float64 \[4\], got float32 \[4\]"),
        ("missing", r"observation/touch: expected bool \[\], got nothing; add the field"),
    ],
)
def test_an_observation_that_does_not_fit_is_garbage(how: str, text: str) -> None:
    with Worker(source(at_observe=how)) as worker, pytest.raises(WorkerGarbage, match=text):
        worker.call(Reset(seed=1))


@pytest.mark.parametrize(
    ("how", "kind", "text"),
    [
        ("raise", WorkerRaised, "start raised RuntimeError: no such joint"),
        ("exit", WorkerDied, "exit code 7 during start"),
        ("sleep", WorkerHung, "start took longer than 1.5 s"),
    ],
)
def test_a_start_can_fail_and_has_a_deadline_of_its_own(how: str, kind: type[WorkerFailure], text: str) -> None:
    limits = Limits(start_s=1.5 if kind is WorkerHung else 60, step_s=60, reset_s=60)
    with Worker(source(at_start=how), limits=limits) as worker:
        with pytest.raises(kind, match=text) as caught:
            worker.call(Reset(seed=1))
        assert caught.value.doing == "start"
        assert worker.state == "down"


def test_a_slow_start_is_no_failure() -> None:
    with Worker(source(at_start="slow", slow_s=1.0), limits=QUICK) as worker:
        worker.start()
        assert worker.num_failures == 0


def test_a_missing_module_factory_or_interpreter_is_named() -> None:
    for broken, text in (
        (
            WorldFactory(factory="no_such_module:World"),
            "no_such_module:World: there is no module",
        ),
        (WorldFactory(factory="understudy.envs.suite:Sweet"), "suite.py has no 'Sweet'"),
        (WorldFactory(factory="a:b", python="/no/python"), "python: expected an interpreter, got '/no/python'"),
    ):
        with pytest.raises(WorkerRaised, match=text):
            IsolatedWorld(broken)


def test_starts_that_fail_are_spaced_out() -> None:
    with Worker(WorldFactory(factory="a:b", python="/no/python")) as worker:
        pauses = []
        for _ in range(4):
            with pytest.raises(WorkerRaised):
                worker.call(Reset())
            pauses.append(worker.launch_at - time.monotonic())
        assert pauses[0] <= 0 < pauses[1] < pauses[2] < pauses[3] <= 0.4


def test_a_death_between_two_episodes_costs_none_and_within_one_is_told() -> None:
    with Worker(source("Numbers")) as worker:
        worker.call(Reset(seed=1))
        os.kill(worker.pid or 0, signal.SIGKILL)
        with pytest.raises(WorkerDied, match="SIGKILL"):
            worker.call(Steps(actions=[GO_ON]))
        worker.call(Reset(seed=1))
        os.kill(worker.pid or 0, signal.SIGKILL)
        assert dies(worker.pid or 0)
        assert isinstance(worker.call(Reset(seed=1)), Observed)
        assert worker.num_starts == 3


def test_memory_beyond_the_limit_ends_the_worker_or_renews_it_at_a_reset() -> None:
    limits = Limits(max_rss_bytes=300 * 2**20)
    with Worker(source(at_step="leak", leak_bytes=230 * 2**20), limits=limits) as worker:
        worker.call(Reset(seed=1))
        worker.call(Steps(actions=[GO_ON]))
        pid = worker.pid
        worker.call(Reset(seed=2))  # it is near its limit, and between two episodes nothing is lost
        assert worker.pid != pid
        assert worker.num_renewals == 1
        assert worker.num_failures == 0
        worker.call(Steps(actions=[GO_ON]))
        with pytest.raises(WorkerTooLarge, match=r"expected up to 300 MiB of memory, got [345]\d\d during"):
            leak_on(worker)
    with Worker(source(at_step="leak_and_sleep", leak_bytes=400 * 2**20), limits=limits) as worker:
        worker.call(Reset(seed=1))
        with pytest.raises(WorkerTooLarge, match="during step"):  # long before the deadline
            worker.call(Steps(actions=[GO_ON]))


def leak_on(worker: Worker) -> None:
    for _ in range(10):  # it is looked at no more often than every TICK_S
        worker.call(Steps(actions=[GO_ON]))
        time.sleep(0.1)


def test_what_it_prints_is_bounded_and_does_not_disturb() -> None:
    limits = Limits(log_bytes=100_000)
    with Worker(source(at_step="print"), limits=limits) as worker:
        worker.call(Reset(seed=1))
        for _ in range(3):  # 10 MB each
            worker.call(Steps(actions=[GO_ON]))
        time.sleep(0.1)
        worker.call(Observe())
        child = worker._child
        assert child is not None
        assert os.fstat(child._log).st_size <= limits.log_bytes
        assert "last words" in child.log_tail()


def test_it_closes_the_world_and_kills_one_that_does_not_let_go(tmp_path: Path) -> None:
    worker = Worker(source(at_reset="ignore_sigterm", at_close="sleep"), limits=QUICK)
    worker.call(Reset(seed=1))
    pid = worker.pid
    assert pid
    began = time.monotonic()
    worker.close()
    assert time.monotonic() - began < 10
    assert not alive(pid)
    worker = Worker(source(at_step="sleep"))
    worker.call(Reset(seed=1))
    worker.begin(Steps(actions=[GO_ON]))
    worker.close()  # while it is busy
    assert worker.state == "closed"


@pytest.mark.parametrize("how", ["grandchild", "grandchild_and_exit"])
def test_what_the_world_started_dies_with_it(how: str, tmp_path: Path) -> None:
    file = tmp_path / "pids"
    with Worker(source(at_step=how, file=str(file))) as worker:
        worker.call(Reset(seed=1))
        try:
            worker.call(Steps(actions=[GO_ON]))
        except WorkerDied:
            assert how == "grandchild_and_exit"
        grandchild = int(file.read_text())
        if how == "grandchild":
            assert alive(grandchild)
    assert dies(grandchild)


def test_nothing_is_left_open() -> None:
    before, descriptors = children(), num_descriptors()
    with Worker(source(at_step="raise"), limits=QUICK) as worker:
        for _ in range(2):
            worker.call(Reset(seed=1))
            with pytest.raises(WorkerRaised):
                worker.call(Steps(actions=[GO_ON]))
        worker.start()
    with pytest.raises(WorkerRaised):
        IsolatedWorld(WorldFactory(factory="a:b", python="/no/python"))
    wait_for(lambda: children() <= before and num_descriptors() <= descriptors)  # others may end meanwhile


PARENT = """
import sys, time
from tests.unit.envs.broken_worlds import action, source
from understudy.envs.workers.outcomes import Reset, Steps
from understudy.envs.workers.restarting_worker import Worker
worker = Worker(source(at_step=sys.argv[1], at_reset="grandchild", file=sys.argv[2]))
worker.call(Reset(seed=1))
if sys.argv[1]:
    worker.begin(Steps(actions=[action(0)]))
print(worker.pid, flush=True)
time.sleep(10_000)
"""


@pytest.mark.parametrize("how", ["", "busy"])
def test_a_worker_does_not_outlive_its_caller(how: str, tmp_path: Path) -> None:
    file = tmp_path / "pids"
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, how, str(file)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"},
    ) as parent:
        assert parent.stdout
        pid = int(parent.stdout.readline())
        time.sleep(0.1)
        assert alive(pid)
        parent.kill()
    assert dies(pid)
    assert dies(int(file.read_text()))


def test_an_interrupt_leaves_no_answer_to_nobody() -> None:
    class Interrupt(Exception):
        pass

    def interrupt(*_: object) -> None:
        raise Interrupt

    with Worker(source(at_step="sleep")) as worker:
        worker.call(Reset(seed=1))
        old = signal.signal(signal.SIGALRM, interrupt)
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            with pytest.raises(Interrupt):
                worker.call(Steps(actions=[GO_ON]))
        finally:
            signal.signal(signal.SIGALRM, old)
        assert isinstance(worker.call(Reset(seed=1)), Observed)


def test_a_worker_needs_numpy_and_nothing_else() -> None:
    """Of all that the worker's side imports, only numpy is not in the standard library."""
    code = """
import sys, json
import understudy.envs.workers.child_main
print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules})))
"""
    completed = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )
    bare = subprocess.run(
        [sys.executable, "-c", "import sys, json; print(json.dumps(sorted(sys.modules)))"],
        capture_output=True,
        text=True,
        check=True,
    )
    known = sys.stdlib_module_names | set(json.loads(bare.stdout)) | {"numpy", "understudy"}
    assert [name for name in json.loads(completed.stdout) if name not in known] == []


# --- advice ---


def test_the_expert_of_a_world_in_a_worker_says_the_same_as_here() -> None:
    here = ToyTable(cameras=False)
    there = IsolatedWorld(WorldFactory(factory="understudy.envs.toy:ToyTable", options={"cameras": False}))
    with here, there:
        assert there.has_expert
        for world in (here, there):
            world.reset(seed=3, options={"task": "red_on_plate"})
        rng = np.random.default_rng(5)
        ended = False
        while not ended:
            clean, wanted = there.expert_action(), here.expert_action()
            assert np.array_equal(clean.action, wanted.action)
            assert clean.progress == wanted.progress
            noisy = there.expert_action(noise=0.2, rng=rng)
            assert not np.array_equal(noisy.action, clean.action)
            step = here.step_without_observation(noisy.action)
            assert there.step_without_observation(noisy.action) == step
            ended = step[1] or step[2]
        assert step[3]["success"]


def test_noise_in_advice_comes_from_the_callers_generator() -> None:
    with IsolatedWorld(WorldFactory(factory="understudy.envs.toy:ToyTable", options={"cameras": False})) as world:
        world.reset(seed=3)
        first, again, other = (
            world.expert_action(noise=0.2, rng=np.random.default_rng(seed)).action.tolist() for seed in (1, 1, 2)
        )
        assert first == again != other
        with pytest.raises(WorldError, match="noise needs a random generator"):
            world.expert_action(noise=0.2)


def test_a_world_without_an_expert_refuses_and_lives_on() -> None:
    with IsolatedWorld(source("Numbers")) as world:
        assert not world.has_expert
        world.reset(seed=1)
        pid = world.worker.pid
        with pytest.raises(WorldError, match="no scripted expert"):
            world.expert_action()
        world.step(GO_ON)
        assert world.worker.pid == pid
    with pytest.raises(WorldError, match=r"implement Numbers\.expert_action"):
        Numbers().expert_action()


def test_progress_rises_as_the_toys_expert_works() -> None:
    world = ToyTable(cameras=False)
    for task in world.suite.task_names:
        world.reset(seed=1, options={"task": task, "start": 2})
        first = world.expert_action().progress
        best, stalled, longest = first, 0, 0
        ended = False
        while not ended:
            advice = world.expert_action()
            if advice.progress > best + 1e-3:
                best, stalled = advice.progress, 0
            else:
                stalled += 1
                longest = max(longest, stalled)
            _, terminated, truncated, _ = world.step_without_observation(advice.action)
            ended = terminated or truncated
        assert best > first
        assert longest < 20, f"{task}: the expert itself seems to stall for {longest} steps"

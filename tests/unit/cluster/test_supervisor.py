"""The state machine of a supervised actor, with a Ray that the test moves by hand."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, RayTaskError
from tests.waiting import wait_for

from understudy.cluster import rank_supervisor
from understudy.cluster import supervisor as module
from understudy.cluster.config import ClusterConfig, LearnerConfig
from understudy.cluster.rank_supervisor import RankSupervisor
from understudy.cluster.ray_session import ClusterError
from understudy.cluster.roles.process import Notice, PollReply, RoleProcess
from understudy.cluster.supervisor import POLL_S, SupervisedActor, Supervisor
from understudy.core import UnavailableError, UnderstudyError
from understudy.training.runs.health import Health

LOCATION = ("node-0", 17)


class Call:
    """An outstanding call; the test answers it."""

    def __init__(self, handle: Handle, method: str, arguments: tuple[Any, ...]):
        self.handle, self.method, self.arguments = handle, method, arguments
        self.reply: Any = None
        self.answered = False

    def answer(self, reply: Any) -> None:
        self.reply, self.answered = reply, True


class Handle:
    """A Ray actor."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.killed = False

    def __getattr__(self, method: str) -> Any:
        class Method:
            @staticmethod
            def remote(*arguments: Any, **options: Any) -> Call:
                self.calls.append(Call(self, method, arguments))
                return self.calls[-1]

        return Method()


class FakeRay:
    """What the supervisor uses of ray."""

    def wait(self, calls: list[Call], num_returns: int, timeout: float) -> tuple[list[Call], list[Call]]:
        return [call for call in calls if call.answered], [call for call in calls if not call.answered]

    def get(self, call: Call) -> Any:
        if isinstance(call.reply, BaseException):
            raise call.reply
        return call.reply

    def kill(self, handle: Handle) -> None:
        handle.killed = True

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": 2.0}

    available_resources = cluster_resources


class Workers(Supervisor[SupervisedActor]):
    """The default policy."""

    def __init__(self, config: ClusterConfig, **callbacks: Callable[..., None]):
        super().__init__(config, [SupervisedActor(role="rollout", name="worker")], **callbacks)
        self.handles: list[Handle] = []

    def create(self, actor: SupervisedActor) -> Handle:
        self.handles.append(Handle())
        return self.handles[-1]

    @property
    def actor(self) -> SupervisedActor:
        return self.actors[0]

    @property
    def call(self) -> Call:
        """The outstanding call."""
        assert isinstance(self.actor.call, Call)
        return self.actor.call

    def answer(self, reply: Any) -> None:
        self.call.answer(reply)
        self.step()

    def run_actor(self) -> None:
        """Until it is polled."""
        self.step()
        self.answer(LOCATION)
        self.step()
        self.answer(None)
        self.step()

    def end_pause(self) -> None:
        self.actor.restart_at = 0.0
        self.step()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds to add to the clock."""
    offset = [0.0]
    real = time.monotonic
    monkeypatch.setattr(module.time, "monotonic", lambda: real() + offset[0])  # type: ignore[attr-defined]
    monkeypatch.setattr(module, "ray", FakeRay())
    monkeypatch.setattr("understudy.cluster.ray_session.ray", FakeRay())
    return offset


def reply(**changes: Any) -> PollReply:
    idle_s = changes.pop("idle_s", 0.0)
    stack = changes.pop("stack", None)
    return PollReply(health={"beat_s": 100.0, "progress_s": 100.0 - idle_s, "doing": "work", "stack": stack}, **changes)


def test_an_actor_is_placed_started_polled_and_ended(clock: list[float]) -> None:
    updates: list[Any] = []
    messages: list[str] = []
    workers = Workers(ClusterConfig(), on_update=updates.append, on_messages=messages.extend)
    seen = []
    for answer in (LOCATION, None, reply(updates=["half"], messages=["restored"]), reply(finished=True)):
        workers.step()
        seen.append((workers.actor.state, workers.call.method))
        workers.answer(answer)
    assert seen == [
        ("pending placement", "location"),
        ("starting", "start"),
        ("running", "poll"),
        ("running", "poll"),
    ]
    assert (workers.actor.state, workers.actor.node, workers.actor.pid) == ("ended", *LOCATION)
    assert (updates, messages) == (["half"], ["restored"])
    workers.step()
    assert workers.actor.call is None  # nobody polls what has ended
    assert workers.take_events() == []


def test_it_has_one_outstanding_call(clock: list[float]) -> None:
    workers = Workers(ClusterConfig())
    workers.run_actor()
    for _ in range(3):
        workers.step()
    assert [call.method for call in workers.handles[0].calls] == ["location", "start", "poll"]


def test_an_actor_that_dies_is_created_again_under_its_name(clock: list[float]) -> None:
    workers = Workers(ClusterConfig())
    workers.run_actor()
    workers.answer(ActorDiedError())
    assert (workers.actor.state, workers.handles[0].killed) == ("restarting", True)
    workers.step()
    assert len(workers.handles) == 1  # after a pause only
    workers.end_pause()
    assert (workers.actor.state, workers.actor.restarts, workers.counts["restarts"]) == ("pending placement", 1, 1)
    workers.answer(LOCATION)
    workers.step()
    workers.answer(None)
    assert [event.what for event in workers.take_events()] == ["worker lost", "worker back"]


def test_an_actor_that_does_not_answer_is_replaced_and_its_late_reply_is_ignored(clock: list[float]) -> None:
    updates: list[Any] = []
    workers = Workers(ClusterConfig(heartbeat_timeout_s=5.0), on_update=updates.append)
    workers.run_actor()
    late = workers.call
    clock[0] += POLL_S + 5.1
    workers.step()
    assert "did not answer for 5 s" in workers.events[0].text
    workers.end_pause()
    late.answer(reply(updates=["late"]))
    workers.answer(LOCATION)
    assert (updates, workers.actor.state) == ([], "starting")


def test_an_actor_without_progress_is_replaced_and_its_stack_is_recorded(clock: list[float]) -> None:
    workers = Workers(ClusterConfig(progress_timeout_s=10.0))
    workers.run_actor()
    workers.answer(reply(idle_s=9.0, stack="in sleep"))
    assert (workers.actor.state, workers.actor.status().state) == ("running", "stuck")
    workers.step()
    workers.answer(reply(idle_s=11.0, stack="in sleep"))
    (event,) = workers.take_events()
    assert (event.what, event.stack) == ("stuck", "in sleep")
    assert "made no progress for 11 s" in event.text


def test_each_restart_without_progress_doubles_the_time_for_it(clock: list[float]) -> None:
    workers = Workers(ClusterConfig(progress_timeout_s=10.0))
    workers.run_actor()
    for limit_s in (10.0, 20.0, 40.0, 80.0, 160.0, 160.0):
        workers.answer(reply(idle_s=limit_s - 1))
        workers.step()
        workers.answer(reply(idle_s=limit_s + 1))
        assert workers.actor.state == "restarting"
        workers.end_pause()
        workers.run_actor()
    workers.answer(reply(idle_s=0.0, completed=1))
    workers.step()
    workers.answer(reply(idle_s=11.0, completed=1))
    assert workers.actor.state == "restarting"


def test_too_many_restarts_without_progress_end_the_run(clock: list[float]) -> None:
    workers = Workers(ClusterConfig(max_restarts=1))
    workers.run_actor()
    workers.answer(ActorDiedError())
    workers.end_pause()
    workers.answer(LOCATION)
    workers.step()
    workers.answer(None)
    workers.step()
    workers.answer(reply(completed=3))  # progress: the count begins again
    workers.step()
    workers.answer(ActorDiedError())
    workers.end_pause()
    workers.call.answer(ActorDiedError())
    with pytest.raises(ClusterError, match="worker: was lost 2 times in a row without progress"):
        workers.step()


def test_missing_resources_end_the_run(clock: list[float]) -> None:
    workers = Workers(ClusterConfig(placement_timeout_s=7.0))
    workers.step()
    clock[0] += 8.0
    with pytest.raises(
        ClusterError, match=r"rollout: no node had the resources for 1 x .* within 7 s .*--cluster\.rollout"
    ):
        workers.step()


@pytest.mark.parametrize("error", [UnavailableError("shard-0: away"), ValueError("a bug")])
def test_some_errors_of_an_actor_are_cured_by_a_restart(clock: list[float], error: Exception) -> None:
    workers = Workers(ClusterConfig())
    workers.run_actor()
    workers.answer(RayTaskError("poll", "traceback", error))
    assert f"failed: {type(error).__name__}: {error}" in workers.events[0].text


def test_an_error_that_another_actor_would_raise_too_ends_the_run(clock: list[float]) -> None:
    workers = Workers(ClusterConfig())
    workers.run_actor()
    workers.call.answer(RayTaskError("poll", "traceback", UnderstudyError("env: no such task")))
    with pytest.raises(UnderstudyError, match="no such task"):
        workers.step()


# ---- ranks, which are placed all at once


class Group:
    """A placement group of so many bundles; Ray finds resources for at most `room` of them."""

    room = 1

    def __init__(self, bundle_count: int):
        self.bundle_count, self.removed = bundle_count, False


@pytest.fixture
def groups(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> list[Group]:
    """All groups that were reserved."""
    made: list[Group] = []

    def reserve(resources: dict[str, float], num: int) -> Group:
        made.append(Group(num))
        return made[-1]

    def nodes(group: Group) -> tuple[str, ...] | None:
        return ("node-0",) * group.bundle_count if group.bundle_count <= Group.room else None

    monkeypatch.setattr(rank_supervisor, "reserve", reserve)
    monkeypatch.setattr(rank_supervisor, "reserved_nodes", nodes)
    monkeypatch.setattr(rank_supervisor, "remove_placement_group", lambda group: setattr(group, "removed", True))
    monkeypatch.setattr(RankSupervisor, "create", lambda self, actor: Handle())
    return made


def make_ranks(learner: LearnerConfig, **options: Any) -> RankSupervisor:
    config = ClusterConfig(learner=learner, placement_timeout_s=7.0, **options)

    def make_job(nodes: tuple[str, ...]) -> Any:
        return nodes

    return RankSupervisor(make_job, config, dict, on_update=lambda news: None, on_messages=lambda lines: None)


def test_fewer_ranks_are_placed_if_resources_are_missing(clock: list[float], groups: list[Group]) -> None:
    ranks = make_ranks(LearnerConfig(num=3, min_num=1))
    for num in (3, 2):
        ranks.step()
        assert (groups[-1].bundle_count, ranks.actors) == (num, [])
        clock[0] += 8.0
        ranks.step()
        assert groups[-1].removed
    ranks.step()
    assert [actor.name for actor in ranks.actors] == ["rank-0"]
    assert [group.removed for group in groups] == [True, True, False]


def test_too_few_resources_for_ranks_end_the_run(clock: list[float], groups: list[Group]) -> None:
    ranks = make_ranks(LearnerConfig(num=2, min_num=2, cpus=100))
    ranks.step()
    clock[0] += 8.0
    with pytest.raises(
        ClusterError, match=r"learner: no node had the resources for 2 x .*100.* within 7 s .*--cluster\.learner\.num"
    ):
        ranks.step()


def test_ranks_that_keep_failing_end_the_run(clock: list[float], groups: list[Group]) -> None:
    ranks = make_ranks(LearnerConfig(num=1), max_restarts=0)
    ranks.step()
    ranks.step()
    call: Any = ranks.actors[0].call
    call.answer(ActorDiedError())
    with pytest.raises(ClusterError, match="learners: was lost 1 times in a row without progress"):
        ranks.step()
    assert groups[0].removed


def test_ranks_that_hang_again_get_twice_the_time(clock: list[float], groups: list[Group]) -> None:
    ranks = make_ranks(LearnerConfig(num=1), progress_timeout_s=10.0)
    for limit_s in (10.0, 20.0):
        ranks.step()
        answers = {"location": LOCATION, "meeting_point": ("node-0", 1), "start": None}
        while (call := ranks.actors[0].call) is None or call.method != "poll":
            if call is not None:
                call.answer(answers[call.method])
            ranks.step()
        call.answer(reply(idle_s=limit_s - 1))
        ranks.step()
        ranks.step()
        assert ranks.actors
        ranks.actors[0].call.answer(reply(idle_s=limit_s + 1))
        ranks.step()
        assert not ranks.actors


# ---- the other side


class Adder(RoleProcess):
    def __init__(self, progress_timeout_s: float = 60.0) -> None:
        super().__init__(Health(None, role="actor", name="adder"), progress_timeout_s=progress_timeout_s)
        self.over = threading.Event()

    def add(self, left: int, right: int) -> int:
        self.say(["added"])
        return left + right

    def hang(self) -> None:
        self.over.wait()

    def fail(self) -> None:
        raise UnderstudyError("cannot add")


def test_a_process_works_in_a_thread_and_answers_polls() -> None:
    process = Adder()
    process.start("add", 2, 3)
    answer = process.poll(Notice(), wait_s=10.0)
    assert (answer.finished, answer.result, answer.messages) == (True, 5, ["added"])
    process.start("fail")
    with pytest.raises(UnderstudyError, match="cannot add"):
        process.poll(Notice(), wait_s=10.0)
    process.start("add", 1, 1)  # an error does not stay
    assert process.poll(Notice(), wait_s=10.0).result == 2


def test_a_stuck_process_dumps_its_stack() -> None:
    process = Adder(progress_timeout_s=0.0)
    process.start("hang")
    wait_for(lambda: "in hang" in (process.poll(Notice(), wait_s=0.05).health["stack"] or ""))
    assert not process.poll(Notice(), wait_s=0.05).finished
    process.over.set()

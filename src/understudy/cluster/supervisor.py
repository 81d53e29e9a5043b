"""Supervisor: keeps Ray actors running. Each role adds a small policy: a subclass of Supervisor.

    pending placement -> starting -> running -> ended
            ^                |           |
            +-- restarting <-+-----------+          (or lost, if the policy says that it cannot come back)

| state | outstanding call | what ends the state |
|---|---|---|
| pending placement | `location` | Ray places the actor; most policies fail the run after placement_timeout_s |
| starting | what the policy sends in `start` | its reply |
| running | what the policy sends in `poll` | its work ends, or it is lost |
| restarting | none | RESTART_PAUSE_S |

An actor is lost if its process dies, if it does not answer for heartbeat_timeout_s, or if it makes no progress for
progress_timeout_s; then the stacks of its threads are recorded. Each restart without progress doubles that time: a
process that starts too slowly for it must get there at last. An actor has at most one outstanding call. When it is
lost, it is killed, and the supervisor drops its handle and the call: a late reply is ignored, because nobody waits for
it.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import ray
from ray.exceptions import RayError, RayTaskError

from understudy.cluster.config import ClusterConfig, RoleConfig
from understudy.cluster.ray_session import ClusterError, free_resources
from understudy.cluster.roles.process import Notice, PollReply
from understudy.cluster.status import Event, EventKind, RoleName, RoleState, RoleStatus
from understudy.core import UnavailableError, UnderstudyError

logger = logging.getLogger(__name__)

POLL_S = 1.0  # an actor with nothing to report answers after so long
RESTART_PAUSE_S = 1.0
MAX_STACK = 20_000  # characters of a stack in an event
MAX_DOUBLINGS = 4  # of progress_timeout_s


class ActorLost(Exception):
    """An actor is gone, or has to be killed; `stack` shows where a stuck one hangs."""

    def __init__(self, why: str, *, stack: str | None = None):
        super().__init__(why)
        self.stack = stack

    @staticmethod
    def by(error: BaseException) -> ActorLost:
        """An actor whose own code raised an error."""
        return ActorLost(f"failed: {type(error).__name__}: {first_line(error)}")


@dataclass(eq=False, kw_only=True)
class SupervisedActor:
    """A named slot of a run and the Ray actor in it. Its supervisor changes it, nobody else."""

    role: RoleName
    name: str
    state: RoleState = "pending placement"
    since_s: float = 0.0  # when it entered this state
    handle: Any = None
    call: Any = None  # the outstanding one
    called: float = 0.0  # when that was sent, by time.monotonic()
    node: str | None = None
    pid: int | None = None
    last_node: str | None = None  # of the process before
    doing: str = ""
    stack: str | None = None
    error: str | None = None  # why it was last restarted
    reply: PollReply | None = None  # the last one of this process
    completed: int = 0  # steps, updates or iterations, as its process last reported
    restarts: int = 0
    restarts_in_a_row: int = 0  # without progress between
    restart_at: float = 0.0  # by time.monotonic()

    def enter(self, state: RoleState) -> None:
        self.state, self.since_s = state, time.time()

    def send(self, method: str, *args: Any, **options: Any) -> None:
        assert self.call is None, f"{self.name} has an outstanding call"
        self.call, self.called = getattr(self.handle, method).remote(*args, **options), time.monotonic()

    def kill(self) -> None:
        if self.handle is not None:
            ray.kill(self.handle)
        self.handle = self.call = None

    def status(self) -> RoleStatus:
        return RoleStatus(
            role=self.role,
            name=self.name,
            state="stuck" if self.state == "running" and self.stack else self.state,
            node=self.node,
            pid=self.pid,
            doing=self.doing,
            since_s=self.since_s or time.time(),
            restarts=self.restarts,
            error=self.error,
            stack=self.stack,
        )


Actor = TypeVar("Actor", bound=SupervisedActor)


class Supervisor(Generic[Actor]):
    """Creates, polls, kills and replaces actors. `step` does all of it once."""

    poll_interval_s = 0.0  # between two calls; 0 if replies take their time by themselves
    limits_restarts = True  # whether max_restarts in a row end the run
    recoverable: tuple[type[UnderstudyError], ...] = (UnavailableError,)  # errors of its code that a restart may cure

    def __init__(
        self,
        config: ClusterConfig,
        actors: Sequence[Actor],
        *,
        on_update: Callable[[Any], None] = lambda update: None,
        on_messages: Callable[[list[str]], None] = lambda lines: None,
    ):
        """`on_update` gets each update of a process, `on_messages` its sentences for the console."""
        self.config = config
        self.actors = list(actors)
        self.events: list[Event] = []
        self.counts: Counter[str] = Counter()  # restarts, reissued, fenced
        self.stopping = False  # whether all processes are asked to stop
        self.stopped = ""  # what the first of them that did so has saved, in a sentence
        self._on_update, self._on_messages = on_update, on_messages

    # ---- the policy of a role: subclasses change what differs

    def create(self, actor: Actor) -> Any | None:
        """Make a Ray actor and return its handle, or None if it is not yet time."""
        raise NotImplementedError

    def start(self, actor: Actor) -> None:
        """Send the call that makes a placed actor ready. May wait for others and send nothing yet."""
        actor.send("start", "work")

    def started(self, actor: Actor, reply: Any) -> None:
        """`start` was answered."""
        self.running(actor)

    def notice(self) -> Notice:
        """What is sent to every process with each poll."""
        return Notice()

    def poll(self, actor: Actor) -> None:
        """Send the next call to a running actor, or nothing."""
        actor.send("poll", self.notice(), wait_s=POLL_S)

    def received(self, actor: Actor, reply: Any) -> None:
        """`poll` was answered. Raises ActorLost if the actor has to be replaced."""
        assert isinstance(reply, PollReply)
        actor.reply = reply
        actor.doing, actor.stack = str(reply.health["doing"]), reply.health["stack"]
        self.events += reply.events
        if reply.messages:
            self._on_messages(list(reply.messages))
        for update in reply.updates:
            self._on_update(update)
        if reply.completed > actor.completed:
            actor.restarts_in_a_row = 0
        actor.completed = reply.completed
        if reply.stopped and not self.stopped:
            self.stopped = reply.stopped
        if reply.finished:
            self.finished(actor, reply.result)
        else:
            self.check_progress(actor, reply.idle_s, actor.doing, actor.stack)

    def finished(self, actor: Actor, result: Any) -> None:
        """The work of an actor has ended."""
        actor.enter("ended")

    def failed(self, actor: Actor, error: BaseException) -> None:
        """The actor's own code raised an error. What one process refuses, another one would refuse again."""
        if isinstance(error, UnderstudyError) and not isinstance(error, self.recoverable):
            raise error from None
        self.lost(actor, ActorLost.by(error))

    def lost(self, actor: Actor, lost: ActorLost) -> None:
        self.restart(actor, lost)

    def placement_timed_out(self, actor: Actor) -> None:
        """Ray did not place an actor in time. It is an error if no actor of its role runs."""
        if not any(one.pid for one in self.actors if one.role == actor.role):
            raise no_placement(self.config, actor.role)

    # ---- status

    def roles(self) -> list[RoleStatus]:
        """Of all actors, and of those that they supervise themselves."""
        inner = [role for actor in self.actors if actor.reply is not None for role in actor.reply.roles]
        return [*(actor.status() for actor in self.actors), *inner]

    def totals(self) -> Counter[str]:
        """Faults of all actors, and of those that they supervise themselves."""
        return sum((actor.reply.counts for actor in self.actors if actor.reply is not None), self.counts)

    def take_events(self) -> list[Event]:
        events, self.events = self.events, []
        return events

    def record(self, what: EventKind, name: str, text: str, stack: str | None = None) -> None:
        self.events.append(Event(what=what, name=name, text=text, stack=stack and stack[:MAX_STACK]))

    # ---- the state machine

    def step(self, wait_s: float = 0.0) -> None:
        """Move every actor on once. Blocks for at most `wait_s`, until one of them answers."""
        for actor in self.actors:
            self._advance(actor)
        calls = {actor.call: actor for actor in self.actors if actor.call is not None}
        for call in _ready(list(calls), wait_s):
            if calls[call].call is call:  # else it was replaced meanwhile, and nobody waits for this call any more
                self._receive(calls[call])
        for actor in self.actors:
            self._check_timeouts(actor)

    def close(self) -> None:
        for actor in self.actors:
            actor.kill()
            actor.enter("ended")

    def running(self, actor: Actor) -> None:
        actor.enter("running")
        if actor.restarts:
            self.record("worker back", actor.name, f"{actor.name} is running again")

    def restart(self, actor: Actor, lost: ActorLost, *, what: EventKind = "worker lost", then: str = "") -> None:
        """Kill an actor, record why, and create it again soon."""
        text = f"{actor.name} {lost}; {then or 'it is started again'}"
        logger.warning("%s", text)
        self.record("stuck" if lost.stack else what, actor.name, text, lost.stack)
        if actor.reply is not None:
            self.counts += actor.reply.counts
        self.counts["restarts"] += 1
        actor.restarts += 1
        actor.restarts_in_a_row += 1
        if self.limits_restarts:
            self.check_restarts(actor.name, actor.restarts_in_a_row, lost)
        self.drop(actor, str(lost))

    def drop(self, actor: Actor, why: str) -> None:
        """Kill an actor and create it again soon, without counting that."""
        actor.kill()
        actor.enter("restarting")
        actor.error, actor.reply, actor.stack, actor.pid = why, None, None, None
        actor.restart_at = time.monotonic() + RESTART_PAUSE_S

    def check_restarts(self, name: str, in_a_row: int, lost: ActorLost) -> None:
        if in_a_row > self.config.max_restarts:
            raise ClusterError(
                f"{name}: was lost {in_a_row} times in a row without progress, the last time it {lost}; "
                f"fix the cause, then use `understudy resume`"
            )

    def check_progress(self, actor: Actor, idle_s: float, doing: str, stack: str | None) -> None:
        if idle_s > self.config.progress_timeout_s * 2 ** min(actor.restarts_in_a_row, MAX_DOUBLINGS):
            raise ActorLost(f"made no progress for {idle_s:.0f} s, {doing}", stack=stack)

    def _advance(self, actor: Actor) -> None:
        """Send the next call, if none is outstanding."""
        if actor.call is not None or actor.state in ("ended", "lost"):
            return
        now = time.monotonic()
        if actor.handle is None:
            if now >= actor.restart_at and (handle := self.create(actor)) is not None:
                actor.handle, actor.last_node, actor.node = handle, actor.node or actor.last_node, None
                actor.enter("pending placement")
                actor.send("location")
        elif actor.state == "starting":
            self.start(actor)
        elif now - actor.called >= self.poll_interval_s:
            self.poll(actor)

    def _receive(self, actor: Actor) -> None:
        call, actor.call = actor.call, None
        try:
            reply = ray.get(call)
            if actor.state == "pending placement":
                actor.node, actor.pid = reply
                actor.enter("starting")
            elif actor.state == "starting":
                self.started(actor, reply)
            else:
                self.received(actor, reply)
        except RayTaskError as error:
            self.failed(actor, error.cause or error)
        except RayError as error:
            self.lost(actor, ActorLost(f"died ({first_line(error)})"))
        except ActorLost as lost:
            self.lost(actor, lost)

    def _check_timeouts(self, actor: Actor) -> None:
        if actor.call is None:
            return
        waited_s = time.monotonic() - actor.called
        if actor.state == "pending placement" and waited_s > self.config.placement_timeout_s:
            self.placement_timed_out(actor)
        if actor.state == "running" and waited_s > POLL_S + self.config.heartbeat_timeout_s:
            self.lost(actor, ActorLost(f"did not answer for {self.config.heartbeat_timeout_s:g} s"))


def _ready(calls: list[Any], wait_s: float) -> list[Any]:
    """All calls that have been answered; waits for the first."""
    if not calls:
        time.sleep(min(wait_s, 0.05))
        return []
    ready, _ = ray.wait(calls, num_returns=len(calls), timeout=0)
    if not ready and wait_s:
        ready, _ = ray.wait(calls, num_returns=1, timeout=wait_s)
    return list(ready)


def no_placement(config: ClusterConfig, role: RoleName, num: int = 1) -> ClusterError:
    section = {"actor": "rollout", "evaluator": "rollout", "shard": "shards"}.get(role, role)
    wanted: RoleConfig = getattr(config, section)
    return ClusterError(
        f"{role}: no node had the resources for {num} x {wanted.ray_resources()} within {config.placement_timeout_s:g} "
        f"s ({free_resources()}); lower --cluster.{section}.num, .cpus or .gpus, or add nodes"
    )


def first_line(error: BaseException) -> str:
    """The line of an error that says what it was: the first of Ray's own, the last of one with a traceback."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return lines[-1 if isinstance(error, RayTaskError) else 0][:300]

"""Crew: the roles of RLPD on a cluster, as the driver keeps them going; and `run_rlpd`, which is that driver.

Each role stands or falls alone. An actor that dies is made again under its name, on its node, where its spool is: what
it had recorded is delivered first, so every step is there once. The learner goes on from its last checkpoint. Who does
not answer, or gets nothing done, is killed, and its stack is in the events. Actors for which there is no room yet wait
with Ray, and join when there is.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from understudy.cluster.config import ClusterConfig
from understudy.cluster.launch import Driver
from understudy.cluster.ray_session import HERE, ClusterError, connected, elsewhere, nodes_now, options, room
from understudy.cluster.roles.offpolicy import ActorWorker, LearnerWorker, Look, OffPolicyJob, Told, in_step_shard
from understudy.cluster.status import Event, RoleNow, RoleState, What
from understudy.cluster.supervisor import LOOK_S, MAX_STACK, PAUSE_S, Lost, idle_s, last_line
from understudy.core import UnavailableError, UnderstudyError
from understudy.training.offpolicy.rlpd import RLPDConfig
from understudy.training.offpolicy.rlpd_learner import RLPDProgress
from understudy.training.runs.config import ConfigError
from understudy.training.runs.run import Run

logger = logging.getLogger(__name__)

PARTING_S = 30.0  # for actors to deliver what they have, when it is enough


@dataclass(eq=False)
class _Member:
    """A place in the crew, and the Ray actor that has it now."""

    role: Literal["actor", "learner"]
    name: str
    handle: Any = None
    state: RoleState = "starting"
    since_s: float = field(default_factory=time.time)
    where: Any = None  # calls on their way
    work: Any = None
    look: Any = None
    asked: float = 0.0  # when it was made, or last looked at
    heard: float = 0.0  # when it last answered
    node: str | None = None
    pid: int | None = None
    last: Look | None = None
    restarts: int = 0
    in_a_row: int = 0  # without progress between
    num_done: int = 0  # steps or updates that it has told of
    error: str | None = None
    not_before: float = 0.0

    def now(self) -> RoleNow:
        health = self.last.health if self.last is not None else {}
        stack = health.get("stack") if self.state == "up" else None
        return RoleNow(
            role=self.role,
            name=self.name,
            state="stuck" if stack else self.state,
            node=self.node,
            pid=self.pid,
            doing=str(health.get("doing", "")),
            since_s=self.since_s,
            restarts=self.restarts,
            error=self.error,
            stack=stack,
        )


class Crew:
    """`step` until `done`."""

    def __init__(
        self,
        make: Callable[[], OffPolicyJob],
        place: ClusterConfig,
        watch: Callable[[RLPDProgress], None],
        told: Callable[[list[str]], None],
    ):
        self.events: list[Event] = []
        self.restarts = 0
        self.done = False
        self._make, self._place, self._watch, self._told = make, place, watch, told
        self._learner = _Member("learner", "learner")
        num = 0 if place.max_lag == 0 else place.rollout.num  # in step, the learner has its own
        self._actors = [_Member("actor", f"actor-{index}") for index in range(num)]
        self._over: float | None = None  # when the learner was done
        self._inner = 0  # restarts that learners which are gone told of

    # ---- for whoever watches

    def roles(self) -> list[RoleNow]:
        inner = self._learner.last.roles if self._learner.last is not None else ()
        return [self._learner.now(), *(actor.now() for actor in self._actors), *inner]

    def totals(self) -> dict[str, int]:
        inner = self._learner.last.restarts if self._learner.last is not None else 0
        return {"reissued": 0, "fenced": 0, "restarts": self._inner + inner}

    # ---- what it does

    def step(self) -> None:
        """Look at all of them; returns soon."""
        job = self._make()
        told = Told(addresses=job.addresses, num_actors=sum(actor.state == "up" for actor in self._actors))
        for member in (self._learner, *self._actors):
            try:
                self._step(member, job, told)
            except RayTaskError as error:
                self._failed(member, error)
            except (Lost, RayError) as error:
                self._lost(member, last_line(error), error.stack if isinstance(error, Lost) else None)
        self._part()

    def close(self) -> None:
        for member in (self._learner, *self._actors):
            if member.handle is not None:
                ray.kill(member.handle)
                member.handle = None

    # ---- steps of it

    def _step(self, member: _Member, job: OffPolicyJob, told: Told) -> None:
        now = time.monotonic()
        if member.state in ("ended", "lost") or now < member.not_before:
            return
        if member.handle is None:
            if member.role == "learner" or not self._place.apart or self._learner.node is not None:
                self._place_again(member, job)
            return
        if member.where is not None:
            self._meet(member)
            return
        if ray.wait([member.work], timeout=0)[0]:
            ray.get(member.work)  # raises what ended it
            looks = [] if member.look is None else [member.look]  # one may be on its way, with news
            for look in ray.get([*looks, member.handle.look.remote(told)], timeout=self._place.silent_s):
                self._hear(member, look)
            self._ended(member)
            return
        if member.look is None and now - member.asked > LOOK_S:
            member.look, member.asked = member.handle.look.remote(told), now
        if member.look is not None and ray.wait([member.look], timeout=0)[0]:
            look, member.look = member.look, None
            self._hear(member, ray.get(look))
        if now - member.heard > self._place.silent_s:
            raise Lost(f"did not answer for {self._place.silent_s:g} s")

    def _place_again(self, member: _Member, job: OffPolicyJob) -> None:
        """An actor goes where its spool is; the learner where the driver is, if there is room."""
        alive = [node.id for node in nodes_now() if node.alive]
        if member.role == "learner":
            here = ray.get_runtime_context().get_node_id()
            strategy = NodeAffinitySchedulingStrategy(node_id=here, soft=True)
            shape = options(self._place.learner, threads=3, scheduling_strategy=strategy)
            member.handle = ray.remote(LearnerWorker).options(**shape).remote(job)
        else:
            more: dict[str, Any] = {}
            if member.node in alive:
                more = {"scheduling_strategy": NodeAffinitySchedulingStrategy(node_id=member.node, soft=False)}
            elif self._place.apart and self._learner.node is not None:
                more = elsewhere([self._learner.node])
            shape = options(self._place.rollout, threads=3, **more)
            member.handle = ray.remote(ActorWorker).options(**shape).remote(job, member.name, self._spool(job, member))
        member.state, member.asked, member.last = "waiting for room", time.monotonic(), None
        member.pid, member.work, member.look = None, None, None
        member.where = member.handle.where.remote()

    def _spool(self, job: OffPolicyJob, member: _Member) -> str:
        place = self._place
        root = Path(place.shard_dir) / job.run.name if place.shard_dir else job.run
        return str(root / "spool" / member.name)

    def _meet(self, member: _Member) -> None:
        """It waits for room, or is there; then it begins to work."""
        if not ray.wait([member.where], timeout=0)[0]:
            waited_s = time.monotonic() - member.asked
            if member.role == "learner" and waited_s > self._place.room_s:
                raise ClusterError(
                    f"learner: no room for {self._place.learner.shape()} within {self._place.room_s:g} s ({room()}); "
                    f"lower --place.learner.cpus or .gpus, or add nodes"
                )
            if self._actors and waited_s > self._place.room_s and not any(one.pid for one in self._actors):
                raise ClusterError(
                    f"rollout: no node had room for {self._place.rollout.shape()} within {self._place.room_s:g} s "
                    f"({room()}); lower --place.rollout.cpus or .gpus, or add nodes"
                )
            return
        where, member.where = member.where, None
        before = member.node
        member.node, member.pid = ray.get(where)
        member.state, member.since_s = "up", time.time()
        member.heard = member.asked = time.monotonic()
        member.work = member.handle.work.remote()
        if member.restarts:
            text = f"{member.name} is back"
            if member.role == "actor" and before not in (None, member.node):
                text += f" on another node; steps that were in its spool on {before} and not delivered are not"
            self.events.append(Event(what="worker back", name=member.name, text=text))

    def _hear(self, member: _Member, look: Look) -> None:
        member.last, member.heard = look, time.monotonic()
        self.events += look.events
        if look.restored:
            self._told(list(look.restored))
        for news in look.news:
            self._watch(news)
        done = int(look.health["step" if member.role == "actor" else "update"] or 0)
        if done > member.num_done:
            member.in_a_row = 0
        member.num_done = done
        if idle_s(look.health) > self._place.stuck_s:
            raise Lost(
                f"got nothing done for {idle_s(look.health):.0f} s, {look.health['doing']}", look.health["stack"]
            )

    def _ended(self, member: _Member) -> None:
        member.state = "ended"
        ray.kill(member.handle)
        member.handle = None
        if member.role == "learner":
            self._over = time.monotonic()

    def _part(self) -> None:
        """When the learner is done, actors deliver what they have and end."""
        if self._over is not None:
            late = [actor for actor in self._actors if actor.state not in ("ended", "waiting for room")]
            self.done = not late or time.monotonic() - self._over > PARTING_S

    def _failed(self, member: _Member, error: RayTaskError) -> None:
        """Its own error. What a role refuses (a wrong option, a store that does not fit) it would refuse again."""
        cause = error.cause
        refused = isinstance(cause, UnderstudyError) and not isinstance(cause, UnavailableError)
        if refused and (member.role == "learner" or (not member.num_done and member.in_a_row >= 2)):
            raise cause from None
        self._lost(member, f"{type(cause or error).__name__}: {last_line(cause or error)}", None)

    def _lost(self, member: _Member, why: str, stack: str | None) -> None:
        if self._over is not None:
            member.state = "ended"
            return
        if member.role == "learner" and member.last is not None:
            self._inner += member.last.restarts
        logger.warning("%s: %s; it is started again", member.name, why)
        again = "from its last checkpoint" if member.role == "learner" else "with its spool"
        text = f"{member.name}: {why}; it is started again {again}"
        if stack:
            self.events.append(Event(what="stuck", name=member.name, text=text, stack=stack[:MAX_STACK]))
        else:
            what: What = "learners restarted" if member.role == "learner" else "worker lost"
            self.events.append(Event(what=what, name=member.name, text=text))
        if member.handle is not None:
            ray.kill(member.handle)
        member.handle = member.where = member.work = member.look = None
        member.state, member.error = "gone", why
        member.restarts += 1
        member.in_a_row += 1
        member.num_done = 0
        self.restarts += 1
        if member.in_a_row > self._place.max_restarts:
            raise ClusterError(
                f"{member.name}: failed {member.in_a_row} times in a row, the last time: {why}; mend that, then "
                f"`understudy resume`"
            )
        member.not_before = time.monotonic() + PAUSE_S


# ---- the driver


def run_rlpd(
    run: Run,
    place: ClusterConfig,
    *,
    address: str = HERE,
    watch: Callable[[RLPDProgress], None] | None = None,
    told: Callable[[list[str]], None] | None = None,
) -> None:
    """A run of RLPD on a cluster, until its steps are done."""
    run = Run(run.path.resolve())
    config = run.config(RLPDConfig)
    _check(place)
    directory = Path.cwd()
    with connected(address, place) as found, Driver(run, place, found, loopback=address == HERE) as driver:

        def job() -> OffPolicyJob:
            return OffPolicyJob(
                run=run.path,
                config=config,
                place=place,
                token=driver.token,
                directory=directory,
                addresses=driver.shards.addresses,
                disks={one.name: (one.node, one.path) for one in driver.shards.shards_now()},
            )

        if told is not None:
            told(_said_of(place, driver.shards.addresses))
        with closing(Crew(job, place, watch or (lambda news: None), told or (lambda lines: None))) as crew:
            driver.keep(crew, crew.step)


def _check(place: ClusterConfig) -> None:
    """What means nothing here is refused, rather than ignored."""
    for option, got, only, why in (
        ("learner.num", place.learner.num, 1, "RLPD has one learner"),
        ("rollout.envs", place.rollout.envs, 1, "an actor has one world; raise rollout.num"),
        ("inference.num", place.inference.num, 0, "an actor has its own copy of the policy"),
    ):
        if got != only:
            raise ConfigError(f"place.{option}: expected {only} for rlpd, got {got}; {why}")


def _said_of(place: ClusterConfig, addresses: dict[str, str]) -> list[str]:
    if place.max_lag:
        return []
    return [
        f"max_lag 0: one actor and {in_step_shard(addresses)}, one episode after the other, as in one process; "
        f"--place.max-lag 1 lets {place.rollout.num} actors live while the learner learns"
    ]

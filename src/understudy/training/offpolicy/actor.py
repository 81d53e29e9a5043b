"""Actor: runs episodes and records them, with the newest policy. Until one was published, it acts at random in a
simulated world. On a real robot and with a base policy it waits, unless the config asks for random actions, or for
steps with the noise that the base policy draws itself.

`Actor` is the role; `run_actor` is its process. Once a policy was published, the actor never acts at random again: one
that starts waits for the newest policy to arrive. After that it waits only while the learner has more than
`max_pending_updates` updates to do. It ends when the run has its steps, or the learner says so.

| loop | takes from | blocks on | woken by |
|---|---|---|---|
| main | the world | the world; the first policy; a learner with too many pending updates | the world; the next policy |
| parameters (service) | the server | the next version | the server |
| recording, sending (service) | the queue | disk, network | the main loop |
"""

from __future__ import annotations

import json
import logging
import time
import zlib
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from understudy.core import Source, Tree, UnavailableError, UnderstudyError
from understudy.envs.pace import Pace
from understudy.envs.teleop.takeover import Takeover
from understudy.envs.workers import WorkerFailure
from understudy.envs.world import World
from understudy.policies import ActorPolicy
from understudy.processes.stop import StopRequest
from understudy.replay import ONLINE, View
from understudy.replay.read.view import Clause
from understudy.replay.write.writer import Writer
from understudy.training.data.run_episode import EpisodeResult, Show, run_episode
from understudy.training.offpolicy.rlpd import (
    RLPDConfig,
    allow_random_actions,
    make_takeover,
    policy_act,
    random_act,
)
from understudy.training.offpolicy.steering import SteeredWorld
from understudy.training.runs.config import ConfigError
from understudy.training.runs.health import Health
from understudy.training.runs.threads import use_threads

if TYPE_CHECKING:
    from understudy.service.client.remote import Remote
    from understudy.service.client.remote_writer import RemoteWriter
    from understudy.service.wire.parameters import Parameters

logger = logging.getLogger(__name__)

MAX_ATTEMPTS = 3  # at an episode whose world fails
WAIT_S = 0.5  # for the next policy
DELIVER_S = 10.0  # for what an earlier process left undelivered


class Actor:
    """Runs episodes of a world and records them. Randomness depends on the seed, the actor's name and their number."""

    def __init__(
        self,
        config: RLPDConfig,
        world: World,
        writer: Writer,
        *,
        name: str,
        takeover: Takeover | None = None,
        pace: Pace | None = None,
        show: Show | None = None,
        health: Health | None = None,
        stop: StopRequest | None = None,
        keep_unfinished: bool = True,
    ):
        """An episode that has had its time to end after a stop request is truncated there, or given up with Stopped
        if `keep_unfinished` is False: for a run that runs it again to the same bits."""
        self.config = config
        self.world = world
        self.health = health or Health(None, role="actor", name=name)
        self.may_act_randomly = allow_random_actions(config, world)
        self._writer = writer
        self._key = zlib.crc32(name.encode())
        self._takeover = takeover
        self._pace = pace
        self._show = show
        self._stop = stop or StopRequest()
        self._keep_unfinished = keep_unfinished
        self._num_steps = 0  # of the episode in progress

    @property
    def in_progress(self) -> tuple[int, int]:
        """How many steps the episode in progress, or the one that was given up, has, and how many a human chose."""
        human = self._takeover.summary.num_steps if self._takeover is not None and self._num_steps else 0
        return self._num_steps, human

    def run_episode(self, policy: ActorPolicy | None, number: int) -> EpisodeResult:
        """Run episode `number` from a start of the training split; without a policy, with random actions if they are
        allowed.

        If the world's process fails, the steps so far are stored as a cut episode, and the episode is run again, up to
        MAX_ATTEMPTS times in all.
        """
        for left in range(MAX_ATTEMPTS - 1, -1, -1):
            try:
                self._num_steps = 0
                found = self._attempt(policy, number)
                self._num_steps = 0
                return found
            except WorkerFailure as failure:
                if not left:
                    raise
                logger.warning("episode %d is run again: %s", number, failure)
        raise AssertionError("unreachable")

    def _attempt(self, policy: ActorPolicy | None, number: int) -> EpisodeResult:
        rng = np.random.default_rng([self.config.seed, 1, self._key, number])
        if policy is None and not self.may_act_randomly:
            reason = "it is not simulated" if self.config.base_policy is None else "there is a base policy"
            raise ConfigError(
                f"{self.config.env}: there is no policy yet, and random actions are not allowed, because {reason}; "
                f"record demonstrations first, or ask for random actions with --random-actions"
            )
        if policy is not None:
            act, source = policy_act(policy, rng, world=self.world), Source.POLICY
        elif isinstance(self.world, SteeredWorld):
            act, source = self.world.steered(self.world.normal_noise(rng)), Source.POLICY
        else:
            act, source = random_act(self.world.step_spec.action, rng), Source.RANDOM

        def acting(observation: Tree) -> tuple[Tree, int]:
            self.health.progress("acting")
            if not self._keep_unfinished:
                self._stop.check_overdue()
            self._num_steps += 1
            return act(observation)

        seeds = np.random.SeedSequence([self.config.seed, 0, self._key, number])
        return run_episode(
            self.world,
            self._writer,
            act=acting,
            source=source,
            takeover=self._takeover,
            seed=int(seeds.generate_state(1, np.uint32)[0]),
            options={"split": "train"},
            pace=self._pace,
            show=self._show,
            stop=self._stop,
        )


# ---- as a process


# Given a world: who may take over in it, the control rate, and the screen that shows it.
MakeTeleop: TypeAlias = Callable[[World], tuple[Takeover | None, Pace | None, Show | None]]


def run_actor(
    config: RLPDConfig,
    server: str | Remote,
    *,
    name: str = "actor-0",
    spool: Path | None = None,
    token_file: Path | None = None,
    tls_cert: Path | None = None,
    teleop: MakeTeleop | None = None,
    watch: Callable[[int, EpisodeResult, int | None], None] | None = None,
    health: Health | None = None,
    num_actors: Callable[[], int] = lambda: 1,
    stop: StopRequest | None = None,
) -> int:
    """Run episodes until the run has its steps or the learner says that it is finished; returns how many this ran.

    `teleop` makes the takeover; by default it is the script that the config names. `watch` is called after each episode
    with its number, its result and the version of its policy. A caller who passes a Remote may change the addresses of
    its shards meanwhile. `num_actors` actors share the pending updates that the learner may have. After a `stop`
    request it ends its episode, delivers its steps and raises Stopped.
    """
    from understudy.service import connect  # only now: it needs gRPC

    health = health or Health(None, role="actor", name=name)
    stop = stop or StopRequest()
    with ExitStack() as undo:
        undo.enter_context(health)
        base_policy_digest = config.base_policy_digest
        world = undo.enter_context(config.open_world())
        remote = server
        if isinstance(remote, str):
            remote = undo.enter_context(connect(remote, token_file=token_file, tls_cert=tls_cert))
            remote.status()  # raises now for a wrong address or token; a server that goes away later is waited for
        else:
            remote.wait_until_reachable(health.progress)
        use_threads(config.threads, large=False)  # it acts on one observation at a time
        subscription = undo.enter_context(remote.parameters())
        writer = undo.enter_context(remote.writer(name, world.step_spec, spool=spool))
        takeover, pace, show = teleop(world) if teleop is not None else (make_takeover(config, world), None, None)
        actor = Actor(
            config, world, writer, name=name, takeover=takeover, pace=pace, show=show, health=health, stop=stop
        )
        stop.describe_unsaved = lambda: _describe_undelivered(actor, writer, spool)
        health.add(lambda: _delivery(writer))
        health.add(
            lambda: {"parameters_problem": subscription.problem, "parameters_unusable": subscription.num_unusable}
        )
        num_steps = 0
        writer.wait_delivered(DELIVER_S)  # what an earlier process recorded counts too
        number = first = _num_episodes_begun(remote, name, health.progress)
        num_total = _num_steps(remote, writer, health) or 0  # of the run, by all actors, as far as this one knows
        said_behind = False
        newest: PublishedPolicy | None = None
        seen: Parameters | None = None
        num_since = 0  # steps since the newest policy arrived
        waiting = ""  # why there is no policy to act with; said once
        while not stop.requested:
            latest = subscription.latest
            if latest is not None and latest is not seen:
                seen = latest
                if (found := _published_policy(latest)) is not None:
                    _check_base_policy(config, base_policy_digest, found)
                    newest, num_since = found, 0
                    num_total = max(num_total, found.num_steps)
            if newest is not None and newest.finished:
                return number - first
            if num_total + num_since * num_actors() >= config.steps:
                exact = _num_steps(remote, writer, health)
                if exact is not None and exact >= config.steps:
                    logger.info("%s: the run has its %d steps", name, config.steps)
                    return number - first
                if exact is None:  # the server will come back
                    time.sleep(WAIT_S)
                    continue
                num_total = exact - num_since * num_actors()
            policy = None if newest is None else newest.policy
            if policy is None and (reason := _why_wait(actor, remote)):
                health.progress(reason)
                if reason != waiting:
                    logger.warning("%s: %s; %s", name, reason, subscription.problem or "nothing is sent to the world")
                waiting = reason
                subscription.wait(seen, WAIT_S)
                continue
            if config.max_pending_updates is not None:
                num_free = 0 if newest is not None else config.start_steps
                pending = newest.pending_updates if newest is not None else 0
                # The learner cannot count steps that an unreachable shard does not have yet.
                num_open = max(num_since, writer.delivery.queued + writer.delivery.recorded)
                pending += (num_open * num_actors() - num_free) * config.updates_per_step
                if pending > config.max_pending_updates:
                    health.progress("waiting for the learner")
                    if not said_behind:
                        logger.warning(
                            "%s: waits whenever the learner has more than %d updates to do (max_pending_updates)",
                            *(name, config.max_pending_updates),
                        )
                    said_behind = True
                    subscription.wait(seen, WAIT_S)
                    continue
            episode = actor.run_episode(policy, number)
            num_since += episode.num_steps
            num_steps += episode.num_steps
            health.progress("acting", num_steps, policy_version=None if policy is None else policy.version)
            if watch is not None:
                watch(number, episode, None if policy is None else policy.version)
            number += 1
        stopped = stop.stopped()
        delivered = writer.wait_delivered(DELIVER_S)
        left = "all its steps are on the server" if delivered else _describe_undelivered(actor, writer, spool)
        stopped.sentence = f"stopped after {number - first} episodes; {left}; start it again to continue"
        raise stopped


def _describe_undelivered(actor: Actor, writer: RemoteWriter, spool: Path | None) -> str:
    """What happens to the steps that the server does not have, in words."""
    steps, human = actor.in_progress
    num_rows = writer.delivery.queued + writer.delivery.recorded
    now = f"the episode in progress is cut after {steps} steps ({human} by a human); " if steps else ""
    if not num_rows:
        return f"{now}all earlier steps are on the server"
    where = "are in the spool until it starts again" if spool is not None else "are lost, because it has no spool"
    return f"{now}{num_rows} rows that the server does not have {where}"


def _num_steps(remote: Remote, writer: RemoteWriter, health: Health) -> int | None:
    """How many steps of the run the servers have, this actor's included; None if one cannot be asked."""
    health.progress("counting the steps of the run")
    if not writer.wait_delivered(DELIVER_S):
        return None
    try:
        return sum(int(status["steps"][ONLINE.name]) for status in remote.status([ONLINE]).values())
    except UnavailableError:
        return None


def _delivery(writer: RemoteWriter) -> dict[str, Any]:
    """How many of its rows are queued, spooled and delivered, for its health file."""
    delivery = writer.delivery
    return {"queue": delivery.queued, "spool_bytes": delivery.spool_bytes, "delivery": asdict(delivery)}


def _why_wait(actor: Actor, remote: Remote) -> str:
    """Why an actor without a policy must not act at random now; empty if it may."""
    if not actor.may_act_randomly:
        reason = "the world is not simulated" if actor.config.base_policy is None else "there is a base policy"
        return f"waiting for the first policy: {reason}, and random actions were not asked for"
    version = remote.newest_version()
    if version is None:
        return "waiting for the server: it may have a policy"
    if version > 0:
        return f"waiting for a policy: version {version} was published and has not arrived"
    return ""


@dataclass(frozen=True, kw_only=True)
class PublishedPolicy:
    """A version that an RLPD learner published."""

    policy: ActorPolicy
    pending_updates: int
    finished: bool
    num_steps: int = 0  # of the run, when it was published
    base_policy_digest: str | None = None  # of the learner's base policy


def _check_base_policy(config: RLPDConfig, digest: str | None, published: PublishedPolicy) -> None:
    """A residual actor that changes the actions of another base policy would send wrong ones to a robot."""
    if digest != published.base_policy_digest:
        raise ConfigError(
            f"base_policy: expected the policy that the learner uses ({published.base_policy_digest or 'none'}), got "
            f"another one at {config.base_policy} ({digest or 'none'}); copy the learner's file to this machine"
        )


def _published_policy(parameters: Parameters) -> PublishedPolicy | None:
    """The policy in a version; None, and an error in the log, if another program published something else."""
    try:
        description = {**json.loads(parameters.metadata["policy"]), "version": parameters.version}
        return PublishedPolicy(
            policy=ActorPolicy.of(parameters.tree, description),
            pending_updates=int(parameters.metadata["pending_updates"]),
            finished=parameters.metadata["finished"] == "1",
            num_steps=int(parameters.metadata.get("steps", 0)),
            base_policy_digest=parameters.metadata.get("base_policy") or None,
        )
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError, UnderstudyError) as error:
        logger.error(
            "version %d is no policy of an RLPD learner (%s: %s); the actor does not use it",
            *(parameters.version, type(error).__name__, error),
        )
        return None


def _num_episodes_begun(remote: Remote, name: str, waiting: Callable[[str], None]) -> int:
    """How many episodes an actor has begun, so that a restarted actor continues with the next number."""
    quoted = name.replace("'", "''")
    view = View(name="mine", clauses=(Clause(where=f"actor = '{quoted}'"),))
    while True:
        try:
            return sum(int(status["episodes"][view.name]) for status in remote.status([view]).values())
        except UnavailableError:
            remote.wait_until_reachable(waiting)

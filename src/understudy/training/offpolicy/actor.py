"""Actor: runs episodes and records them, with the newest policy, or with random actions until there is one.

`Actor` is the role; `run_actor` is its process. The actor does not wait for the learner unless the config sets
`max_pending_updates`.

| loop | takes from | blocks on | woken by |
|---|---|---|---|
| main | the world | the world; a learner with too many pending updates | the world; the next policy |
| parameters (service) | the server | the next version | the server |
| recording, sending (service) | the queue | disk, network | the main loop |
"""

from __future__ import annotations

import json
import logging
import zlib
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from understudy.core import Source, Tree, UnavailableError
from understudy.envs.pace import Pace
from understudy.envs.registry import open_world
from understudy.envs.teleop.takeover import Takeover
from understudy.envs.workers import WorkerFailure
from understudy.envs.world import World
from understudy.policies import ActorPolicy
from understudy.replay import View
from understudy.replay.read.view import Clause
from understudy.replay.write.writer import Writer
from understudy.training.data.run_episode import EpisodeResult, Show, run_episode
from understudy.training.offpolicy.rlpd import RLPDConfig, make_takeover, policy_act, random_act
from understudy.training.runs.health import Health

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
    ):
        self.config = config
        self.world = world
        self.health = health or Health(None, role="actor", name=name)
        self._writer = writer
        self._key = zlib.crc32(name.encode())
        self._takeover = takeover
        self._pace = pace
        self._show = show

    def run_episode(self, policy: ActorPolicy | None, number: int) -> EpisodeResult:
        """Run episode `number` from a start of the training split; without a policy, with random actions.

        If the world's process fails, the steps so far are stored as a cut episode, and the episode is run again, up to
        MAX_ATTEMPTS times in all.
        """
        for left in range(MAX_ATTEMPTS - 1, -1, -1):
            try:
                return self._attempt(policy, number)
            except WorkerFailure as failure:
                if not left:
                    raise
                logger.warning("episode %d is run again: %s", number, failure)
        raise AssertionError("unreachable")

    def _attempt(self, policy: ActorPolicy | None, number: int) -> EpisodeResult:
        rng = np.random.default_rng([self.config.seed, 1, self._key, number])
        if policy is None:
            act, source = random_act(self.world.step_spec.action, rng), Source.RANDOM
        else:
            act, source = policy_act(policy, rng), Source.POLICY

        def acting(observation: Tree) -> tuple[Tree, int]:
            self.health.progress("acting")
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
    stop: Callable[[], bool] = lambda: False,
) -> int:
    """Run episodes until the learner says that the run is finished; returns how many this process ran.

    `teleop` makes the takeover; by default it is the script that the config names. `watch` is called after each episode
    with its number, its result and the version of its policy. A caller who passes a Remote may change the addresses of
    its shards meanwhile. `num_actors` actors share the pending updates that the learner may have. `stop` ends the loop
    between two episodes.
    """
    from understudy.service import connect  # only now: it needs gRPC

    health = health or Health(None, role="actor", name=name)
    with ExitStack() as undo:
        undo.enter_context(health)
        world = undo.enter_context(open_world(config.env))
        remote = server
        if isinstance(remote, str):
            remote = undo.enter_context(connect(remote, token_file=token_file, tls_cert=tls_cert))
            remote.status()  # raises now for a wrong address or token; a server that goes away later is waited for
        else:
            remote.wait_until_reachable(health.progress)
        subscription = undo.enter_context(remote.parameters())
        writer = undo.enter_context(remote.writer(name, world.step_spec, spool=spool))
        takeover, pace, show = teleop(world) if teleop is not None else (make_takeover(config, world), None, None)
        actor = Actor(config, world, writer, name=name, takeover=takeover, pace=pace, show=show, health=health)
        health.add(lambda: _delivery(writer))
        num_steps = 0
        writer.wait_delivered(DELIVER_S)  # what an earlier process recorded counts too
        number = first = _num_episodes_begun(remote, name, health.progress)
        policy: ActorPolicy | None = None
        seen: Parameters | None = None
        num_since = 0  # steps since the newest policy arrived
        while not stop():
            latest = subscription.latest
            if latest is not None and latest is not seen:
                seen, policy, num_since = latest, _policy_of(latest), 0
            if seen is not None and seen.metadata["finished"] == "1":
                return number - first
            if config.max_pending_updates is not None:
                num_free = 0 if seen is not None else config.start_steps
                pending = int(seen.metadata["pending_updates"]) if seen is not None else 0
                # The learner cannot count steps that an unreachable shard does not have yet.
                num_open = max(num_since, writer.delivery.queued + writer.delivery.recorded)
                pending += (num_open * num_actors() - num_free) * config.updates_per_step
                if pending > config.max_pending_updates:
                    health.progress("waiting for the learner")
                    subscription.wait(seen, WAIT_S)
                    continue
            episode = actor.run_episode(policy, number)
            num_since += episode.num_steps
            num_steps += episode.num_steps
            health.progress("acting", num_steps, policy_version=None if policy is None else policy.version)
            if watch is not None:
                watch(number, episode, None if policy is None else policy.version)
            number += 1
        return number - first


def _delivery(writer: RemoteWriter) -> dict[str, Any]:
    """How many of its rows are queued, spooled and delivered, for its health file."""
    delivery = writer.delivery
    return {"queue": delivery.queued, "spool_bytes": delivery.spool_bytes, "delivery": asdict(delivery)}


def _policy_of(parameters: Parameters) -> ActorPolicy:
    description = json.loads(parameters.metadata["policy"])
    return ActorPolicy.of(parameters.tree, {**description, "version": parameters.version})


def _num_episodes_begun(remote: Remote, name: str, waiting: Callable[[str], None]) -> int:
    """How many episodes an actor has begun, so that a restarted actor continues with the next number."""
    quoted = name.replace("'", "''")
    view = View(name="mine", clauses=(Clause(where=f"actor = '{quoted}'"),))
    while True:
        try:
            return sum(int(status["episodes"][view.name]) for status in remote.status([view]).values())
        except UnavailableError:
            remote.wait_until_reachable(waiting)

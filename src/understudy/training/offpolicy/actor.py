"""Actor: acts and writes, with the newest policy there is, or by chance until there is one.

`Actor` is the role; `run_actor` is its process. It never waits for the learner, unless the run says how far that may
fall behind.

| loop | takes from | blocks on | woken by |
|---|---|---|---|
| main | the world | the world; a learner that is too far behind | the world; the next policy |
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
from understudy.training.data.run_episode import Rolled, Show, run_episode
from understudy.training.offpolicy.rlpd import RLPDConfig, make_takeover, policy_act, random_act
from understudy.training.runs.health import Health

if TYPE_CHECKING:
    from understudy.service.client.remote import Remote
    from understudy.service.client.remote_writer import RemoteWriter
    from understudy.service.parameters import Parameters

logger = logging.getLogger(__name__)

TRIES = 3  # of an episode whose world fails
WAIT_S = 0.5
DELIVER_S = 10.0


class Actor:
    """Lives episodes of a world into a writer. All chance in them comes from the seed, its name and their number."""

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

    def live(self, policy: ActorPolicy | None, number: int) -> Rolled:
        """The episode of a number, from a start of the training split.

        If the world's process fails, what was lived is kept as an episode that was cut, and it is begun again, up to
        TRIES times.
        """
        for left in range(TRIES - 1, -1, -1):
            try:
                return self._live(policy, number)
            except WorkerFailure as failure:
                if not left:
                    raise
                logger.warning("episode %d begins again: %s", number, failure)
        raise AssertionError("unreachable")

    def _live(self, policy: ActorPolicy | None, number: int) -> Rolled:
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


# What may take over in a world, the rate at which it is driven, and the screen that shows it.
Hands: TypeAlias = Callable[[World], tuple[Takeover | None, Pace | None, Show | None]]


def run_actor(
    config: RLPDConfig,
    server: str | Remote,
    *,
    name: str = "actor-0",
    spool: Path | None = None,
    token_file: Path | None = None,
    tls_cert: Path | None = None,
    hands: Hands | None = None,
    watch: Callable[[int, Rolled, int | None], None] | None = None,
    health: Health | None = None,
    num_actors: Callable[[], int] = lambda: 1,
    stop: Callable[[], bool] = lambda: False,
) -> int:
    """Act until the learner says that the steps are done; returns the number of episodes lived.

    `hands` says who may take over; by default the script that the config names. `watch` is told each episode's number,
    what came of it, and the version of its policy. `health` is told how it goes. Whoever passes a Remote may tell it
    meanwhile where shards are. `num_actors` share what the learner may be behind; `stop` ends it between two episodes.
    """
    from understudy.service import connect  # only now: it needs gRPC

    health = health or Health(None, role="actor", name=name)
    with ExitStack() as undo:
        undo.enter_context(health)
        world = undo.enter_context(open_world(config.env))
        remote = server
        if isinstance(remote, str):
            remote = undo.enter_context(connect(remote, token_file=token_file, tls_cert=tls_cert))
            remote.status()  # a wrong address or token is said now; whoever goes away later is waited for
        else:
            remote.wait_for_all(health.progress)
        subscription = undo.enter_context(remote.parameters())
        writer = undo.enter_context(remote.writer(name, world.step_spec, spool=spool))
        takeover, pace, show = hands(world) if hands is not None else (make_takeover(config, world), None, None)
        actor = Actor(config, world, writer, name=name, takeover=takeover, pace=pace, show=show, health=health)
        health.add(lambda: _delivery(writer))
        num_steps = 0
        writer.wait_delivered(DELIVER_S)  # what an earlier process lived counts too
        number = first = _num_lived(remote, name, health.progress)
        policy: ActorPolicy | None = None
        seen: Parameters | None = None
        num_since = 0  # steps lived since it was heard
        while not stop():
            latest = subscription.latest
            if latest is not None and latest is not seen:
                seen, policy, num_since = latest, _policy_of(latest), 0
            if seen is not None and seen.metadata["done"] == "1":
                return number - first
            if config.max_behind is not None:
                num_free = 0 if seen is not None else config.start_steps
                behind = int(seen.metadata["behind"]) if seen is not None else 0
                # What a shard that is away does not have yet, the learner could not count.
                num_open = max(num_since, writer.delivery.queued + writer.delivery.recorded)
                if behind + (num_open * num_actors() - num_free) * config.updates_per_step > config.max_behind:
                    health.progress("waiting for the learner")
                    subscription.wait(seen, WAIT_S)
                    continue
            rolled = actor.live(policy, number)
            num_since += rolled.num_steps
            num_steps += rolled.num_steps
            health.progress("acting", num_steps, policy_version=None if policy is None else policy.version)
            if watch is not None:
                watch(number, rolled, None if policy is None else policy.version)
            number += 1
        return number - first


def _delivery(writer: RemoteWriter) -> dict[str, Any]:
    """Where its rows are, for its health."""
    delivery = writer.delivery
    return {"queue": delivery.queued, "spool_bytes": delivery.spool_bytes, "delivery": asdict(delivery)}


def _policy_of(parameters: Parameters) -> ActorPolicy:
    description = json.loads(parameters.metadata["policy"])
    return ActorPolicy.of(parameters.tree, {**description, "version": parameters.version})


def _num_lived(remote: Remote, name: str, waiting: Callable[[str], None]) -> int:
    """How many episodes an actor has begun, so that one that is started again goes on with other starts."""
    quoted = name.replace("'", "''")
    view = View(name="mine", clauses=(Clause(where=f"actor = '{quoted}'"),))
    while True:
        try:
            return sum(int(said["episodes"][view.name]) for said in remote.status([view]).values())
        except UnavailableError:
            remote.wait_for_all(waiting)

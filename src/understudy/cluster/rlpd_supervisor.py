"""Supervisor of the roles of RLPD on a cluster. Each is restarted alone.

An actor that is lost starts again under its name on its node, where its spool is: what it had recorded is delivered
first, so every step is stored once. The learner starts again from its last checkpoint. Actors that Ray cannot place yet
join when there are resources.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import ray

from understudy.cluster.config import ClusterConfig
from understudy.cluster.episode_supervisor import EpisodeSupervisor
from understudy.cluster.ray_session import actor_options, node_statuses, not_on, on_node, this_node
from understudy.cluster.roles.actor import ActorProcess
from understudy.cluster.roles.learner import LearnerProcess
from understudy.cluster.roles.process import Notice, PollReply
from understudy.cluster.roles.rlpd_job import RLPDJob
from understudy.cluster.supervisor import ActorLost, SupervisedActor, Supervisor
from understudy.training.offpolicy.rlpd_learner import RLPDProgress

FINISH_TIMEOUT_S = 30.0  # for actors to deliver their last steps after the learner has finished
MAX_REFUSALS = 2  # restarts of an actor whose error would end the run; it may be the fault of its node


class RLPDSupervisor(Supervisor[SupervisedActor]):
    """Call `step` until `completed`."""

    def __init__(
        self,
        make_job: Callable[[], RLPDJob],
        config: ClusterConfig,
        *,
        on_update: Callable[[RLPDProgress], None],
        on_messages: Callable[[list[str]], None],
    ):
        num_actors = 0 if config.max_lag == 0 else config.rollout.num  # a synchronous learner has its own actor
        self._learner = SupervisedActor(role="learner", name="learner")
        actors = [SupervisedActor(role="actor", name=f"actor-{index}") for index in range(num_actors)]
        super().__init__(config, [self._learner, *actors], on_update=on_update, on_messages=on_messages)
        self.completed = False
        self._make_job = make_job
        self._learned_at: float | None = None  # when the learner finished

    def step(self, wait_s: float = 0.0) -> None:
        super().step(wait_s)
        if self._learned_at is not None:
            late = [one for one in self.actors if one.state not in ("ended", "pending placement")]
            self.completed = not late or time.monotonic() - self._learned_at > FINISH_TIMEOUT_S

    # ---- the policy

    def create(self, actor: SupervisedActor) -> Any | None:
        """The learner runs where the driver is, if possible; an actor runs where its spool is."""
        job = self._make_job()
        if actor is self._learner:
            options = actor_options(self.config.learner, threads=3, **on_node(this_node(), soft=True))
            open_client = partial(EpisodeSupervisor, self.config)
            return ray.remote(LearnerProcess).options(**options).remote(job, open_client)
        node = actor.node or actor.last_node
        if node is not None and any(one.alive for one in node_statuses() if one.id == node):
            where = on_node(node)
        elif not self.config.separate_nodes:
            where = {}
        elif self._learner.node is None:
            return None
        else:
            where = not_on([self._learner.node])
        options = actor_options(self.config.rollout, threads=3, **where)
        root = job.run if self.config.shard_dir is None else Path(self.config.shard_dir) / job.run.name
        return ray.remote(ActorProcess).options(**options).remote(job, actor.name, root / "spool" / actor.name)

    def started(self, actor: SupervisedActor, reply: None) -> None:
        actor.enter("running")
        if actor.restarts:
            text = f"{actor.name} is running again"
            if actor.role == "actor" and actor.node != actor.last_node:
                text += f" on another node; undelivered steps in its spool on {actor.last_node} are missing"
            self.record("worker back", actor.name, text)

    def notice(self) -> Notice:
        num_actors = sum(one.role == "actor" and one.state == "running" for one in self.actors)
        return Notice(addresses=self._make_job().addresses, num_actors=num_actors, stop=self.stopping)

    def received(self, actor: SupervisedActor, reply: PollReply) -> None:
        if actor is not self._learner:  # what was saved is for the learner to say
            reply = replace(reply, stopped=None)
        super().received(actor, reply)

    def finished(self, actor: SupervisedActor, result: Any) -> None:
        super().finished(actor, result)
        actor.kill()
        if actor is self._learner:
            self._learned_at = time.monotonic()

    def failed(self, actor: SupervisedActor, error: BaseException) -> None:
        may_work = actor.completed > 0 or actor.restarts_in_a_row < MAX_REFUSALS
        if actor is self._learner or not may_work:
            super().failed(actor, error)
        else:
            self.lost(actor, ActorLost.by(error))

    def lost(self, actor: SupervisedActor, lost: ActorLost) -> None:
        if self._learned_at is not None:
            actor.kill()
            actor.enter("ended")
        elif actor is self._learner:
            self.restart(actor, lost, what="learners restarted", then="it starts again from its last checkpoint")
        else:
            self.restart(actor, lost, then="it starts again with its spool")
        actor.completed = 0

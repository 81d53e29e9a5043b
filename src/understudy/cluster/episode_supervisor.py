"""Supervisor of one episode actor that is asked for one result at a time, by the RLPD learner."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ray

from understudy.cluster.config import ClusterConfig
from understudy.cluster.ray_session import actor_options, not_on, this_node
from understudy.cluster.roles.episode_actor import EpisodeActor, EpisodeActorJob
from understudy.cluster.roles.process import Notice
from understudy.cluster.status import RoleName
from understudy.cluster.supervisor import ActorLost, SupervisedActor, Supervisor

WAIT_S = 0.5


class EpisodeSupervisor(Supervisor[SupervisedActor]):
    """If the actor is lost on the way, another one gets the same request."""

    def __init__(
        self,
        config: ClusterConfig,
        role: RoleName,
        make_job: Callable[[], EpisodeActorJob],
        notice: Callable[[], Notice],
        on_progress: Callable[[str], None],
    ):
        name = "actor-0" if role == "actor" else role
        super().__init__(config, [SupervisedActor(role=role, name=name)])
        self._make_job, self._notice, self._on_progress = make_job, notice, on_progress
        self._request: tuple[Any, ...] = ()  # a method and its arguments
        self._sent = False
        self._on_lost: Callable[[], object] | None = None
        self._results: list[Any] = []

    def request(self, method: str, *args: Any, on_lost: Callable[[], object] | None = None) -> Any:
        """The result of a method of the actor. `on_lost` is called each time an actor is lost on the way."""
        self._request, self._on_lost, self._sent, self._results = (method, *args), on_lost, False, []
        (actor,) = self.actors
        while not self._results:
            self.step(WAIT_S)
            self._on_progress(f"{actor.name}: {actor.doing if actor.state == 'running' else actor.state}")
        actor.restarts_in_a_row = 0
        return self._results[0]

    # ---- the policy

    def create(self, actor: SupervisedActor) -> Any:
        separate = not_on([this_node()]) if self.config.separate_nodes else {}
        options = actor_options(self.config.rollout, threads=3, **separate)
        return ray.remote(EpisodeActor).options(**options).remote(self._make_job())

    def start(self, actor: SupervisedActor) -> None:
        self.running(actor)  # it is ready: requests start its work

    def notice(self) -> Notice:
        return self._notice()

    def poll(self, actor: SupervisedActor) -> None:
        if self._sent:
            super().poll(actor)
        else:
            actor.send("start", *self._request)
            self._sent = True

    def received(self, actor: SupervisedActor, reply: Any) -> None:
        if reply is not None:  # else it has begun
            super().received(actor, reply)

    def finished(self, actor: SupervisedActor, result: Any) -> None:
        self._results.append(result)

    def failed(self, actor: SupervisedActor, error: BaseException) -> None:
        raise error  # another actor would raise it too

    def lost(self, actor: SupervisedActor, lost: ActorLost) -> None:
        self._sent = False
        super().lost(actor, lost)
        if self._on_lost is not None:
            self._on_lost()

"""Supervisor of ranks: the learners of an on-policy run, which stand or fall together.

If one is lost, all are killed and start again from the last checkpoint; with fewer, down to `min_num`, if there are no
resources for all. An error that a rank would raise again (a wrong option, a policy that does not fit) ends the run.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from understudy.cluster.collector import open_collector
from understudy.cluster.config import ClusterConfig
from understudy.cluster.ray_session import actor_options, reserve, reserved_nodes
from understudy.cluster.roles.process import Notice, PollReply
from understudy.cluster.roles.rank import RankJob, RankProcess
from understudy.cluster.supervisor import ActorLost, SupervisedActor, Supervisor, no_placement
from understudy.core import UnavailableError
from understudy.training.distributed.errors import RanksError
from understudy.training.onpolicy.onpolicy_run import OnPolicyProgress

logger = logging.getLogger(__name__)


class RankSupervisor(Supervisor[SupervisedActor]):
    """Call `step` until `completed`."""

    recoverable = (UnavailableError, RanksError)  # the latter if another rank was lost

    def __init__(
        self,
        make_job: Callable[[tuple[str, ...]], RankJob],
        config: ClusterConfig,
        addresses: Callable[[], Mapping[str, str]],
        *,
        on_update: Callable[[OnPolicyProgress], None],
        on_messages: Callable[[list[str]], None],
    ):
        """`make_job` gets the nodes of the ranks; `addresses` says where the shards are now."""
        super().__init__(config, [], on_update=on_update, on_messages=on_messages)
        self.completed = False
        self._make_job, self._addresses = make_job, addresses
        self._num = config.learner.num  # ranks to reserve resources for
        self._group: PlacementGroup | None = None
        self._reserved_at = 0.0
        self._job: RankJob | None = None
        self._meeting_point: tuple[str, int] | None = None
        self._iteration = 0  # the last that any rank has completed
        self._num_restarts = 0  # of all ranks together
        self._restarts_in_a_row = 0  # without an iteration between
        self._error: str | None = None

    def step(self, wait_s: float = 0.0) -> None:
        if not self.actors:
            self._place()
        super().step(wait_s)
        self.completed = bool(self.actors) and all(actor.state == "ended" for actor in self.actors)

    def close(self) -> None:
        super().close()
        if self._group is not None:
            remove_placement_group(self._group)
            self._group = None

    # ---- the policy

    def create(self, actor: SupervisedActor) -> Any:
        assert self._group is not None
        strategy = PlacementGroupSchedulingStrategy(
            placement_group=self._group,
            placement_group_bundle_index=self.actors.index(actor),
            placement_group_capture_child_tasks=False,
        )
        options = actor_options(self.config.learner, threads=3, scheduling_strategy=strategy)
        return ray.remote(RankProcess).options(**options).remote(self._job, open_collector)

    def start(self, actor: SupervisedActor) -> None:
        if self._meeting_point is not None:
            first = self.actors[0].handle  # the others ask it for weights
            actor.send("start", "work", self.actors.index(actor), len(self.actors), *self._meeting_point, first)
        elif actor is self.actors[0]:
            actor.send("meeting_point")

    def started(self, actor: SupervisedActor, reply: tuple[str, int] | None) -> None:
        if reply is None:
            actor.enter("running")
        else:
            self._meeting_point = reply

    def notice(self) -> Notice:
        return Notice(addresses=dict(self._addresses()), stop=self.stopping)

    def received(self, actor: SupervisedActor, reply: PollReply) -> None:
        super().received(actor, reply)
        if reply.completed > self._iteration:
            self._iteration, self._restarts_in_a_row = reply.completed, 0

    def lost(self, actor: SupervisedActor, lost: ActorLost) -> None:
        if lost.stack:
            self.record("stuck", actor.name, f"{actor.name} {lost}", lost.stack)
        self._restart_all(ActorLost(f"{actor.name} {lost}"))

    def _restart_all(self, lost: ActorLost) -> None:
        self.counts = self.totals()
        self.counts["restarts"] += 1
        self._num_restarts += 1
        self._restarts_in_a_row += 1
        self._error = str(lost)
        self.close()
        self.actors = []
        self.check_restarts("learners", self._restarts_in_a_row, lost)
        text = f"the learners start again from the last checkpoint: {lost}"
        logger.warning("%s", text)
        self.record("learners restarted", "learners", text)

    # ---- placement of all ranks at once

    def _place(self) -> None:
        """Reserve resources for all ranks; with fewer ranks each time Ray cannot find them."""
        if self._group is None:
            self._group = reserve(self.config.learner.ray_resources(), self._num)
            self._reserved_at = time.monotonic()
        nodes = reserved_nodes(self._group)
        if nodes is not None:
            self._job, self._meeting_point, self._num = self._make_job(nodes), None, self.config.learner.num
            self.actors = [
                SupervisedActor(
                    role="learner",
                    name=f"rank-{index}",
                    restarts=self._num_restarts,
                    restarts_in_a_row=self._restarts_in_a_row,
                    error=self._error,
                )
                for index in range(self._group.bundle_count)
            ]
        elif time.monotonic() - self._reserved_at > self.config.placement_timeout_s:
            remove_placement_group(self._group)
            self._group, self._num = None, self._num - 1
            if self._num < self.config.learner.min_num:
                error = no_placement(self.config, "learner", self.config.learner.min_num)
                self._num = self.config.learner.num
                if not self._error:
                    raise error
                self._restart_all(ActorLost(str(error)))  # a node is gone, and another may come

"""Supervisor of inference workers. Ray restarts them under the same handle, because rollout workers hold it."""

from __future__ import annotations

from typing import Any

import ray

from understudy.cluster.config import ClusterConfig
from understudy.cluster.ray_session import actor_options
from understudy.cluster.roles.inference_worker import InferenceStatus, InferenceWorker
from understudy.cluster.roles.rollout_worker import RolloutJob
from understudy.cluster.status import EventKind
from understudy.cluster.supervisor import ActorLost, SupervisedActor, Supervisor
from understudy.core import StepSpec

POLL_INTERVAL_S = 1.0
WAIT_S = 0.5


class InferenceSupervisor(Supervisor[SupervisedActor]):
    """Notices restarts by the process id, and has Ray restart a worker that does not answer or hangs."""

    poll_interval_s = POLL_INTERVAL_S
    limits_restarts = False

    def __init__(
        self,
        cluster: ClusterConfig,
        job: RolloutJob,
        spec: StepSpec,
        *,
        rank: int,
        device: str,
        options: dict[str, Any],
    ):
        """The policy is that of the rollout workers' job; `options` say where Ray places the workers."""
        num = cluster.inference.num
        super().__init__(
            cluster, [SupervisedActor(role="inference", name=f"inference-{rank}-{index}") for index in range(num)]
        )
        self._job, self._spec, self._options = job, spec, options
        self._device = device if cluster.inference.gpus else "cpu"

    @property
    def handles(self) -> tuple[Any, ...]:
        return tuple(actor.handle for actor in self.actors)

    def wait_running(self) -> None:
        while any(actor.state != "running" for actor in self.actors):
            self.step(WAIT_S)

    def create(self, actor: SupervisedActor) -> Any:
        options = actor_options(self.config.inference, threads=64, **self._options)
        options |= {"max_restarts": -1, "max_task_retries": -1}
        remote: Any = ray.remote  # whose types leave out concurrency groups; polls have a thread of their own
        worker = remote(concurrency_groups={"control": 1})(InferenceWorker)
        return worker.options(**options).remote(
            self._job.config,
            self._job.policy,
            self._spec,
            device=self._device,
            threads=self._job.threads,
            max_rows=self.config.inference_rows(),
        )

    def start(self, actor: SupervisedActor) -> None:
        actor.send("info")  # it loads the policy

    def poll(self, actor: SupervisedActor) -> None:
        actor.send("poll", progress_timeout_s=self.config.progress_timeout_s)

    def received(self, actor: SupervisedActor, reply: InferenceStatus) -> None:
        before = actor.pid
        actor.node, actor.pid = reply.location
        actor.doing, actor.stack = "forward pass" if reply.busy_s else "waiting for requests", reply.stack
        if before != actor.pid:
            self._count(actor, ActorLost(f"died (its process {before} is gone)"))
        self.check_progress(actor, reply.busy_s, actor.doing, reply.stack)

    def lost(self, actor: SupervisedActor, lost: ActorLost) -> None:
        ray.kill(actor.handle, no_restart=False)
        actor.call = None
        self._count(actor, lost)

    def _count(self, actor: SupervisedActor, lost: ActorLost) -> None:
        actor.restarts += 1
        actor.error = str(lost)
        self.counts["restarts"] += 1
        what: EventKind = "stuck" if lost.stack else "worker lost"
        self.record(what, actor.name, f"{actor.name} {lost}; Ray starts it again", lost.stack)

"""ClusterCollector: sends tickets to rollout workers on any node, and returns whole episodes, each exactly once.

| loop | takes from | blocks on | woken by |
|---|---|---|---|
| `stream`, in the caller or in the thread of `prefetch` | all workers | a reply, up to WAIT_S | a worker |

It is the supervisor of its rollout workers and inference workers. When a rollout worker is lost, its tickets go to
others. Workers that Ray cannot place yet join when there are resources.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch

from understudy.cluster.config import ClusterConfig
from understudy.cluster.inference_supervisor import InferenceSupervisor
from understudy.cluster.ray_session import actor_options, not_on
from understudy.cluster.roles.rank import RankJob
from understudy.cluster.roles.rollout_worker import RolloutJob, RolloutWorker, StreamReply, StreamRequest, WorldInfo
from understudy.cluster.status import Event, RoleStatus
from understudy.cluster.supervisor import POLL_S, ActorLost, SupervisedActor, Supervisor
from understudy.core import StepSpec
from understudy.envs.suite import Suite, Task
from understudy.policies import BlockPolicy, Sampling
from understudy.training.collection.collector import check_tickets
from understudy.training.collection.prefetch import Prefetch
from understudy.training.collection.rollout import Rollout
from understudy.training.collection.serialization import deserialize_rollouts
from understudy.training.collection.shared_tickets import Sharing
from understudy.training.collection.task_start_plan import Ticket
from understudy.training.distributed.ranks import Ranks
from understudy.training.onpolicy.config import OnPolicyConfig

Array = np.ndarray[Any, Any]

WAIT_S = 0.5
TICKETS_PER_ENV = 2  # that a worker holds, so that its simulators never wait for the next one
MAX_ATTEMPTS = 10  # workers that may be lost with one ticket


def open_collector(config: OnPolicyConfig, job: RankJob, policy: Path, ranks: Ranks) -> ClusterCollector:
    """The collector of a rank."""
    return ClusterCollector(
        config,
        job.cluster,
        policy,
        rank=ranks.rank,
        num_ranks=ranks.size,
        device=config.device,
        learner_nodes=job.learner_nodes,
    )


@dataclass(eq=False, kw_only=True)
class _Worker(SupervisedActor):
    tickets: dict[int, Ticket] = field(default_factory=dict)  # that it has not finished, by number


class ClusterCollector(Supervisor[_Worker]):
    """The workers of one rank. `publish` comes before the first stream."""

    limits_restarts = False  # a ticket has MAX_ATTEMPTS instead

    def __init__(
        self,
        config: OnPolicyConfig,
        cluster: ClusterConfig,
        policy: Path,
        *,
        rank: int,
        num_ranks: int,
        device: str,
        learner_nodes: Sequence[str] = (),
    ):
        num = cluster.rollout.num // num_ranks + (rank < cluster.rollout.num % num_ranks)
        workers = [_Worker(role="rollout", name=f"rollout-{rank}-{index}") for index in range(max(num, 1))]
        super().__init__(cluster, workers)
        self._job = RolloutJob(
            config=config,
            policy=policy,
            envs=cluster.rollout.envs,
            threads=torch.get_num_threads(),
            device=device if cluster.rollout.gpus else "cpu",
            remote_policy=cluster.inference.num > 0,
        )
        self._separate = not_on(learner_nodes) if cluster.separate_nodes else {}
        self._world: WorldInfo | None = None
        self._inference: InferenceSupervisor | None = None
        self._version: int | None = None
        self._weights: Any = None
        self._stream = 0
        self._sampling: Sampling | None = None  # of the present stream
        self._waiting: deque[Ticket] = deque()  # that no worker has
        self._others: deque[Ticket] = deque()  # of other ranks, which this one may run too
        self._claim: Callable[[Ticket], bool] = _nobody_else
        self.busy_s = 0.0  # how long simulators had a ticket, summed over them
        self._finished: list[Rollout] = []
        self._attempts: Counter[int] = Counter()  # workers that were lost with a ticket, by its number
        self._prefetch = Prefetch()
        try:
            while not self.is_open:
                self.step(WAIT_S)
            if cluster.inference.num:
                self._inference = InferenceSupervisor(
                    cluster, self._job, self.step_spec, rank=rank, device=device, options=self._separate
                )
                self._inference.wait_running()
        except BaseException:
            self.close()
            raise

    # ---- the interface of a Collector

    @property
    def is_open(self) -> bool:
        """Whether a worker has described the world."""
        return self._world is not None

    @property
    def step_spec(self) -> StepSpec:
        return self._opened.step_spec

    @property
    def suite(self) -> Suite:
        return self._opened.suite

    @property
    def tasks(self) -> tuple[Task, ...]:
        return self._opened.tasks

    @property
    def versions(self) -> dict[str, str]:
        return self._opened.versions

    @property
    def num_envs(self) -> int:
        return self.config.rollout.envs * len(self.actors)

    def publish(self, version: int, weights: Callable[[], Mapping[str, Array]]) -> None:
        """Streams from now on use this version of the policy."""
        if version != self._version:
            self._weights, self._version = ray.put(dict(weights())), version

    @property
    def weights(self) -> Any:
        """The reference to the published weights."""
        return self._weights

    def use(self, version: int, weights: Any) -> None:
        """Streams from now on use a version that another rank has published, by its reference."""
        self._weights, self._version = weights, version

    def prefetch(self, tickets: Sequence[Ticket], sampling: Sampling) -> None:
        """Begin with the tickets of the next stream that is no evaluation, in a thread."""
        if tickets:
            self._prefetch.begin(tickets, self._run(tickets, sampling))

    def stream(
        self, tickets: Sequence[Ticket], policy: BlockPolicy, sampling: Sampling, *, sharing: Sharing | None = None
    ) -> Iterator[Rollout]:
        """As `Collector.stream`, with the policy that was published. Prefetched tickets are not shared."""
        yield from self._prefetch.take(tickets) or self._run(tickets, sampling, sharing)

    def close(self) -> None:
        super().close()
        if self._inference is not None:
            self._inference.close()

    # ---- status

    def roles(self) -> list[RoleStatus]:
        return super().roles() + ([] if self._inference is None else self._inference.roles())

    def totals(self) -> Counter[str]:
        return super().totals() + (Counter() if self._inference is None else self._inference.totals())

    def take_events(self) -> list[Event]:
        return super().take_events() + ([] if self._inference is None else self._inference.take_events())

    # ---- the policy of a rollout worker

    def create(self, actor: _Worker) -> Any | None:
        if self._job.remote_policy and self._inference is None and actor is not self.actors[0]:
            return None  # inference workers are placed before more of these take the resources
        options = actor_options(self.config.rollout, threads=3, **self._separate)
        return ray.remote(RolloutWorker).options(**options).remote(self._job)

    def start(self, actor: _Worker) -> None:
        actor.send("open")

    def started(self, actor: _Worker, reply: WorldInfo) -> None:
        self._world = self._world or reply
        self.running(actor)

    def placement_timed_out(self, actor: _Worker) -> None:
        if not self.is_open:  # later, workers wait for resources as long as it takes
            super().placement_timed_out(actor)

    def poll(self, actor: _Worker) -> None:
        """Give a worker its share of the tickets, and wait for what it finishes."""
        if self._sampling is None:
            return
        num_running = sum(one.state == "running" for one in self.actors)
        share = max(-(-len(self._waiting) // num_running), 1)
        given = self._take(actor, min(share, TICKETS_PER_ENV * self.config.rollout.envs - len(actor.tickets)))
        actor.tickets |= {ticket.number: ticket for ticket in given}
        if not actor.tickets:
            return
        assert self._version is not None
        request = StreamRequest(
            number=self._stream,
            version=self._version,
            weights=(self._weights,),
            sampling=self._sampling,
            tickets=given,
            inference=() if self._inference is None else self._inference.handles,
        )
        actor.send("exchange", request, wait_s=POLL_S, progress_timeout_s=self.config.progress_timeout_s)

    def received(self, actor: _Worker, reply: StreamReply) -> None:
        if reply.refusal is not None:
            raise reply.refusal
        # A reply to a call of an earlier stream has rollouts that are in nobody's tickets any more.
        finished = [one for one in deserialize_rollouts(*reply.rollouts) if actor.tickets.pop(one.ticket.number, None)]
        self._finished += finished
        if finished:
            actor.restarts_in_a_row = 0
        actor.doing = f"{reply.doing}, {len(actor.tickets)} tickets"
        if reply.error is not None:
            raise ActorLost(f"failed: {reply.error}")
        if actor.tickets:
            self.check_progress(actor, reply.idle_s, reply.doing, reply.stack)

    def lost(self, actor: _Worker, lost: ActorLost) -> None:
        """Give the tickets of a lost worker to others; one with which too many were lost has failed."""
        self.counts["fenced"] += actor.call is not None and actor.state == "running"
        tickets = list(actor.tickets.values())
        actor.tickets.clear()
        self.restart(actor, lost, then=f"its {len(tickets)} tickets go to others, and it is started again")
        self._attempts.update(ticket.number for ticket in tickets)
        again = [ticket for ticket in tickets if self._attempts[ticket.number] < MAX_ATTEMPTS]
        self._waiting.extendleft(reversed(again))
        self.counts["reissued"] += len(again)
        for ticket in tickets:
            if ticket not in again:
                text = f"{MAX_ATTEMPTS} workers were lost with it; the last one {lost}"
                self._finished.append(Rollout(ticket=ticket, episode=None, failure=text, attempts=MAX_ATTEMPTS))
        if again:
            numbers = ", ".join(str(ticket.number) for ticket in again[:20])
            self.record("tickets reissued", actor.name, f"{len(again)} of {actor.name}: {numbers}")

    # ---- a stream

    @property
    def _opened(self) -> WorldInfo:
        assert self._world is not None
        return self._world

    def _take(self, actor: _Worker, count: int) -> tuple[Ticket, ...]:
        """Tickets for a worker: of this rank's own, and one of another rank's for each simulator that has none."""
        taken: list[Ticket] = []
        while self._waiting and len(taken) < count:
            ticket = self._waiting.popleft()
            if self._attempts[ticket.number] or self._claim(ticket):  # a lost worker's ticket is this rank's already
                taken.append(ticket)
        while self._others and len(actor.tickets) + len(taken) < self.config.rollout.envs:
            ticket = self._others.popleft()
            if self._claim(ticket):
                taken.append(ticket)
        return tuple(taken)

    def _run(self, tickets: Sequence[Ticket], sampling: Sampling, sharing: Sharing | None = None) -> Iterator[Rollout]:
        check_tickets(tickets, self.suite)
        assert self._weights is not None, "publish comes first"
        self._stream += 1
        self._attempts.clear()
        self._finished.clear()
        self._waiting, self._sampling = deque(tickets), sampling
        self._others = deque(() if sharing is None else sharing.others)
        self._claim = _nobody_else if sharing is None else sharing.claim
        for worker in self.actors:
            worker.tickets.clear()
        while self._waiting or self._others or any(worker.tickets for worker in self.actors):
            began_s = time.monotonic()
            self.step(WAIT_S)
            num_busy = sum(min(len(worker.tickets), self.config.rollout.envs) for worker in self.actors)
            self.busy_s += num_busy * (time.monotonic() - began_s)
            if self._inference is not None:
                self._inference.step()
            finished, self._finished = self._finished, []
            yield from finished


def _nobody_else(ticket: Ticket) -> bool:
    """The claim of a collector that runs its tickets alone."""
    return True

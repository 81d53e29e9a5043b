"""Rank: one of the learners of an on-policy run. Rollout workers run its episodes, and shards keep them.

| thread | takes from | blocks on | woken by |
|---|---|---|---|
| `work` | the plan | rollout workers, other ranks, shards | any of them |
| `prefetch` (collector) | the next wave of tickets | rollout workers | a worker |
| Ray's, in `poll` | the status of the process | the end of the work, up to `wait_s` | the work thread |
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
import ray

from understudy.cluster.config import ClusterConfig
from understudy.cluster.roles.process import Notice, RoleProcess, Supervised
from understudy.policies import BlockPolicy, Sampling
from understudy.service.client.remote import Remote, connect
from understudy.service.client.remote_writer import RemoteWriter
from understudy.training.collection.block_rows import block_spec, write_rollouts
from understudy.training.collection.collector import TicketRunner
from understudy.training.collection.rollout import Rollout
from understudy.training.collection.task_start_plan import Ticket
from understudy.training.distributed.ranks import Ranks, join
from understudy.training.onpolicy.config import OnPolicyConfig
from understudy.training.onpolicy.onpolicy_run import OnPolicyProgress, OnPolicyRun
from understudy.training.runs.health import Health
from understudy.training.runs.run import Run, RunError, policy_path

Array = np.ndarray[Any, Any]

LOCK_TIMEOUT_S = 30.0  # for the learner before this one to die
DELIVERY_WAIT_S = 1.0
CHUNK_ROWS = 2_000  # at most; the writer makes chunks smaller where rows are large


@dataclass(frozen=True, kw_only=True)
class RankJob:
    """What a rank is made of."""

    run: Path
    cluster: ClusterConfig
    token: str
    addresses: Mapping[str, str]  # of the shards, by name
    learner_nodes: tuple[str, ...]


class RolloutCollector(TicketRunner, Supervised, Protocol):
    """Runs tickets on supervised rollout workers."""

    @property
    def weights(self) -> Any:
        """The reference to the published weights."""
        ...

    def publish(self, version: int, weights: Callable[[], Mapping[str, Array]]) -> None: ...

    def use(self, version: int, weights: Any) -> None: ...

    def prefetch(self, tickets: Sequence[Ticket], sampling: Sampling) -> None: ...

    def close(self) -> None: ...


# Makes a collector for a rank. The driver passes it, so that roles know no supervisor.
OpenCollector: TypeAlias = Callable[[OnPolicyConfig, RankJob, Path, Ranks], RolloutCollector]


class RankBackend:
    """The episode backend of a rank: rollout workers on any node, and a writer to each shard."""

    uses_local_policy = False

    def __init__(
        self,
        job: RankJob,
        runner: RolloutCollector,
        ranks: Ranks,
        waiting: Callable[[str], None],
        first_weights: Callable[[], Any],
        *,
        max_lag: int,
    ):
        """`waiting` is called with what this waits for; `first_weights` returns the reference of the first rank."""
        self.runner = runner
        self._first_weights = first_weights
        self._published: int | None = None  # version
        self._ranks, self._waiting = ranks, waiting
        self.prefetches = max_lag > 0
        self._remotes: dict[str, Remote] = {
            name: connect(f"{name}={address}", token=job.token) for name, address in job.addresses.items()
        }
        self._writers: dict[str, RemoteWriter] = {}

    def follow(self, addresses: Mapping[str, str]) -> None:
        """Use the present addresses of shards that may have moved."""
        for name, address in addresses.items():
            self._remotes[name].update_address(name, address)

    def open(self, policy: BlockPolicy) -> None:
        spec = block_spec(self.runner.step_spec, policy)
        for name, remote in self._remotes.items():
            # The episodes of a wave are acknowledged together, so each need not be flushed by itself.
            self._writers[name] = remote.writer(
                f"rank-{self._ranks.rank}", spec, commit_steps=CHUNK_ROWS, flush_each_episode=False
            )

    def publish(self, version: int, weights: Callable[[], Mapping[str, Array]]) -> None:
        """The first rank puts the weights into Ray's object store, once; the others use its reference."""
        if version == self._published:
            return
        given = weights()  # gathered from all ranks, on the first
        if self._ranks.first:
            self.runner.publish(version, lambda: given)
        self._ranks.barrier("published")
        if not self._ranks.first:
            self.runner.use(version, self._first_weights())
        self._published = version

    def prefetch(self, tickets: Sequence[Ticket], sampling: Sampling) -> None:
        self.runner.prefetch(tickets, sampling)

    def store(self, rollouts: Sequence[Rollout]) -> None:
        """Write each group to one shard. Returns when all are acknowledged; waits for a shard that is away."""
        writers = list(self._writers.values())
        for index, writer in enumerate(writers):
            write_rollouts([one for one in rollouts if one.ticket.group % len(writers) == index], writer)
        for name, writer in self._writers.items():
            while not writer.wait_delivered(DELIVERY_WAIT_S):
                self._waiting(f"waiting for {name}: {writer.delivery.problem or 'it is slow'}")

    def commits(self) -> dict[str, int]:
        if not self._ranks.first:
            return {}
        found = {}
        for name, remote in self._remotes.items():
            remote.wait_until_reachable(self._waiting)
            found[name] = int(remote.status()[name]["commit"])
        return found

    def rollback(self, commits: Mapping[str, int]) -> list[str]:
        if not self._ranks.first:
            return []
        if unknown := sorted(commits.keys() - self._remotes.keys()):
            raise RunError(
                f"this run stores its episodes in {', '.join(unknown)}, and not in {', '.join(self._remotes)}; "
                f"resume it without --cluster, or begin a new run"
            )
        lines: list[str] = []
        for name, remote in self._remotes.items():
            remote.wait_until_reachable(self._waiting)
            lines += remote.request("rollback", {"commit": commits.get(name, 0), "actors": "rank-"})
        return lines

    def close(self) -> None:
        self.runner.close()
        for writer in self._writers.values():
            writer.close()
        for remote in self._remotes.values():
            remote.close()


class RankProcess(RoleProcess):
    """One Ray actor."""

    def __init__(self, job: RankJob, open_collector: OpenCollector):
        starting = Health(None, role="learner", name="starting")
        super().__init__(starting, progress_timeout_s=job.cluster.progress_timeout_s)
        self._job, self._open_collector = job, open_collector
        self._iteration = 0
        self._first = True
        self._backend: RankBackend | None = None
        self._first_handle: Any = None

    def meeting_point(self) -> tuple[str, int]:
        """A free address on this node at which the ranks can meet; asked of the first."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return ray.util.get_node_ip_address(), int(probe.getsockname()[1])

    def published(self) -> tuple[Any, ...]:
        """The reference to the published weights of this rank, in a tuple, so that Ray does not fetch them."""
        assert self._backend is not None
        return (self._backend.runner.weights,)

    def work(self, rank: int, size: int, host: str, port: int, first: Any) -> None:
        """Train until all iterations are completed; `first` is the handle of the first rank."""
        self._first_handle = first
        os.environ |= {
            "RANK": str(rank),
            "WORLD_SIZE": str(size),
            "MASTER_ADDR": host,
            "MASTER_PORT": str(port),
            "LOCAL_RANK": "0",
        }
        self._first = rank == 0
        run = Run(self._job.run)
        if self._first:
            run.wait_unlocked(LOCK_TIMEOUT_S)
        device = run.config(OnPolicyConfig).device
        with (
            join(device=device) as ranks,
            OnPolicyRun(run, self._progressed, ranks, self._open_backend, self.stop) as training,
        ):
            self.health = training.health
            if self._first:
                self.say([str(training.device), *training.restored])
            training.run()

    def _open_backend(self, run: Run, config: OnPolicyConfig, ranks: Ranks) -> RankBackend:
        collector = self._open_collector(config, self._job, policy_path(config.policy), ranks)
        self.supervised = collector
        max_lag = max(config.max_lag, self._job.cluster.max_lag)
        self._backend = RankBackend(self._job, collector, ranks, self._waiting, self._first_weights, max_lag=max_lag)
        return self._backend

    def _first_weights(self) -> Any:
        (reference,) = ray.get(self._first_handle.published.remote())
        return reference

    def _progressed(self, update: OnPolicyProgress) -> None:
        self._iteration = update.iteration
        if self._first:
            only_counts = update.evaluation is None and update.report is None
            self.report(update, supersedes=lambda last: only_counts and bool(last.episodes))

    def _waiting(self, doing: str) -> None:
        self.health.progress(doing)

    def completed(self, health: Mapping[str, Any]) -> int:
        return self._iteration

    def notified(self, notice: Notice) -> None:
        if self._backend is not None:
            self._backend.follow(notice.addresses)

"""On-policy learners: ranks in Ray actors, whose episodes are lived by rollout workers and kept in shards.

| thread of a rank | takes from | blocks on | woken by |
|---|---|---|---|
| `work` | the plan | rollout workers, other ranks, shards | any of them |
| `ahead` (collector) | the next wave | rollout workers | a worker |
| `look` | - | nothing | the driver, each LOOK_S |
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ray

from understudy.cluster.collector import ClusterCollector
from understudy.cluster.config import ClusterConfig
from understudy.cluster.ray_session import Placed
from understudy.cluster.status import Event, RoleNow
from understudy.cluster.supervisor import idle_s
from understudy.policies import BlockPolicy, Sampling
from understudy.service.client.remote import Remote, connect
from understudy.service.client.remote_writer import RemoteWriter
from understudy.training.collection import Rollout, Ticket, block_spec, write_rollouts
from understudy.training.distributed.ranks import Ranks, join
from understudy.training.onpolicy.config import OnPolicyConfig
from understudy.training.onpolicy.onpolicy_run import OnPolicyProgress, OnPolicyRun
from understudy.training.onpolicy.policy_files import policy_path
from understudy.training.runs.health import Health
from understudy.training.runs.run import Run, RunError
from understudy.training.runs.stack_dump import dump_stacks

logger = logging.getLogger(__name__)
Array = np.ndarray[Any, Any]

LOCKED_S = 30.0  # for the learner before this one to die
DELIVER_S = 1.0
CHUNK_ROWS = 2_000  # at most; the writer makes them fewer where rows are large


@dataclass(frozen=True, kw_only=True)
class RankJob:
    """All that a rank is made of."""

    run: Path
    place: ClusterConfig
    token: str
    addresses: dict[str, str]  # of the shards, by name
    learner_nodes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class RankLook:
    """What a rank says when it is looked at. News and events are said once."""

    health: dict[str, Any]
    news: list[OnPolicyProgress]
    restored: list[str]
    events: list[Event]
    roles: list[RoleNow]
    counts: dict[str, int]


class RankStage:
    """Rollout workers on any node, and a writer to each shard."""

    uses_local_policy = False

    def __init__(self, job: RankJob, run: Run, config: OnPolicyConfig, ranks: Ranks):
        self._ranks = ranks
        self._waiting: Callable[[str], None] = lambda doing: None
        self.remotes: dict[str, Remote] = {}
        self._writers: dict[str, RemoteWriter] = {}
        self.runner = ClusterCollector(
            config,
            job.place,
            policy_path(config.policy),
            rank=ranks.rank,
            num_ranks=ranks.size,
            device=config.device,
            learner_nodes=job.learner_nodes,
        )
        self._max_lag = job.place.max_lag
        for name, address in job.addresses.items():
            self.remotes[name] = connect(f"{name}={address}", token=job.token)

    def watched(self, waiting: Callable[[str], None]) -> None:
        """Tell this what is waited for."""
        self._waiting = waiting

    def moved(self, addresses: Mapping[str, str]) -> None:
        """Where the shards are now."""
        for name, address in addresses.items():
            self.remotes[name].update_address(name, address)

    def open(self, policy: BlockPolicy) -> None:
        spec = block_spec(self.runner.step_spec, policy)
        for name, remote in self.remotes.items():
            # What is kept at once goes at once: an episode is acknowledged with all others of its wave.
            self._writers[name] = remote.writer(
                f"rank-{self._ranks.rank}", spec, commit_steps=CHUNK_ROWS, flush_each_episode=False
            )

    def publish(self, version: int, weights: Callable[[], Mapping[str, Array]]) -> None:
        self.runner.publish(version, weights)

    def prefetch(self, tickets: Callable[[], Sequence[Ticket]], sampling: Sampling) -> None:
        if self._max_lag:
            self.runner.ahead(tickets(), sampling)

    def store(self, rollouts: Sequence[Rollout]) -> None:
        """A group stays together. Returns when all are acknowledged; a shard that is away is waited for."""
        writers = list(self._writers.values())
        for index, writer in enumerate(writers):
            write_rollouts([one for one in rollouts if one.ticket.group % len(writers) == index], writer)
        for name, writer in self._writers.items():
            while not writer.wait_delivered(DELIVER_S):
                self._waiting(f"waiting for {name}: {writer.delivery.problem or 'it is slow'}")

    def commits(self) -> dict[str, int]:
        if not self._ranks.first:
            return {}
        found = {}
        for name, remote in self.remotes.items():
            remote.wait_until_reachable(self._waiting)
            found[name] = int(remote.status()[name]["commit"])
        return found

    def rollback(self, commits: Mapping[str, int]) -> list[str]:
        if not self._ranks.first:
            return []
        if strange := sorted(commits.keys() - self.remotes.keys()):
            raise RunError(
                f"this run keeps its episodes in {', '.join(strange)}, and not in {', '.join(self.remotes)}; "
                f"go on with it without --cluster, or begin a new run"
            )
        said: list[str] = []
        for name, remote in self.remotes.items():
            remote.wait_until_reachable(self._waiting)
            said += remote.request("rollback", {"commit": commits.get(name, 0), "actors": "rank-"})
        return said

    def close(self) -> None:
        self.runner.close()
        for writer in self._writers.values():
            writer.close()
        for remote in self.remotes.values():
            remote.close()


class LearnerRank(Placed):
    """One Ray actor."""

    def __init__(self, job: RankJob):
        self._job = job
        self._lock = threading.Lock()
        self._news: list[OnPolicyProgress] = []
        self._run: OnPolicyRun | None = None
        self._stage: RankStage | None = None
        self._told = False
        self._starting = Health(None, role="learner", name="starting")

    def meeting_point(self) -> tuple[str, int]:
        """Where the ranks can meet, if this is the first."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return ray.util.get_node_ip_address(), int(probe.getsockname()[1])

    def work(self, rank: int, size: int, host: str, port: int) -> None:
        """Train until the iterations are done."""
        os.environ |= {
            "RANK": str(rank),
            "WORLD_SIZE": str(size),
            "MASTER_ADDR": host,
            "MASTER_PORT": str(port),
            "LOCAL_RANK": "0",
        }
        run = Run(self._job.run)
        if rank == 0:
            run.wait_unlocked(LOCKED_S)
        with join() as ranks, OnPolicyRun(run, self._hear, ranks, self._make_backend) as self._run:
            self._run.run()

    def _make_backend(self, run: Run, config: OnPolicyConfig, ranks: Ranks) -> RankStage:
        self._stage = RankStage(self._job, run, config, ranks)
        self._stage.watched(self._progress)
        return self._stage

    @property
    def _health(self) -> Health:
        return self._starting if self._run is None else self._run.health

    def _progress(self, doing: str) -> None:
        self._health.progress(doing)

    def _hear(self, news: OnPolicyProgress) -> None:
        with self._lock:
            if self._news and news.evaluation is None and news.report is None and self._news[-1].episodes:
                self._news.pop()  # only the newest count of episodes matters
            self._news.append(news)

    def look(self, addresses: Mapping[str, str]) -> RankLook:
        """What it does; and it is told where the shards are."""
        stage, run = self._stage, self._run
        with self._lock:
            news, self._news = self._news, []
        restored: list[str] = []
        if run is not None and not self._told:
            restored, self._told = run.restored, True
        health = self._health.now()
        if idle_s(health) > self._job.place.stuck_s:
            health["stack"] = health["stack"] or dump_stacks()
        if stage is None:
            return RankLook(health=health, news=news, restored=restored, events=[], roles=[], counts={})
        stage.moved(addresses)
        runner = stage.runner
        return RankLook(
            health=health,
            news=news,
            restored=restored,
            events=runner.take_events(),
            roles=runner.roles(),
            counts={"reissued": runner.num_reissued, "fenced": runner.num_fenced, "restarts": runner.num_restarts},
        )

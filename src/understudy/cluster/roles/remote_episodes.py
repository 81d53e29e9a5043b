"""Episodes and evaluations of an RLPD learner in a supervised process: what the learner's side asks of it.

If the actor is lost in the middle of an episode, what it had begun is rolled back on the shard, and another one runs
the same episode: all randomness comes from the seed, the name and the number. So the run equals the local one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from understudy.cluster.ray_session import ClusterError
from understudy.cluster.roles.episode_actor import EpisodeActorJob, PolicySnapshot
from understudy.cluster.roles.process import Notice, Supervised
from understudy.cluster.status import EventKind, RoleName
from understudy.core import StepSpec
from understudy.policies import ActorPolicy
from understudy.training.data.run_episode import EpisodeResult
from understudy.training.offpolicy.demo_online_mixture import Shards
from understudy.training.offpolicy.episode_backend import NAME, Commit
from understudy.training.offpolicy.rlpd import evaluator_for
from understudy.training.runs.evaluate import EvaluationConfig, EvaluationResult
from understudy.training.runs.health import Health
from understudy.training.runs.run import RunError


class EpisodeActorClient(Supervised, Protocol):
    """Asks a supervised episode actor for one result at a time."""

    def request(self, method: str, *args: Any, on_lost: Callable[[], object] | None = None) -> Any: ...

    def record(self, what: EventKind, name: str, text: str) -> None: ...

    def close(self) -> None: ...


# Makes a client: role, make_job, notice, on_progress. The driver passes it, so that roles know no supervisor.
OpenClient: TypeAlias = Callable[
    [RoleName, Callable[[], EpisodeActorJob], Callable[[], Notice], Callable[[str], None]], EpisodeActorClient
]


class RemoteEpisodeBackend:
    """An episode backend for `LocalRun`: an actor on any node, and one shard."""

    def __init__(
        self,
        open_client: OpenClient,
        job: EpisodeActorJob,
        shards: Shards,
        addresses: Callable[[], Mapping[str, str]],
        progress: Callable[[str], None],
    ):
        """`shards` has one server; `addresses` says where it is now."""
        (self._shard,) = shards.remote.names
        self._shards, self._progress = shards, progress

        def make_job() -> EpisodeActorJob:
            return replace(job, shard=f"{self._shard}={addresses()[self._shard]}")

        self.client = open_client("actor", make_job, lambda: Notice(addresses=addresses()), progress)
        self._spec: StepSpec = self.client.request("open")
        shards.remote.wait_until_reachable(progress)

    @property
    def step_spec(self) -> StepSpec:
        return self._spec

    @property
    def experience(self) -> Path | Shards:
        return self._shards

    @property
    def commit(self) -> Commit:
        return {self._shard: self._last_commit()}

    def rollback(self, commit: Commit) -> list[str]:
        if not isinstance(commit, dict) or self._shard not in commit:
            raise RunError(f"this run does not store its episodes on {self._shard}; resume it without --cluster")
        return self._rollback(commit[self._shard])

    def start(self, health: Health) -> None:
        """The actor is ready."""

    def run_episode(self, policy: ActorPolicy | None, number: int) -> EpisodeResult:
        commit = self._last_commit()
        snapshot = None if policy is None else PolicySnapshot.of(policy)
        roll_back = partial(self._rollback, commit)
        found: EpisodeResult = self.client.request("run_episode", snapshot, number, on_lost=roll_back)
        return found

    @property
    def in_progress(self) -> tuple[int, int]:
        return 0, 0  # the actor has not said

    def evaluate(self, policy: ActorPolicy, config: EvaluationConfig, videos: Path) -> EvaluationResult:
        return evaluate_remotely(self.client, policy, config, videos)

    def close(self) -> None:
        self.client.close()

    def _last_commit(self) -> int:
        self._shards.remote.wait_until_reachable(self._progress)
        return int(self._shards.remote.status()[self._shard]["commit"])

    def _rollback(self, commit: int) -> list[str]:
        self._shards.remote.wait_until_reachable(self._progress)
        return list(self._shards.remote.request("rollback", {"commit": commit, "actors": NAME}))


class RemoteEvaluator:
    """Evaluates policies in a process of its own; if that cannot be, in this one."""

    def __init__(self, open_client: OpenClient, job: EpisodeActorJob):
        self._config = job.config
        self.client = open_client("evaluator", lambda: job, Notice, lambda doing: None)
        self._local = False

    def evaluate(self, policy: ActorPolicy, config: EvaluationConfig, videos: Path) -> EvaluationResult:
        if not self._local:
            try:
                return evaluate_remotely(self.client, policy, config, videos)
            except ClusterError as error:  # it cannot be placed, or was lost too often
                self._local = True
                self.client.close()
                self.client.record("worker lost", "evaluator", f"the learner evaluates by itself: {error}")
        with self._config.open_world() as world:
            return evaluator_for(world)(policy, config, videos)

    def close(self) -> None:
        self.client.close()


def evaluate_remotely(
    client: EpisodeActorClient, policy: ActorPolicy, config: EvaluationConfig, videos: Path
) -> EvaluationResult:
    """Evaluate in another process, and write the videos that it sends."""
    found: EvaluationResult
    found, content = client.request("evaluate", PolicySnapshot.of(policy), config)
    for name, video in content.items():
        videos.mkdir(parents=True, exist_ok=True)
        (videos / name).write_bytes(video)
    return found

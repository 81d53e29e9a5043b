"""Player: the synchronous run of RLPD with its actor and its store in processes of their own.

An episode is lived by an actor on any node, with the policy that it is sent, and is on the shard's disk when it comes
back. If the actor is lost in the middle, what it began is set aside and another lives the same episode: all chance
comes from the seed, the name and the number. So it equals the local run, whoever dies.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray
import torch

from understudy.cluster.config import ClusterConfig
from understudy.cluster.ray_session import Placed, elsewhere, options
from understudy.cluster.supervisor import Minded
from understudy.core import StepSpec
from understudy.envs.registry import open_world
from understudy.policies import ActorPolicy
from understudy.service.client.remote import Remote, connect
from understudy.training.data.run_episode import EpisodeResult
from understudy.training.offpolicy.actor import Actor
from understudy.training.offpolicy.demo_online_mixture import Shards
from understudy.training.offpolicy.episode_backend import NAME, Commit
from understudy.training.offpolicy.rlpd import RLPDConfig, evaluator_for, make_takeover
from understudy.training.runs.evaluate import EvaluationConfig, EvaluationResult
from understudy.training.runs.health import Health
from understudy.training.runs.run import RunError

DELIVER_S = 1.0


@dataclass(frozen=True, kw_only=True)
class PlayerJob:
    """All that a player is made of."""

    config: RLPDConfig
    directory: Path  # in which relative paths are meant
    threads: int  # of torch: the same as the learner's, so that both find the same bits
    stuck_s: float  # without progress, after which it shows its stack
    shard: str | None = None  # name=host:port; None: it only evaluates
    token: str | None = None


@dataclass(frozen=True, kw_only=True)
class Sent:
    """A policy on its way to another process."""

    parameters: Any
    description: dict[str, Any]

    @staticmethod
    def of(policy: ActorPolicy) -> Sent:
        return Sent(parameters=policy.parameters(), description=policy.description())

    def policy(self) -> ActorPolicy:
        return ActorPolicy.of(self.parameters, self.description)


class Player(Placed):
    """One Ray actor: a world in which episodes are lived for a shard, or policies judged."""

    def __init__(self, job: PlayerJob):
        self._job = job
        self._undo = ExitStack()
        self._remote: Remote | None = None
        self._actor: Actor | None = None
        self.health = Health(None, role="actor", name=NAME, progress_timeout_s=job.stuck_s)

    def look(self, addresses: Mapping[str, str]) -> Mapping[str, Any]:
        """What it does; and it is told where its shard is."""
        if self._remote is not None:
            follow(self._remote, addresses)
        return self.health.now()

    def open(self) -> StepSpec:
        """Be ready; says what the world is like."""
        if not hasattr(self, "_world"):
            self.health.progress("opening the world")
            if self._job.directory.is_dir():
                os.chdir(self._job.directory)
            torch.set_num_threads(self._job.threads)
            self._world = self._undo.enter_context(open_world(self._job.config.env))
            self._evaluate = evaluator_for(self._world, self.health.progress)
        return self._world.step_spec

    def run_episode(self, sent: Sent | None, number: int) -> EpisodeResult:
        """The episode of a number, durable on the shard when this returns."""
        self.open()
        if self._actor is None:
            assert self._job.shard is not None
            self._remote = self._undo.enter_context(connect(self._job.shard, token=self._job.token))
            self._writer = self._undo.enter_context(self._remote.writer(NAME, self._world.step_spec))
            takeover = make_takeover(self._job.config, self._world)
            self._actor = Actor(
                self._job.config, self._world, self._writer, name=NAME, takeover=takeover, health=self.health
            )
        rolled = self._actor.run_episode(None if sent is None else sent.policy(), number)
        while not self._writer.wait_delivered(DELIVER_S):
            self.health.progress(f"waiting for the shard: {self._writer.delivery.problem or 'it is slow'}")
        return rolled

    def evaluate(self, sent: Sent, config: EvaluationConfig) -> tuple[EvaluationResult, dict[str, bytes]]:
        """Play held-out episodes; the videos come along, since the run's directory may not be here."""
        self.open()
        with tempfile.TemporaryDirectory() as place:
            result = self._evaluate(sent.policy(), config, Path(place))
            return result, {path.name: path.read_bytes() for path in Path(place).iterdir()}


def evaluate_with(player: Minded, policy: ActorPolicy, config: EvaluationConfig, videos: Path) -> EvaluationResult:
    """What a player says of a policy; its videos are put where they belong."""
    result, content = player.ask("evaluate", Sent.of(policy), config)
    for name, video in content.items():
        videos.mkdir(parents=True, exist_ok=True)
        (videos / name).write_bytes(video)
    return result  # type: ignore[no-any-return]


def follow(remote: Remote, addresses: Mapping[str, str]) -> None:
    """Shards may have moved: look for them where they are said to be now."""
    for name in remote.names:
        if name in addresses:
            remote.update_address(name, addresses[name])


class PlayerStage:
    """A Stage for `LocalRun`: a player anywhere, and one shard."""

    def __init__(
        self,
        job: PlayerJob,
        place: ClusterConfig,
        shards: Shards,
        addresses: Callable[[], Mapping[str, str]],
        progress: Callable[[str], None],
    ):
        """`shards` has one server; `addresses` says where it is now."""
        (self._shard,) = shards.remote.names
        self._shards = shards
        self._progress = progress
        apart = elsewhere([ray.get_runtime_context().get_node_id()]) if place.apart else {}

        def make() -> Any:
            now = replace(job, shard=f"{self._shard}={addresses()[self._shard]}")
            return ray.remote(Player).options(**options(place.rollout, threads=3, **apart)).remote(now)

        self.player = Minded("actor", "actor-0", make, place, told=addresses, progress=progress)
        self._spec: StepSpec = self.player.ask("open")
        shards.remote.wait_until_reachable(progress)

    @property
    def step_spec(self) -> StepSpec:
        return self._spec

    @property
    def experience(self) -> Path | Shards:
        return self._shards

    @property
    def commit(self) -> Commit:
        self._shards.remote.wait_until_reachable(self._progress)
        return {self._shard: int(self._shards.remote.status()[self._shard]["commit"])}

    def rollback(self, commit: Commit) -> list[str]:
        if not isinstance(commit, dict) or self._shard not in commit:
            raise RunError(f"this run keeps its episodes elsewhere, and not on {self._shard}; go on without --cluster")
        return self._rollback(commit[self._shard])

    def _rollback(self, commit: int) -> list[str]:
        self._shards.remote.wait_until_reachable(self._progress)
        return list(self._shards.remote.request("rollback", {"commit": commit, "actors": NAME}))

    def start(self, health: Health) -> None:
        """It is ready."""

    def run_episode(self, policy: ActorPolicy | None, number: int) -> EpisodeResult:
        commit = self.commit
        assert isinstance(commit, dict)

        def lost() -> None:
            self._rollback(commit[self._shard])

        sent = None if policy is None else Sent.of(policy)
        return self.player.ask("run_episode", sent, number, lost=lost)  # type: ignore[no-any-return]

    def evaluate(self, policy: ActorPolicy, config: EvaluationConfig, videos: Path) -> EvaluationResult:
        return evaluate_with(self.player, policy, config, videos)

    def close(self) -> None:
        self.player.close()

"""Episode actor: a world in a Ray actor that runs one episode, or one evaluation, whenever it is asked to.

A synchronous run of RLPD has one: an episode is on the shard's disk when it comes back. Beside many actors, the learner
has one to evaluate policies.
"""

from __future__ import annotations

import os
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from understudy.cluster.roles.process import Notice, RoleProcess
from understudy.cluster.roles.rlpd_job import follow
from understudy.core import StepSpec, Tree
from understudy.envs.world import World
from understudy.policies import ActorPolicy
from understudy.service.client.remote import Remote, connect
from understudy.service.client.remote_writer import RemoteWriter
from understudy.training.data.run_episode import EpisodeResult
from understudy.training.offpolicy.actor import Actor
from understudy.training.offpolicy.episode_backend import NAME
from understudy.training.offpolicy.rlpd import RLPDConfig, evaluator_for, make_takeover
from understudy.training.runs.evaluate import EvaluationConfig, EvaluationResult
from understudy.training.runs.health import Health

DELIVERY_WAIT_S = 1.0


@dataclass(frozen=True, kw_only=True)
class EpisodeActorJob:
    """What an episode actor is made of."""

    config: RLPDConfig
    directory: Path  # that relative paths refer to
    threads: int  # of torch: the same as the learner's, so that both compute the same bits
    progress_timeout_s: float
    shard: str | None = None  # name=host:port; None: it only evaluates
    token: str | None = None


@dataclass(frozen=True, kw_only=True)
class PolicySnapshot:
    """A policy on its way to another process."""

    parameters: Tree
    description: dict[str, Any]

    @staticmethod
    def of(policy: ActorPolicy) -> PolicySnapshot:
        return PolicySnapshot(parameters=policy.parameters(), description=policy.description())

    def policy(self) -> ActorPolicy:
        return ActorPolicy.of(self.parameters, self.description)


class EpisodeActor(RoleProcess):
    """One Ray actor. The supervisor starts `open`, `run_episode` or `evaluate`, one at a time."""

    def __init__(self, job: EpisodeActorJob):
        super().__init__(Health(None, role="actor", name=NAME), progress_timeout_s=job.progress_timeout_s)
        self._job = job
        self._undo = ExitStack()
        self._world: World | None = None
        self._recording: tuple[Remote, RemoteWriter, Actor] | None = None

    def notified(self, notice: Notice) -> None:
        if self._recording is not None:
            follow(self._recording[0], notice.addresses)

    def open(self) -> StepSpec:
        """Open the world; returns its spec."""
        return self._opened().step_spec

    def run_episode(self, snapshot: PolicySnapshot | None, number: int) -> EpisodeResult:
        """Run the episode of a number; it is durable on the shard when this returns."""
        _, writer, actor = self._recording = self._recording or self._record(self._opened())
        found = actor.run_episode(None if snapshot is None else snapshot.policy(), number)
        while not writer.wait_delivered(DELIVERY_WAIT_S):
            self.health.progress(f"waiting for the shard: {writer.delivery.problem or 'it is slow'}")
        return found

    def evaluate(self, snapshot: PolicySnapshot, config: EvaluationConfig) -> tuple[EvaluationResult, dict[str, bytes]]:
        """Run held-out episodes; the videos come along, since the run's directory may be on another machine."""
        with tempfile.TemporaryDirectory() as videos:
            found = evaluator_for(self._opened(), self.health.progress)(snapshot.policy(), config, Path(videos))
            return found, {path.name: path.read_bytes() for path in Path(videos).iterdir()}

    def _opened(self) -> World:
        if self._world is None:
            self.health.progress("opening the world")
            if self._job.directory.is_dir():
                os.chdir(self._job.directory)
            torch.set_num_threads(self._job.threads)
            self._world = self._undo.enter_context(self._job.config.open_world())
        return self._world

    def _record(self, world: World) -> tuple[Remote, RemoteWriter, Actor]:
        job = self._job
        assert job.shard is not None, "an evaluator has no shard"
        remote = self._undo.enter_context(connect(job.shard, token=job.token))
        writer = self._undo.enter_context(remote.writer(NAME, world.step_spec))
        takeover = make_takeover(job.config, world)
        return remote, writer, Actor(job.config, world, writer, name=NAME, takeover=takeover, health=self.health)

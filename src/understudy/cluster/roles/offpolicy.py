"""RLPD on a cluster: what stands in its Ray actors. crew.py keeps them going.

| thread of an actor or the learner | takes from | blocks on | woken by |
|---|---|---|---|
| `work` | a world, or the shards | the world, the shards, an evaluator | any of them |
| `look` | - | nothing | the driver, each LOOK_S |

With `max_lag` 0 the learner has one actor, which lives an episode when it is asked for one (stage.py): the local run,
bit for bit. Else actors live as fast as they can, each with a spool on its node's disk, and the learner learns.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import torch

from understudy.cluster.config import ClusterConfig
from understudy.cluster.ray_session import ClusterError, Placed, elsewhere, options
from understudy.cluster.roles.episode_actor import Player, PlayerJob, PlayerStage, evaluate_with, follow
from understudy.cluster.status import Event, RoleNow
from understudy.cluster.supervisor import Minded, stack_after_s
from understudy.core.closeable import Closeable
from understudy.envs.registry import open_world
from understudy.policies import ActorPolicy
from understudy.replay.format.paths import CATALOG_FILE
from understudy.service.client.remote import Remote, connect
from understudy.training.offpolicy.actor import run_actor
from understudy.training.offpolicy.demo_online_mixture import Shards
from understudy.training.offpolicy.learner_process import run_learner
from understudy.training.offpolicy.local_run import LocalRun
from understudy.training.offpolicy.rlpd import RLPDConfig, evaluator_for
from understudy.training.offpolicy.rlpd_learner import RLPDProgress
from understudy.training.runs.evaluate import EvaluationConfig, EvaluationResult
from understudy.training.runs.health import HEALTH, Health
from understudy.training.runs.run import Run

LOCKED_S = 30.0  # for the process before this one to die


@dataclass(frozen=True, kw_only=True)
class OffPolicyJob:
    """All that a role is made of."""

    run: Path
    config: RLPDConfig
    place: ClusterConfig
    token: str
    directory: Path  # in which relative paths are meant
    addresses: dict[str, str]  # of the shards, by name
    disks: dict[str, tuple[str, str]]  # of the shards: their node, and their directory there

    def remote(self, names: tuple[str, ...] = ()) -> Remote:
        places = [f"{name}={where}" for name, where in self.addresses.items() if not names or name in names]
        return connect(places, token=self.token)

    def enter(self) -> None:
        if self.directory.is_dir():
            os.chdir(self.directory)


@dataclass(frozen=True, kw_only=True)
class Told:
    """What the driver tells a role whenever it looks."""

    addresses: dict[str, str]
    num_actors: int


@dataclass(frozen=True, kw_only=True)
class Look:
    """What a role says then. News and events are said once."""

    health: Mapping[str, Any]
    news: tuple[RLPDProgress, ...] = ()
    restored: tuple[str, ...] = ()
    events: tuple[Event, ...] = ()
    roles: tuple[RoleNow, ...] = ()
    restarts: int = 0  # of those whom it keeps going itself


class ActorWorker(Placed):
    """One Ray actor: `run_actor` against all shards."""

    def __init__(self, job: OffPolicyJob, name: str, spool: str):
        self._job, self._name, self._spool = job, name, Path(spool)
        self._remote = job.remote()
        self._num_actors = 1
        self._health = Health(None, role="actor", name=name, progress_timeout_s=stack_after_s(job.place))

    def work(self) -> int:
        """Act until the learner says that it is enough; what was lived is delivered then, or stays in the spool."""
        torch.set_num_threads(max(int(self._job.place.rollout.cpus), 1))
        self._job.enter()
        with self._remote as remote:
            return run_actor(
                self._job.config,
                remote,
                name=self._name,
                spool=self._spool,
                health=self._health,
                num_actors=lambda: self._num_actors,
            )

    def look(self, told: Told) -> Look:
        self._num_actors = max(told.num_actors, 1)
        follow(self._remote, told.addresses)
        return Look(health=self._health.now())


class LearnerWorker(Placed):
    """One Ray actor: the learner, in step with one actor of its own or beside many."""

    def __init__(self, job: OffPolicyJob):
        self._job = job
        place, config = job.place, job.config
        self._in_step = place.max_lag == 0
        self._remote = job.remote((in_step_shard(job.addresses),) if self._in_step else ())
        self._addresses = dict(job.addresses)
        self._lock = threading.Lock()
        self._news: list[RLPDProgress] = []
        self._restored: list[str] = []
        self._player: Minded | None = None
        self._health = Health(job.run / HEALTH, role="learner", name="rlpd", progress_timeout_s=stack_after_s(place))
        self._threads = max(int(place.learner.cpus), 1)
        self._playing = PlayerJob(
            config=config, directory=job.directory, threads=self._threads, token=job.token, stuck_s=stack_after_s(place)
        )

    def work(self) -> None:
        """Learn until the steps are done."""
        torch.set_num_threads(self._threads)
        self._job.enter()
        run = Run(self._job.run)
        run.wait_unlocked(LOCKED_S)
        node, _ = self.where()
        here = {name: Path(path) for name, (at, path) in self._job.disks.items() if at == node and Path(path).is_dir()}
        with ExitStack() as undo:
            undo.enter_context(self._remote)
            if self._in_step:
                self._work_in_step(run, here)
            else:
                evaluator = undo.enter_context(self._evaluator())
                run_learner(
                    run,
                    self._remote,
                    here=here,
                    evaluator=evaluator.evaluate,
                    watch=self._hear,
                    on_restored=self._tell,
                    health=self._health,
                )

    def _work_in_step(self, run: Run, here: Mapping[str, Path]) -> None:
        own = run.store if (run.store / CATALOG_FILE).exists() else None
        mine = {name: path for name, path in here.items() if name in self._remote.names}
        shards = Shards(remote=self._remote, local=mine, own=own)
        stage = PlayerStage(self._playing, self._job.place, shards, lambda: self._addresses, self._health.progress)
        self._player = stage.player
        with LocalRun(run, self._hear, stage, self._health) as local:
            self._tell(local.restored)
            local.run()

    def _evaluator(self) -> _Evaluator:
        evaluator = _Evaluator(self._job, self._playing, lambda: self._addresses)
        self._player = evaluator.player
        return evaluator

    def _tell(self, restored: list[str]) -> None:
        with self._lock:
            self._restored = self._restored + restored

    def _hear(self, news: RLPDProgress) -> None:
        with self._lock:
            if self._news and self._news[-1].evaluation is None:
                self._news.pop()  # only the newest matters
            self._news.append(news)

    def look(self, told: Told) -> Look:
        self._addresses = dict(told.addresses)
        follow(self._remote, told.addresses)
        with self._lock:
            news, self._news = self._news, []
            restored, self._restored = self._restored, []
        player = self._player
        events: list[Event] = []
        if player is not None:
            events, player.events = player.events, []
        return Look(
            health=self._health.now(),
            news=tuple(news),
            restored=tuple(restored),
            events=tuple(events),
            roles=() if player is None else (player.role(),),
            restarts=0 if player is None else player.restarts,
        )


class _Evaluator(Closeable):
    """Judges policies in a process of its own; where there is no room for one, in the learner's."""

    def __init__(self, job: OffPolicyJob, playing: PlayerJob, addresses: Any):
        self._job = job
        apart = elsewhere([ray.get_runtime_context().get_node_id()]) if job.place.apart else {}
        shape = options(job.place.rollout, threads=3, **apart)
        self.player = Minded(
            "evaluator",
            "evaluator",
            lambda: ray.remote(Player).options(**shape).remote(playing),
            job.place,
            told=addresses,
            progress=lambda doing: None,
        )
        self._room = True

    def evaluate(self, policy: ActorPolicy, config: EvaluationConfig, videos: Path) -> EvaluationResult:
        if self._room:
            try:
                return evaluate_with(self.player, policy, config, videos)
            except ClusterError as error:  # no room, or it dies of it time and again
                self._room = False
                self.player.close()
                text = f"the learner evaluates by itself: {error}"
                self.player.events.append(Event(what="worker lost", name="evaluator", text=text))
        with open_world(self._job.config.env) as world:
            return evaluator_for(world)(policy, config, videos)

    def close(self) -> None:
        self.player.close()


def in_step_shard(addresses: Mapping[str, str]) -> str:
    """The shard of a synchronous run: the first."""
    return min(addresses, key=lambda name: int(name.rpartition("-")[2]))

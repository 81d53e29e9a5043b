"""Learner of RLPD on a cluster.

With `max_lag` 0 one actor runs an episode whenever the learner asks for it: the local run, bit for bit. Otherwise
actors run beside the learner, and a process of its own evaluates policies.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

from understudy.cluster.roles.episode_actor import EpisodeActorJob
from understudy.cluster.roles.process import Notice, RoleProcess, location
from understudy.cluster.roles.remote_episodes import OpenClient, RemoteEpisodeBackend, RemoteEvaluator
from understudy.cluster.roles.rlpd_job import RLPDJob, follow
from understudy.replay.format.paths import CATALOG_FILE
from understudy.training.offpolicy.demo_online_mixture import Shards
from understudy.training.offpolicy.learner_process import run_learner
from understudy.training.offpolicy.local_run import LocalRun
from understudy.training.offpolicy.rlpd_learner import RLPDProgress
from understudy.training.runs.health import HEALTH, Health
from understudy.training.runs.run import Run
from understudy.training.runs.threads import pin_threads

LOCK_TIMEOUT_S = 30.0  # for the process before this one to die


class LearnerProcess(RoleProcess):
    """One Ray actor. `open_client` supervises its actor or its evaluator."""

    def __init__(self, job: RLPDJob, open_client: OpenClient):
        health = Health(job.run / HEALTH, role="learner", name="rlpd")
        super().__init__(health, progress_timeout_s=job.cluster.progress_timeout_s)
        self._job, self._open_client = job, open_client
        self._remote = job.connect()
        self._addresses: Mapping[str, str] = job.addresses
        self._actor_job = EpisodeActorJob(
            config=job.config,
            directory=job.directory,
            threads=job.config.threads or max(int(job.cluster.learner.cpus), 1),
            token=job.token,
            progress_timeout_s=job.cluster.progress_timeout_s,
        )

    def work(self) -> None:
        """Learn until the steps of the run are completed."""
        pin_threads(self._actor_job.threads)
        self._job.enter_directory()
        run = Run(self._job.run)
        run.wait_unlocked(LOCK_TIMEOUT_S)
        node, _ = location()
        disks = self._job.disks
        here = {name: Path(path) for name, (at, path) in disks.items() if at == node and Path(path).is_dir()}
        with self._remote:
            if self._job.synchronous:
                self._work_in_turns(run, here)
            else:
                self._work_beside_actors(run, here)

    def _work_in_turns(self, run: Run, here: Mapping[str, Path]) -> None:
        own = run.store if (run.store / CATALOG_FILE).exists() else None
        mine = {name: path for name, path in here.items() if name in self._remote.names}
        shards = Shards(remote=self._remote, local=mine, own=own)
        backend = RemoteEpisodeBackend(self._open_client, self._actor_job, shards, lambda: self._addresses, self._wait)
        self.supervised = backend.client
        with LocalRun(run, self._progressed, backend, self.health, self.stop) as local:
            self.say(local.restored)
            local.run()

    def _work_beside_actors(self, run: Run, here: Mapping[str, Path]) -> None:
        with closing(RemoteEvaluator(self._open_client, self._actor_job)) as evaluator:
            self.supervised = evaluator.client
            run_learner(
                run,
                self._remote,
                here=here,
                evaluator=evaluator.evaluate,
                watch=self._progressed,
                on_restored=self.say,
                health=self.health,
                stop=self.stop,
            )

    def _wait(self, doing: str) -> None:
        """Report what the actor is doing; a stop request does not wait for it for ever."""
        self.health.progress(doing)
        self.stop.check_overdue()

    def _progressed(self, update: RLPDProgress) -> None:
        self.report(update, supersedes=lambda last: last.evaluation is None)

    def notified(self, notice: Notice) -> None:
        self._addresses = notice.addresses
        follow(self._remote, notice.addresses)

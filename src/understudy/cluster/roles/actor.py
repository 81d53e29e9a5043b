"""Actor: runs episodes of RLPD as fast as it can, with a spool on its node's disk, while the learner learns."""

from __future__ import annotations

from pathlib import Path

from understudy.cluster.roles.process import Notice, RoleProcess
from understudy.cluster.roles.rlpd_job import RLPDJob, follow
from understudy.training.offpolicy.actor import run_actor
from understudy.training.runs.health import Health
from understudy.training.runs.threads import pin_threads


class ActorProcess(RoleProcess):
    """One Ray actor: `run_actor` against all shards."""

    def __init__(self, job: RLPDJob, name: str, spool: Path):
        cluster = job.cluster
        super().__init__(Health(None, role="actor", name=name), progress_timeout_s=cluster.progress_timeout_s)
        self._job, self._name, self._spool = job, name, spool
        self._remote = job.connect()
        self._num_actors = 1

    def work(self) -> int:
        """Act until the learner has enough steps; what is not delivered by then stays in the spool."""
        pin_threads(self._job.config.threads or max(int(self._job.cluster.rollout.cpus), 1))
        self._job.enter_directory()
        with self._remote as remote:
            return run_actor(
                self._job.config,
                remote,
                name=self._name,
                spool=self._spool,
                health=self.health,
                num_actors=lambda: self._num_actors,
                stop=self.stop,
            )

    def notified(self, notice: Notice) -> None:
        self._num_actors = max(notice.num_actors, 1)
        follow(self._remote, notice.addresses)

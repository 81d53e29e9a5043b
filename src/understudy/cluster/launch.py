"""Launch: starts the roles of a run on a cluster, and supervises them as its driver until the run is completed."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

from understudy.cluster.config import ClusterConfig
from understudy.cluster.rank_supervisor import RankSupervisor
from understudy.cluster.ray_session import LOCAL, node_statuses, ray_session
from understudy.cluster.rlpd_supervisor import RLPDSupervisor
from understudy.cluster.roles.rank import RankJob
from understudy.cluster.roles.rlpd_job import RLPDJob, synchronous_shard
from understudy.cluster.shard_supervisor import ShardSupervisor
from understudy.cluster.status import Event, FaultCounts, StatusWriter
from understudy.processes.stop import Interrupted, StopRequest, stop_on_signals
from understudy.training.offpolicy.rlpd import RLPDConfig
from understudy.training.offpolicy.rlpd_learner import RLPDProgress
from understudy.training.onpolicy.onpolicy_run import OnPolicyProgress
from understudy.training.runs.config import ConfigError
from understudy.training.runs.run import Run
from understudy.web.tokens import read_token, write_new_token

TOKEN_FILE = "token"  # in the run: what writers must send to a shard
STEP_S = 0.2
STATUS_S = 2.0  # between two writes of the status


class Driver:
    """What all runs on a cluster share: shards, nodes, and the status files."""

    def __init__(self, run: Run, config: ClusterConfig, address: str, *, loopback: bool):
        self.token = _token(run.path, config)
        self.shards = ShardSupervisor(run.path, config, token=self.token, loopback=loopback)
        self._status = StatusWriter(run.path, config, address)
        self._written = 0.0
        self._alive: dict[str, bool] = {}
        self._nodes_lost = 0
        self._how_to_resume = f"`understudy resume {run.path} --cluster {LOCAL if loopback else address}` continues"
        self._status.append([Event(what="began", name="driver", text=f"process {os.getpid()}, Ray at {address}")])

    def run(self, roles: RankSupervisor | RLPDSupervisor, stop: StopRequest) -> None:
        """Supervise shards and roles until the run is completed. After a `stop` request they save, and Stopped is
        raised."""
        stop.describe_unsaved = lambda: f"what came after the last checkpoint will be run again; {self._how_to_resume}"
        with closing(roles):
            while not roles.completed:
                roles.stopping = stop.requested
                roles.step()
                self.shards.step()
                if time.monotonic() - self._written > STATUS_S:
                    self._write_status(roles)
                time.sleep(STEP_S)
        if roles.stopped:
            stopped = stop.stopped()
            saved = roles.stopped.rpartition("; ")[0]  # without how to continue, which is different here
            stopped.sentence = f"{saved}; {self._how_to_resume}"
            raise stopped

    def __enter__(self) -> Driver:
        try:
            self.shards.open_all()
        except BaseException as error:
            self._close(error)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close(error)

    def _close(self, error: BaseException | None) -> None:
        self.shards.close()
        is_stopped = isinstance(error, Interrupted)
        text = "completed" if error is None else str(error) if is_stopped else f"{type(error).__name__}: {error}"
        self._status.append([Event(what="ended", name="driver", text=text)])
        well = error is None or is_stopped
        self._status.write("ended" if well else "failed", None if well else text)

    def _write_status(self, roles: RankSupervisor | RLPDSupervisor) -> None:
        self._written = time.monotonic()
        status = self._status
        seen = {node.id: node.seen_s for node in status.nodes}
        status.nodes = [
            node if node.alive else replace(node, seen_s=seen.get(node.id, node.seen_s)) for node in node_statuses()
        ]
        status.shards = self.shards.statuses()
        status.roles = [*self.shards.roles(), *roles.roles()]
        status.append([*self._node_events(), *self.shards.take_events(), *roles.take_events()])
        totals = self.shards.totals() + roles.totals()
        status.counts = FaultCounts(
            restarts=totals["restarts"],
            reissued=totals["reissued"],
            fenced=totals["fenced"],
            nodes_lost=self._nodes_lost,
        )
        status.write()

    def _node_events(self) -> list[Event]:
        """Nodes that joined or were lost since the last time."""
        events = []
        for node in self._status.nodes:
            before = self._alive.get(node.id)
            self._alive[node.id] = node.alive
            if before is None and node.alive:
                events.append(Event(what="node joined", name=node.id, text=f"{node.host} with {node.cpus:g} CPUs"))
            if before and not node.alive:
                self._nodes_lost += 1
                events.append(Event(what="node lost", name=node.id, text=f"{node.host} does not answer any more"))
        return events


def run_on_policy(
    run: Run,
    config: ClusterConfig,
    *,
    address: str = LOCAL,
    on_update: Callable[[OnPolicyProgress], None] = lambda update: None,
    on_messages: Callable[[list[str]], None] = lambda lines: None,
) -> None:
    """Train with GRPO, RLOO, REINFORCE++ or PPO on a cluster, until all iterations are completed."""
    run = Run(run.path.resolve())
    with (
        ray_session(address, config) as head,
        stop_on_signals() as stop,  # only now: Ray sets handlers of its own
        Driver(run, config, head, loopback=address == LOCAL) as driver,
    ):

        def make_job(nodes: tuple[str, ...]) -> RankJob:
            addresses = driver.shards.addresses
            return RankJob(run=run.path, cluster=config, token=driver.token, addresses=addresses, learner_nodes=nodes)

        driver.run(
            RankSupervisor(
                make_job, config, lambda: driver.shards.addresses, on_update=on_update, on_messages=on_messages
            ),
            stop,
        )


def run_rlpd(
    run: Run,
    config: ClusterConfig,
    *,
    address: str = LOCAL,
    on_update: Callable[[RLPDProgress], None] = lambda update: None,
    on_messages: Callable[[list[str]], None] = lambda lines: None,
) -> None:
    """Train with RLPD on a cluster, until all steps are completed."""
    run = Run(run.path.resolve())
    rlpd = run.config(RLPDConfig)
    _check_rlpd(config)
    directory = Path.cwd()
    with (
        ray_session(address, config) as head,
        stop_on_signals() as stop,  # only now: Ray sets handlers of its own
        Driver(run, config, head, loopback=address == LOCAL) as driver,
    ):

        def make_job() -> RLPDJob:
            return RLPDJob(
                run=run.path,
                config=rlpd,
                cluster=config,
                token=driver.token,
                directory=directory,
                addresses=driver.shards.addresses,
                disks={one.name: (one.node, one.path) for one in driver.shards.statuses()},
            )

        if config.max_lag == 0:
            shard = synchronous_shard(driver.shards.addresses)
            on_messages(
                [
                    f"max_lag 0: one actor and the learner take turns, as in one process, and {shard} keeps the "
                    f"episodes; with --cluster.max-lag 1, {config.rollout.num} actors run beside the learner"
                ]
            )
        driver.run(RLPDSupervisor(make_job, config, on_update=on_update, on_messages=on_messages), stop)


def _check_rlpd(config: ClusterConfig) -> None:
    """Refuse options that RLPD would ignore."""
    options: tuple[tuple[str, Any, int, str], ...] = (
        ("learner.num", config.learner.num, 1, "RLPD has one learner"),
        ("rollout.envs", config.rollout.envs, 1, "an actor has one world; raise rollout.num"),
        ("inference.num", config.inference.num, 0, "an actor has its own copy of the policy"),
    )
    for option, got, expected, why in options:
        if got != expected:
            raise ConfigError(f"cluster.{option}: expected {expected} for rlpd, got {got}; {why}")


def _token(run: Path, config: ClusterConfig) -> str:
    """The token of the shards; generated once for a run, readable by its owner alone."""
    if config.token_file is not None:
        return str(read_token(Path(config.token_file)))
    path = run / TOKEN_FILE
    if not path.exists():
        write_new_token(path)
    return str(read_token(path))

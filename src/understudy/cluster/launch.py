"""Launch: puts the roles of a run together, and stays as its driver until it is over."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Protocol

from understudy.cluster.config import ClusterConfig
from understudy.cluster.rank_supervisor import Learners
from understudy.cluster.ray_session import HERE, connected, nodes_now
from understudy.cluster.roles.rank import RankJob
from understudy.cluster.shard_supervisor import ShardKeeper
from understudy.cluster.status import Event, Journal, RoleNow
from understudy.training.onpolicy.onpolicy_run import OnPolicyProgress
from understudy.training.runs.config import to_json
from understudy.training.runs.run import Run
from understudy.web.tokens import read_token, write_new_token

logger = logging.getLogger(__name__)

TOKEN = "token"  # in the run: what writers must show to a shard
TICK_S = 0.2
BEAT_S = 2.0


class Kept(Protocol):
    """Whoever is kept going beside the shards, to those who watch: Learners, or a Crew."""

    events: list[Event]
    restarts: int
    done: bool

    def roles(self) -> list[RoleNow]: ...

    def totals(self) -> dict[str, int]: ...


class Driver:
    """What is common to all runs on a cluster: the shards, the nodes, and the files that tell of them."""

    def __init__(self, run: Run, place: ClusterConfig, address: str, *, loopback: bool):
        self.run, self.place = run, place
        self.token = _token(run.path, place)
        self.journal = Journal(run.path, to_json(place), address)
        self.shards = ShardKeeper(run.path, place, token=self.token, loopback=loopback)
        self._beat = 0.0
        self._alive: dict[str, bool] = {}
        self.journal.tell([Event(what="began", name="driver", text=f"process {os.getpid()}, Ray at {address}")])

    def step(self, kept: Kept) -> None:
        """Look after the shards, and write down how it all goes."""
        self.shards.step()
        if time.monotonic() - self._beat < BEAT_S:
            return
        self._beat = time.monotonic()
        journal = self.journal
        seen = {node.id: node.seen_s for node in journal.nodes}
        journal.nodes = [
            node if node.alive else replace(node, seen_s=seen.get(node.id, node.seen_s)) for node in nodes_now()
        ]
        journal.shards = self.shards.shards_now()
        journal.roles = [*self.shards.roles(), *kept.roles()]
        self._count(kept)
        events, self.shards.events, kept.events = self.shards.events + kept.events, [], []
        journal.tell([*self._changes(), *events])
        journal.write()

    def keep(self, kept: Kept, look: Callable[[], None]) -> None:
        """Look after the shards and after those who are kept going beside them, until these are done."""
        while not kept.done:
            look()
            self.step(kept)
            time.sleep(TICK_S)

    def __enter__(self) -> Driver:
        try:
            self.shards.start()
        except BaseException as error:
            self.close(error)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(error)

    def close(self, error: BaseException | None) -> None:
        self.shards.close()
        text = "done" if error is None else f"{type(error).__name__}: {error}"
        self.journal.tell([Event(what="ended", name="driver", text=text)])
        self.journal.write("ended" if error is None else "failed", None if error is None else text)

    def _count(self, kept: Kept) -> None:
        counts, totals = self.journal.counts, kept.totals()
        counts.reissued, counts.fenced = totals["reissued"], totals["fenced"]
        counts.restarts = self.shards.num_restarts + totals["restarts"] + kept.restarts

    def _changes(self) -> list[Event]:
        """Nodes that came or went since the last time."""
        events = []
        for node in self.journal.nodes:
            before = self._alive.get(node.id)
            self._alive[node.id] = node.alive
            if before is None and node.alive:
                events.append(Event(what="node joined", name=node.id, text=f"{node.host} with {node.cpus:g} CPUs"))
            if before and not node.alive:
                self.journal.counts.nodes_lost += 1
                events.append(Event(what="node lost", name=node.id, text=f"{node.host} does not answer any more"))
        return events


def run_on_policy(
    run: Run,
    place: ClusterConfig,
    *,
    address: str = HERE,
    watch: Callable[[OnPolicyProgress], None] | None = None,
    told: Callable[[list[str]], None] | None = None,
) -> None:
    """A run of GRPO, RLOO, REINFORCE++ or PPO on a cluster, until its iterations are done."""
    run = Run(run.path.resolve())
    with connected(address, place) as found, Driver(run, place, found, loopback=address == HERE) as driver:

        def job(nodes: tuple[str, ...]) -> RankJob:
            return RankJob(
                run=run.path, place=place, token=driver.token, addresses=driver.shards.addresses, learner_nodes=nodes
            )

        with closing(Learners(job, place, watch or (lambda news: None), told or (lambda lines: None))) as learners:
            driver.keep(learners, lambda: learners.step(driver.shards.addresses))


def _token(run: Path, place: ClusterConfig) -> str:
    """What writers must show; made once for a run, readable by its owner alone."""
    if place.token_file is not None:
        return str(read_token(Path(place.token_file)))
    path = run / TOKEN
    if not path.exists():
        write_new_token(path)
    return str(read_token(path))

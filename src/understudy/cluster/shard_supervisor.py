"""Supervisor of shards: each is pinned to the node whose disk holds its store.

A shard that is lost is opened again on its node. If its node is gone for shard_node_timeout_s, its store is looked for
on the disks of the other nodes (a volume that moved, a disk that several nodes see). If no node has it, the shard is
lost with all steps that were acknowledged there: an empty store takes over its name, and the run says so for ever.
"""

from __future__ import annotations

import logging
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import ray

from understudy.cluster.config import ClusterConfig
from understudy.cluster.ray_session import ClusterError, actor_options, nodes_that_fit, on_node
from understudy.cluster.roles.shard import ShardInfo, ShardNotHereError, ShardProcess
from understudy.cluster.status import NodeStatus, ShardStatus
from understudy.cluster.supervisor import ActorLost, SupervisedActor, Supervisor
from understudy.durable import files
from understudy.durable.checked_json import from_checked_json, to_checked_json
from understudy.training.runs.config import from_json

logger = logging.getLogger(__name__)

SHARDS_FILE = "shards.json"  # in the run: which store each shard is, and where it was served last
POLL_INTERVAL_S = 2.0
MAX_FIRST_RESTARTS = 2  # of a shard that was never open


@dataclass(kw_only=True)
class _Record:
    """What the next driver must know of a shard."""

    path: str
    store: str | None = None  # its identity, once it is known
    host: str = ""  # the address of the node that it was on last
    lost_steps: int = 0
    replaces: tuple[str, ...] = ()  # stores that were lost before it


@dataclass(eq=False, kw_only=True)
class _Shard(SupervisedActor):
    index: int
    port: int
    record: _Record
    info: ShardInfo | None = None
    seen: float = 0.0  # when it last ran, by time.monotonic()
    tried: tuple[str, ...] = ()  # nodes that do not have its store


class ShardSupervisor(Supervisor[_Shard]):
    """Opens the shards of a run, and knows where they are."""

    poll_interval_s = POLL_INTERVAL_S
    limits_restarts = False

    def __init__(self, run: Path, config: ClusterConfig, *, token: str, loopback: bool):
        root = Path(config.shard_dir) / run.resolve().name if config.shard_dir else run.resolve() / "shards"
        first_port = config.shards.port
        shards = [
            _Shard(
                role="shard",
                name=f"shard-{index}",
                index=index,
                record=_Record(path=str(root / f"shard-{index}")),
                port=first_port + index if first_port else 0,
                doing="serving",
            )
            for index in range(config.shards.num)
        ]
        super().__init__(config, shards)
        self._file = run / SHARDS_FILE
        self._token = token
        self._host = "127.0.0.1" if loopback else None
        self._read_file()

    @property
    def addresses(self) -> dict[str, str]:
        """Where each shard is served, or was last."""
        return {one.name: one.info.address for one in self.actors if one.info is not None}

    @property
    def all_running(self) -> bool:
        return all(one.state == "running" for one in self.actors)

    def statuses(self) -> list[ShardStatus]:
        return [
            ShardStatus(
                name=one.name,
                node=one.node or one.last_node,
                address=one.info.address if one.info else "",
                path=one.record.path,
                state="running" if one.state == "running" else "restarting",
                steps=one.info.steps if one.info else 0,
                commit=one.info.commit if one.info else 0,
                lost_steps=one.record.lost_steps,
            )
            for one in self.actors
        ]

    def open_all(self) -> None:
        """Wait until all shards run."""
        deadline = time.monotonic() + self.config.placement_timeout_s
        while not self.all_running:
            self.step(wait_s=0.05)
            if failed := [one for one in self.actors if one.info is None and one.restarts > MAX_FIRST_RESTARTS]:
                raise ClusterError(f"{failed[0].name}: cannot be opened: it {failed[0].error}")
            if time.monotonic() > deadline:
                late = "; ".join(f"{one.name}: {one.error or one.state}" for one in self.actors if one.pid is None)
                raise ClusterError(
                    f"shards: not open within {self.config.placement_timeout_s:g} s ({late}); lower "
                    f"--cluster.shards.cpus, or add nodes"
                )

    # ---- the policy

    def create(self, actor: _Shard) -> Any | None:
        node = self._choose_node(actor)
        if node is None:
            return None
        actor.record.host = node.address
        options = actor_options(self.config.shards, threads=8, **on_node(node.id))
        arguments = (actor.name, actor.record.path, self._host, actor.port, self._token)
        any_port = self.config.shards.port == 0
        return ray.remote(ShardProcess).options(**options).remote(*arguments, any_port=any_port)

    def _choose_node(self, shard: _Shard) -> NodeStatus | None:
        """The node that has its disk; if that is gone for too long, one that may have its store."""
        alive = nodes_that_fit(self.config.shards.ray_resources())
        node = shard.node or shard.last_node
        same = [one for one in alive if one.id == node] or [one for one in alive if one.address == shard.record.host]
        found = [one for one in same if one.id not in shard.tried]
        if not found and shard.record.store is None:
            found = alive[shard.index % len(alive) :] if alive else []
        elif not found and alive:
            if shard.info is not None and time.monotonic() - shard.seen < self.config.shard_node_timeout_s:
                return None
            found = [one for one in alive if one.id not in shard.tried]
            if not found:
                self._declare_lost(shard)
        return found[0] if found else None

    def start(self, actor: _Shard) -> None:
        actor.send("open", actor.record.store, actor.record.replaces)

    def started(self, actor: _Shard, reply: ShardInfo) -> None:
        actor.enter("running")
        actor.record.store, actor.port = reply.store, int(reply.address.rpartition(":")[2])
        actor.tried, actor.error = (), None
        self.received(actor, reply)
        if actor.restarts:
            text = f"{actor.name} is served at {reply.address} again, with {reply.steps} steps"
            self.record("shard back", actor.name, text)
        self._write_file()

    def poll(self, actor: _Shard) -> None:
        actor.send("poll")

    def received(self, actor: _Shard, reply: ShardInfo) -> None:
        actor.info, actor.seen = reply, time.monotonic()

    def failed(self, actor: _Shard, error: BaseException) -> None:
        if isinstance(error, ShardNotHereError):
            assert actor.node is not None
            actor.tried = (*actor.tried, actor.node)
            self.drop(actor, str(error))
        else:
            self.lost(actor, ActorLost.by(error))

    def lost(self, actor: _Shard, lost: ActorLost) -> None:
        self.restart(actor, lost, then="it is opened again where its disk is")

    def placement_timed_out(self, actor: _Shard) -> None:
        """`open_all` has a timeout of its own; later, the run waits for a shard as long as it takes."""

    def _declare_lost(self, shard: _Shard) -> None:
        """No node has its store: begin with an empty one."""
        record = shard.record
        if shard.info is None:
            raise ClusterError(
                f"{shard.name}: its store was at {record.host}:{record.path}, and no node has it; start Ray on the "
                f"node with that disk, or remove {shard.name} from {self._file} to continue without its steps"
            )
        steps = shard.info.steps
        text = (
            f"{shard.name} is lost: no node has {record.path}, so {steps} acknowledged steps are gone until that disk "
            f"is back (then: `understudy serve {record.path}` or `understudy info`); an empty shard takes its place"
        )
        logger.error("%s", text)
        self.record("shard lost", shard.name, text)
        record.lost_steps += steps
        record.replaces = (*record.replaces, shard.info.store)
        record.store, shard.tried, shard.node, shard.last_node = None, (), None, None

    # ---- for the next driver

    def _read_file(self) -> None:
        try:
            found, intact = from_checked_json(self._file.read_bytes())
        except FileNotFoundError:
            return
        except ValueError as error:
            raise ClusterError(f"{self._file}: is not JSON ({error}); restore it") from None
        if intact is False:
            raise ClusterError(f"{self._file}: does not match its checksum; restore it")
        names = {shard.name for shard in self.actors}
        if more := sorted(found.keys() - names):
            raise ClusterError(
                f"shards: this run has {', '.join(more)} too, got {len(names)}; use --cluster.shards.num {len(found)}"
            )
        for shard in self.actors:
            if shard.name in found:
                shard.record = from_json(_Record, found[shard.name])

    def _write_file(self) -> None:
        content = {one.name: asdict(one.record) for one in self.actors if one.record.store is not None}
        files.write_durably(self._file, to_checked_json(content))

"""Status of a cluster: two files of a run that the driver writes and the dashboard reads. Imports no ray.

RUN/cluster.json    the latest status: nodes, roles, shards, fault counts; replaced as a whole
RUN/cluster.jsonl   events, one line each, appended
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

from understudy.cluster.config import ClusterConfig
from understudy.durable import files
from understudy.training.runs.config import from_json, to_json

STATUS_FILE, EVENTS_FILE = "cluster.json", "cluster.jsonl"

RoleName: TypeAlias = Literal["learner", "shard", "inference", "rollout", "actor", "evaluator"]
# A `stuck` process runs without progress; a `restarting` one was lost and is created again; a `lost` one is not.
RoleState: TypeAlias = Literal["pending placement", "starting", "running", "stuck", "restarting", "ended", "lost"]
EventKind: TypeAlias = Literal[
    "began",
    "ended",
    "worker lost",
    "worker back",
    "stuck",
    "node lost",
    "node joined",
    "shard lost",
    "shard back",
    "learners restarted",
    "tickets reissued",
]


# Every field has a default and a plain type: the dashboard reads these files without trusting any field of them.


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that a person may want to know afterwards."""

    time_s: float = field(default_factory=time.time)
    what: str = ""  # an EventKind
    name: str = ""  # of the process, node or shard
    text: str = ""  # one sentence
    stack: str | None = None


@dataclass(frozen=True, kw_only=True)
class RoleStatus:
    """One process of the cluster."""

    role: str = ""  # a RoleName
    name: str = ""
    node: str | None = None
    pid: int | None = None
    state: str = "starting"  # a RoleState
    doing: str = ""
    since_s: float = field(default_factory=time.time)  # when it entered this state
    restarts: int = 0
    error: str | None = None
    stack: str | None = None


@dataclass(frozen=True, kw_only=True)
class ShardStatus:
    """A store of the run and where it is served."""

    name: str = ""
    node: str | None = None
    address: str = ""
    path: str = ""
    state: str = "restarting"  # running, restarting or lost
    steps: int = 0
    commit: int = 0
    lost_steps: int = 0  # acknowledged steps on disks that no node has any more


@dataclass(frozen=True, kw_only=True)
class NodeStatus:
    """A machine as Ray sees it."""

    id: str = ""
    host: str = ""
    address: str = ""
    alive: bool = False
    cpus: float = 0.0
    free_cpus: float = 0.0
    gpus: float = 0.0
    free_gpus: float = 0.0
    memory_bytes: int = 0
    seen_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class FaultCounts:
    """Faults that were recovered from since the driver started."""

    restarts: int = 0
    reissued: int = 0  # tickets that were given to another worker
    fenced: int = 0  # workers that were replaced while a call to them was outstanding
    nodes_lost: int = 0


@dataclass(frozen=True, kw_only=True)
class ClusterStatus:
    """The whole of cluster.json."""

    updated_s: float = 0.0
    pid: int | None = None  # of the driver
    host: str = ""  # of the driver
    address: str = ""  # of Ray
    state: str = "running"  # of the driver: running, ended or failed
    error: str | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    nodes: tuple[NodeStatus, ...] = ()
    roles: tuple[RoleStatus, ...] = ()
    shards: tuple[ShardStatus, ...] = ()
    counts: FaultCounts = FaultCounts()


class StatusWriter:
    """Writes both files. Its owner assigns nodes, roles, shards and counts between two calls of `write`."""

    def __init__(self, run: Path, config: ClusterConfig, address: str):
        self._run, self._config, self._address = run, to_json(config), address
        self.nodes: list[NodeStatus] = []
        self.roles: list[RoleStatus] = []
        self.shards: list[ShardStatus] = []
        self.counts = FaultCounts()

    def append(self, events: Iterable[Event]) -> None:
        lines = "".join(f"{json.dumps(asdict(event))}\n" for event in events)
        if lines:
            with (self._run / EVENTS_FILE).open("a") as file:
                file.write(lines)

    def write(self, state: Literal["running", "ended", "failed"] = "running", error: str | None = None) -> None:
        """Replace the status."""
        status = ClusterStatus(
            updated_s=time.time(),
            pid=os.getpid(),
            host=platform.node(),
            address=self._address,
            state=state,
            error=error,
            config=self._config,
            nodes=tuple(self.nodes),
            roles=tuple(self.roles),
            shards=tuple(self.shards),
            counts=self.counts,
        )
        files.write_atomically(self._run / STATUS_FILE, json.dumps(asdict(status)).encode())


def last_cluster_config(run: Path) -> ClusterConfig | None:
    """The config that a run last had on a cluster, if it was on one."""
    try:
        return from_json(ClusterConfig, json.loads((run / STATUS_FILE).read_text())["config"])
    except (OSError, ValueError, KeyError):
        return None

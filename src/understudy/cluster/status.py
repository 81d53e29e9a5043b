"""State: what the driver knows of its cluster, in two files of the run, for whoever watches.

RUN/cluster.json    now: nodes, roles, shards, counts
RUN/cluster.jsonl   what happened, a line each
"""

from __future__ import annotations

import json
import os
import platform
import threading
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

from understudy.cluster.config import ClusterConfig
from understudy.durable import files
from understudy.training.runs.config import from_json

NOW, EVENTS = "cluster.json", "cluster.jsonl"

RoleState: TypeAlias = Literal["up", "starting", "waiting for room", "stuck", "gone", "ended", "lost"]
What: TypeAlias = Literal[
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


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that a person may want to know afterwards."""

    what: What
    name: str  # whom it happened to
    text: str  # one sentence
    stack: str | None = None
    time_s: float = field(default_factory=time.time)


@dataclass(frozen=True, kw_only=True)
class RoleNow:
    """One process of the cluster."""

    role: Literal["rollout", "inference", "learner", "shard", "actor", "evaluator"]
    name: str
    state: RoleState
    node: str | None = None
    pid: int | None = None
    doing: str = ""
    since_s: float = field(default_factory=time.time)
    restarts: int = 0
    error: str | None = None
    stack: str | None = None


@dataclass(frozen=True, kw_only=True)
class ShardNow:
    """A store and where it is served. `lost_steps` were acknowledged and are on a disk that is gone."""

    name: str
    node: str
    address: str
    path: str
    state: Literal["up", "gone", "lost"]
    steps: int = 0
    commit: int = 0
    lost_steps: int = 0


@dataclass(frozen=True, kw_only=True)
class NodeNow:
    """A machine as Ray sees it."""

    id: str
    host: str
    address: str
    alive: bool
    cpus: float
    free_cpus: float
    gpus: float
    free_gpus: float
    memory_bytes: int
    seen_s: float


@dataclass(kw_only=True)
class Counts:
    """Of the whole run on this cluster."""

    restarts: int = 0
    reissued: int = 0
    fenced: int = 0
    nodes_lost: int = 0


def last_place(run: Path) -> ClusterConfig | None:
    """How a run was last placed, if it was."""
    try:
        return from_json(ClusterConfig, json.loads((run / NOW).read_text())["config"])
    except (OSError, ValueError, KeyError):
        return None


class Journal:
    """Writes both files. For several threads."""

    def __init__(self, run: Path, config: dict[str, Any], address: str):
        self._run = run
        self._config = config
        self._address = address
        self._lock = threading.Lock()
        self.counts = Counts()
        self.nodes: list[NodeNow] = []
        self.roles: list[RoleNow] = []
        self.shards: list[ShardNow] = []

    def tell(self, events: Iterable[Event]) -> None:
        lines = "".join(f"{json.dumps(asdict(event))}\n" for event in events)
        if lines:
            with self._lock, (self._run / EVENTS).open("a") as file:
                file.write(lines)

    def write(self, state: Literal["running", "ended", "failed"] = "running", error: str | None = None) -> None:
        """What is known now, in place of what was."""
        said = {
            "updated_s": time.time(),
            "pid": os.getpid(),
            "host": platform.node(),
            "address": self._address,
            "state": state,
            "error": error,
            "config": self._config,
            "nodes": [asdict(node) for node in self.nodes],
            "roles": [asdict(role) for role in self.roles],
            "shards": [asdict(shard) for shard in self.shards],
            "counts": asdict(self.counts),
        }
        with self._lock:
            files.write_atomically(self._run / NOW, json.dumps(said).encode())

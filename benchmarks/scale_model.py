"""What a cluster carries, from what was measured on one machine: pure functions, with every assumption a parameter.

For E environments at f Hz with rows of b bytes, D bytes a second drawn by learners, and N nodes:

    ingest I  = E f b                                      bytes a second that are made durable
    CPU       = [E f c_env + E c_idle + I (c_server + c_writer) + D (d_server + d_learner)] / (N cores)
    disk      = I a / (N disk)                             a: bytes on the disk for each byte of a chunk
    network   = (I + D) (N - 1)/N / (N nic)                in each direction; writers and learners on all nodes alike
    shard     = I / (N shards s)                           s: the most that one server was seen to take
    memory    = E m_env / (N memory)

Environments that are not `inside` (robots, other machines) bring their own CPU and memory, and all of I comes in.
Each is a share: what reaches `limit` first is what runs out. All are straight lines in E, so the most environments
follow by division. What the model leaves out: policies' GPUs, the time that a network takes, shards that are unevenly
filled, and disks that get slower; learners draw from what is in memory.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

RESOURCES = ("CPU", "disk", "network", "shard", "memory")
LIMIT = 0.8  # of a resource that may be planned with


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What was measured."""

    server_s_per_gb: float  # CPU of a server for a GB that it makes durable
    writer_s_per_gb: float  # of the writer's process, beside the environment's own
    writer_idle_cores: float  # of a writer that is connected and writes nothing
    draw_server_s_per_gb: float  # CPU of servers for a GB of batches
    draw_learner_s_per_gb: float
    shard_gb_s: float  # the most that one server was seen to take
    disk_amplification: float  # bytes on the disk for each byte of a chunk

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 0 or (value == 0 and name in ("shard_gb_s", "disk_amplification")):
                raise ValueError(f"{name}: expected a cost above 0, got {value}; measure it with benchmarks/scale.py")


@dataclass(frozen=True, kw_only=True)
class Node:
    """The shape of one machine."""

    cores: float = 64
    gpus: int = 4
    disk_gb_s: float = 2.0  # that are durable, in writes of 1 MB
    nic_gb_s: float = 3.125  # each way; 25 Gbit/s
    memory_gb: float = 512.0
    shards: int = 1


@dataclass(frozen=True, kw_only=True)
class Load:
    """What is asked of the cluster."""

    envs: float
    rate_hz: float = 10.0
    row_bytes: int = 98_000
    env_s_per_step: float = 0.016  # CPU of a simulator; LIBERO's, with a look every eighth step (docs/simulators.md)
    env_memory_gb: float = 0.65
    inside: bool = True  # environments and their writers are on the nodes
    batches_s: float = 0.0  # of all learners together
    batch_bytes: int = 50_000_000

    @property
    def steps_s(self) -> float:
        return self.envs * self.rate_hz

    @property
    def ingest_gb_s(self) -> float:
        return self.steps_s * self.row_bytes / 1e9

    @property
    def draw_gb_s(self) -> float:
        return self.batches_s * self.batch_bytes / 1e9


def shares(load: Load, num_nodes: int, node: Node, costs: Costs) -> dict[str, float]:
    """How full each resource of the whole is; 1 is full."""
    ingest, draw = load.ingest_gb_s, load.draw_gb_s
    cores = ingest * costs.server_s_per_gb + draw * (costs.draw_server_s_per_gb + costs.draw_learner_s_per_gb)
    if load.inside:
        cores += load.steps_s * load.env_s_per_step + load.envs * costs.writer_idle_cores
        cores += ingest * costs.writer_s_per_gb
    elsewhere = (num_nodes - 1) / num_nodes
    return {
        "CPU": cores / (num_nodes * node.cores),
        "disk": ingest * costs.disk_amplification / (num_nodes * node.disk_gb_s),
        "network": (ingest * (elsewhere if load.inside else 1) + draw * elsewhere) / (num_nodes * node.nic_gb_s),
        "shard": ingest / (num_nodes * node.shards * costs.shard_gb_s),
        "memory": load.inside * load.envs * load.env_memory_gb / (num_nodes * node.memory_gb),
    }


def first_full(load: Load, num_nodes: int, node: Node, costs: Costs) -> tuple[str, float]:
    """The fullest resource, and how full it is."""
    found = shares(load, num_nodes, node, costs)
    name = max(found, key=lambda one: found[one])
    return name, found[name]


def most_envs(load: Load, num_nodes: int, node: Node, costs: Costs, limit: float = LIMIT) -> tuple[float, str]:
    """How many environments there may be until a resource is at `limit`, and which one; load.envs does not count."""
    none = shares(replace(load, envs=0), num_nodes, node, costs)
    one = shares(replace(load, envs=1), num_nodes, node, costs)
    most = {name: (limit - none[name]) / (one[name] - none[name]) for name in RESOURCES if one[name] > none[name]}
    if not most:
        raise ValueError("most_envs: environments cost nothing here; give them a rate, bytes or CPU time")
    name = min(most, key=lambda resource: most[resource])
    return max(most[name], 0.0), name


def cores_per_env(load: Load, costs: Costs) -> float:
    """What one environment takes: its simulator, its writer and its part of the servers."""
    return (
        load.rate_hz * load.env_s_per_step
        + costs.writer_idle_cores
        + load.rate_hz * load.row_bytes / 1e9 * (costs.server_s_per_gb + costs.writer_s_per_gb)
    )


def costs_of(figures: Mapping[str, Any], envs: int | None = None) -> Costs:
    """Costs from the figures of benchmarks/scale.py: those of one number of environments, by default of the largest.

    What idle writers take is taken out of what writing takes. Medians over the rounds.
    """
    points = {point["envs"]: point for point in figures["points"]}
    count = max(points) if envs is None else envs
    rounds = [one for one in points[count]["rounds"] if one["full"]["chunk_mb_s"] and one["alone"]["batches_s"]]
    if not rounds:
        raise ValueError(
            f"{count} environments: nothing became durable or was drawn while it was measured; use longer phases"
        )
    most = points[max(points)]  # where writers that do nothing are enough to be seen
    study = figures["study"]
    idle = statistics.median(one["alone"]["cores"]["writers"] for one in most["rounds"]) / most["envs"]
    median = statistics.median

    def drawing(one: Mapping[str, Any], role: str) -> float:
        return float(one["alone"]["cores"][role]) / _drawn_gb_s(one, study)

    def ingest(one: Mapping[str, Any]) -> float:
        return float(one["full"]["chunk_mb_s"]) / 1e3

    return Costs(
        server_s_per_gb=median([one["full"]["cores"]["servers"] / ingest(one) for one in rounds]),
        writer_s_per_gb=median(
            [max(one["full"]["cores"]["writers"] - idle * one["envs"], 0.0) / ingest(one) for one in rounds]
        ),
        writer_idle_cores=idle,
        draw_server_s_per_gb=median(drawing(one, "servers") for one in rounds),
        draw_learner_s_per_gb=median(drawing(one, "learner") for one in rounds),
        shard_gb_s=max(ingest(one) for one in (*figures["one_shard"], *rounds)),
        disk_amplification=median([one["full"]["disk_mb_s"] / one["full"]["chunk_mb_s"] for one in rounds]),
    )


def _drawn_gb_s(one: Mapping[str, Any], study: Mapping[str, Any]) -> float:
    """Each batch is drawn from all shards, and each of them counts its part as one."""
    return float(one["alone"]["batches_s"] / study["shards"] * study["batch_bytes"] / 1e9)


def here(figures: Mapping[str, Any], envs: int, other_cores: float, costs: Costs) -> float:
    """Steps a second that the model expects of the machine that was measured, at full speed, beside other programs."""
    cores = max(figures["study"]["cores"] - other_cores - envs * costs.writer_idle_cores, 0.0)
    gb_s = cores / (costs.server_s_per_gb + costs.writer_s_per_gb)
    return float(gb_s * 1e9 / figures["study"]["row_bytes"])

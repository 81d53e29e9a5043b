"""Ray session: connects to Ray, or starts one for this run alone; reads nodes and resources; options of actors."""

from __future__ import annotations

import logging
import os
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import ray
from ray._private.state import available_resources_per_node
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from understudy.cluster.config import ClusterConfig, RoleConfig
from understudy.cluster.status import NodeStatus
from understudy.core import UnderstudyError

LOCAL = "local"  # the address of a Ray that is started for this run alone
# Environment variables that workers get from the driver, by their prefix.
FORWARDED = ("UNDERSTUDY_", "MUJOCO_", "LP_NUM_THREADS", "PYTHONPATH", "PYTHONWARNINGS", "HF_", "GLOO_", "NCCL_")
CONNECT_TIMEOUT_S = 5.0
OBJECT_STORE_BYTES = 2 * 2**30  # of a local Ray, at most


class ClusterError(UnderstudyError):
    """The cluster cannot do what is asked of it."""


@contextmanager
def ray_session(address: str, config: ClusterConfig) -> Iterator[str]:
    """Connect to Ray for as long as the block lasts; yields the address of its head."""
    os.environ.setdefault("RAY_worker_niceness", "0")  # at Ray's 15 its workers starve beside other processes
    variables = {name: value for name, value in os.environ.items() if name.startswith(FORWARDED)}
    variables["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    common: dict[str, Any] = {
        "runtime_env": {"env_vars": variables},
        "logging_level": logging.WARNING,
        "log_to_driver": False,
        "configure_logging": False,
    }
    try:
        if address == LOCAL:
            free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
            ray.init(
                address="local",
                num_cpus=max(os.cpu_count() or 1, int(config.cpus()) + 1),  # only counted; all roles must fit
                include_dashboard=False,
                object_store_memory=max(min(free // 5, OBJECT_STORE_BYTES), 100 * 2**20),
                **common,
            )
        else:
            _check_reachable(address)
            ray.init(address=address, **common)
    except (OSError, RuntimeError, ValueError) as error:
        first = str(error).strip().partition("\n")[0]
        raise ClusterError(
            f"cluster: no Ray at {address!r} ({first}); start one with `ray start --head`, or use `--cluster {LOCAL}`"
        ) from None
    try:
        yield str(ray.get_runtime_context().gcs_address)
    finally:
        ray.shutdown()


def _check_reachable(address: str) -> None:
    """Fail at once if nothing listens there; Ray itself would retry for minutes."""
    host, colon, port = address.rpartition(":")
    if colon and "://" not in address:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_TIMEOUT_S).close()


# ---- nodes and resources


def this_node() -> str:
    return str(ray.get_runtime_context().get_node_id())


def node_statuses() -> list[NodeStatus]:
    """All nodes that Ray knows, those that have died too."""
    free = available_resources_per_node()
    return [
        NodeStatus(
            id=node["NodeID"],
            host=node["NodeManagerHostname"],
            address=node["NodeManagerAddress"],
            alive=bool(node["Alive"]),
            cpus=node["Resources"].get("CPU", 0.0),
            gpus=node["Resources"].get("GPU", 0.0),
            free_cpus=free.get(node["NodeID"], {}).get("CPU", 0.0),
            free_gpus=free.get(node["NodeID"], {}).get("GPU", 0.0),
            memory_bytes=int(node["Resources"].get("memory", 0)),
            seen_s=time.time(),
        )
        for node in ray.nodes()
    ]


def nodes_that_fit(resources: Mapping[str, float]) -> list[NodeStatus]:
    """The runner nodes with these resources in total, whether they are free or not."""
    fitting = {
        node["NodeID"]
        for node in ray.nodes()
        if all(node["Resources"].get(name, 0.0) >= amount for name, amount in resources.items())
    }
    return [node for node in node_statuses() if node.alive and node.id in fitting]


def free_resources() -> str:
    """What the cluster has and what of it is free, for an error text."""
    total, free = ray.cluster_resources(), ray.available_resources()
    named = [name for name in ("CPU", "GPU") if name in total]
    return ", ".join(f"{free.get(name, 0):g} of {total[name]:g} {name} are free" for name in named)


# ---- options of actors


def actor_options(role: RoleConfig, *, threads: int, **more: Any) -> dict[str, Any]:
    """Options of a Ray actor. Ray never restarts it by itself: that is its supervisor's task."""
    resources = role.ray_resources()
    found: dict[str, Any] = {
        "num_cpus": resources.pop("CPU"),
        "num_gpus": resources.pop("GPU"),
        "resources": resources,
        "max_concurrency": threads,
        "max_restarts": 0,
        "max_task_retries": 0,
    }
    if role.environment():
        found["runtime_env"] = role.environment()
    return {**found, **more}


def on_node(node: str, *, soft: bool = False) -> dict[str, Any]:
    """The option of an actor that runs on this node; if `soft`, on another one when this one is full."""
    return {"scheduling_strategy": NodeAffinitySchedulingStrategy(node_id=node, soft=soft)}


def not_on(nodes: Sequence[str]) -> dict[str, Any]:
    """The option of an actor that runs on none of these nodes."""
    return {"label_selector": {"ray.io/node-id": f"!in({','.join(nodes)})"}} if nodes else {}


def reserve(resources: Mapping[str, float], num: int) -> PlacementGroup:
    """Ask for `num` times these resources at once, on as few nodes as possible; see `reserved_nodes`."""
    bundle = {name: amount for name, amount in resources.items() if amount} or {"CPU": 0.001}
    group: PlacementGroup = placement_group([dict(bundle) for _ in range(num)], strategy="PACK")
    return group


def reserved_nodes(group: PlacementGroup) -> tuple[str, ...] | None:
    """The nodes of a placement group; None while Ray has not found them."""
    table = placement_group_table(group)
    return tuple(sorted(set(table["bundles_to_node_id"].values()))) if table.get("state") == "CREATED" else None

"""Engine: Ray itself. Started here for this run alone, or found where it runs."""

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
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from understudy.cluster.config import ClusterConfig, RoleConfig
from understudy.cluster.status import NodeNow
from understudy.core import UnderstudyError

HERE = "here"
# What workers are to have as the driver has it.
PASSED_ON = ("UNDERSTUDY_", "MUJOCO_", "LP_NUM_THREADS", "PYTHONPATH", "PYTHONWARNINGS", "HF_", "GLOO_", "NCCL_")
KNOCK_S = 5.0
OBJECT_STORE_BYTES = 2 * 2**30  # at most, of a Ray that is started here


class ClusterError(UnderstudyError):
    """A cluster that cannot do what is asked of it."""


class Placed:
    """What a Ray actor is that somebody waits for to have room."""

    def where(self) -> tuple[str, int]:
        """The node and the process; answers as soon as there was room."""
        return ray.get_runtime_context().get_node_id(), os.getpid()


@contextmanager
def connected(address: str, config: ClusterConfig) -> Iterator[str]:
    """Ray, for as long as the block lasts; gives the address that it was found at."""
    os.environ.setdefault("RAY_worker_niceness", "0")  # else it starves its workers on a machine that does other things
    variables = {name: value for name, value in os.environ.items() if name.startswith(PASSED_ON)}
    variables["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    common: dict[str, Any] = {
        "runtime_env": {"env_vars": variables},
        "logging_level": logging.WARNING,
        "log_to_driver": False,
        "configure_logging": False,
    }
    try:
        if address == HERE:  # its CPUs are only counted, and everything is to fit
            free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
            ray.init(
                address="local",
                num_cpus=max(os.cpu_count() or 1, int(config.cpus()) + 1),
                include_dashboard=False,
                object_store_memory=max(min(free // 5, OBJECT_STORE_BYTES), 100 * 2**20),
                **common,
            )
        else:
            _knock(address)
            ray.init(address=address, **common)
    except (OSError, RuntimeError, ValueError) as error:
        first = str(error).strip().partition("\n")[0]
        raise ClusterError(
            f"cluster: no Ray at {address!r} ({first}); start one with `ray start --head`, or use `--cluster here`"
        ) from None
    try:
        yield str(ray.get_runtime_context().gcs_address)
    finally:
        ray.shutdown()


def _knock(address: str) -> None:
    """Whether anybody is there; Ray itself would try for minutes."""
    host, colon, port = address.rpartition(":")
    if colon and "://" not in address:
        socket.create_connection((host.strip("[]"), int(port)), timeout=KNOCK_S).close()


def nodes_now() -> list[NodeNow]:
    """All machines that Ray knows or knew."""
    free = available_resources_per_node()
    return [
        NodeNow(
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


def nodes_with(shape: Mapping[str, float]) -> list[NodeNow]:
    """The nodes that are alive and large enough for a role, whoever stands there now."""
    large = {
        node["NodeID"]
        for node in ray.nodes()
        if all(node["Resources"].get(name, 0.0) >= amount for name, amount in shape.items())
    }
    return [node for node in nodes_now() if node.alive and node.id in large]


def options(role: RoleConfig, *, threads: int, **more: Any) -> dict[str, Any]:
    """Of a Ray actor. It is never restarted by Ray: whoever made it knows what to do then."""
    shape = role.shape()
    others = {key: value for key, value in shape.items() if key not in ("CPU", "GPU")}
    found: dict[str, Any] = {
        "num_cpus": shape["CPU"],
        "num_gpus": shape["GPU"],
        "resources": others,
        "max_concurrency": threads,
        "max_restarts": 0,
        "max_task_retries": 0,
    }
    if role.environment():
        found["runtime_env"] = role.environment()
    return {**found, **more}


def elsewhere(nodes: Sequence[str]) -> dict[str, Any]:
    """The option of an actor that is to stand on none of these nodes."""
    return {"label_selector": {"ray.io/node-id": f"!in({','.join(nodes)})"}} if nodes else {}


def reserve(bundles: list[dict[str, float]], *, wait_s: float) -> PlacementGroup | None:
    """Room for all of these at once, on as few nodes as possible; None if there is none in time."""
    clean = [{name: amount for name, amount in bundle.items() if amount} or {"CPU": 0.001} for bundle in bundles]
    group = placement_group(clean, strategy="PACK")
    if group.wait(timeout_seconds=wait_s):
        return group  # type: ignore[no-any-return]
    remove_placement_group(group)
    return None


def room() -> str:
    """What there is, in words, for an error."""
    total, free = ray.cluster_resources(), ray.available_resources()
    named = [name for name in ("CPU", "GPU") if name in total]
    return ", ".join(f"{free.get(name, 0):g} of {total[name]:g} {name} are free" for name in named)

"""A real Ray of one node for all tests of this folder that run in one process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("ray")
os.environ.setdefault("RAY_worker_niceness", "0")

from ray.cluster_utils import Cluster

MEMORY = 120 * 2**20


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[Any]:
    """A head with room for six; tests may add nodes and take them away again."""
    made = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 6, "object_store_memory": MEMORY, "include_dashboard": False}
    )
    made.wait_for_nodes()
    yield made
    made.shutdown()


@pytest.fixture
def address(ray_cluster: Any) -> str:
    return str(ray_cluster.address)

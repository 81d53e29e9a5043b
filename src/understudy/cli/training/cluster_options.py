"""The options that place a run on a Ray cluster, which `train` and `resume` share."""

from __future__ import annotations

from typing import Annotated, TypeAlias

import tyro

from understudy.cluster.config import ClusterConfig
from understudy.core import UnderstudyError

# `--cluster ADDRESS` says where Ray runs, and `--cluster.*` how many workers there are and what they need.
ClusterOptions: TypeAlias = Annotated[ClusterConfig, tyro.conf.arg(name="cluster")]

DEFAULT_CLUSTER = ClusterConfig()


def waiting_for_cluster(cluster: str) -> str:
    """What a command waits for before a run on a cluster begins."""
    return f"waiting for Ray{'' if cluster in ('local', 'auto') else f' at {cluster}'} and the run's processes"


def check_cluster_options(cluster: str | None, cluster_config: ClusterConfig) -> None:
    """Refuse `--cluster.*` without `--cluster`."""
    if cluster is None and cluster_config != DEFAULT_CLUSTER:
        raise UnderstudyError(
            "cluster: the options --cluster.* need a cluster; add `--cluster local`, or leave them out"
        )

"""What the actors and the learner of RLPD on a cluster are made of."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from understudy.cluster.config import ClusterConfig
from understudy.service.client.remote import Remote, connect
from understudy.training.offpolicy.rlpd import RLPDConfig


@dataclass(frozen=True, kw_only=True)
class RLPDJob:
    """A run of RLPD, and where its shards are."""

    run: Path
    config: RLPDConfig
    cluster: ClusterConfig
    token: str
    directory: Path  # that relative paths refer to
    addresses: dict[str, str]  # of the shards, by name
    disks: dict[str, tuple[str | None, str]]  # of the shards: their node, and their directory there

    @property
    def synchronous(self) -> bool:
        """Whether one actor and the learner take turns, exactly as in the local run."""
        return self.cluster.max_lag == 0

    def connect(self) -> Remote:
        """Connect to all shards; a synchronous run uses one."""
        names = [synchronous_shard(self.addresses)] if self.synchronous else list(self.addresses)
        return connect([f"{name}={self.addresses[name]}" for name in names], token=self.token)

    def enter_directory(self) -> None:
        if self.directory.is_dir():
            os.chdir(self.directory)


def synchronous_shard(addresses: Mapping[str, str]) -> str:
    """The shard of a synchronous run: the first."""
    return min(addresses, key=lambda name: int(name.rpartition("-")[2]))


def follow(remote: Remote, addresses: Mapping[str, str]) -> None:
    """Use the present addresses of shards that may have moved."""
    for name in remote.names:
        if name in addresses:
            remote.update_address(name, addresses[name])

"""How a run is spread over a cluster: how many processes of each role, their resources, and all timeouts.

Only `max_lag` changes what is learned. This module imports neither ray nor torch: commands and the page read it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from understudy.training.runs.config import ConfigError


@dataclass(frozen=True, kw_only=True)
class RoleConfig:
    """The resources of one process of a role, in Ray's units."""

    # CPUs that Ray reserves for each process of this role.
    cpus: float = 1.0
    # GPUs that Ray reserves for each process of this role; a fraction shares one GPU.
    gpus: float = 0.0
    # Other resources of each process, as a JSON object such as {"simulator": 1}; nodes offer them with `ray start`.
    resources: str = "{}"
    # Ray's runtime environment of each process, as a JSON object such as {"py_executable": "/opt/sim/bin/python"}.
    runtime_env: str = "{}"

    def __post_init__(self) -> None:
        for name in ("cpus", "gpus"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}: expected 0 or more, got {getattr(self, name)}")
        for name in ("resources", "runtime_env"):
            _json_object(name, getattr(self, name))

    def ray_resources(self) -> dict[str, float]:
        """All resources of one process, by Ray's names."""
        others = {name: float(amount) for name, amount in _json_object("resources", self.resources).items()}
        return {"CPU": self.cpus, "GPU": self.gpus, **others}

    def environment(self) -> dict[str, Any]:
        return _json_object("runtime_env", self.runtime_env)


@dataclass(frozen=True, kw_only=True)
class RolloutConfig(RoleConfig):
    """Processes that run episodes: rollout workers, or the actors of RLPD."""

    # Up to this many rollout workers start, over all learners, as resources allow; more join with new nodes.
    num: int = 2
    # Number of simulators of each rollout worker, each in a process of its own.
    envs: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_minimum(self, num=1, envs=1)


@dataclass(frozen=True, kw_only=True)
class InferenceConfig(RoleConfig):
    """Processes that run the policy for rollout workers without a copy of it."""

    # Number of inference workers of each learner; with 0 every rollout worker has its own copy of the policy.
    num: int = 0
    # Largest number of observations in one forward pass.
    max_rows: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_minimum(self, num=0, max_rows=1)


@dataclass(frozen=True, kw_only=True)
class LearnerConfig(RoleConfig):
    """The ranks that train one policy together. RLPD has one."""

    # Number of ranks of the learner.
    num: int = 1
    # Smallest number of ranks to train with, if there are no resources for `num` within placement_timeout_s.
    min_num: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_minimum(self, num=1, min_num=1)
        if self.min_num > self.num:
            raise ConfigError(f"min_num: expected at most num ({self.num}), got {self.min_num}")


@dataclass(frozen=True, kw_only=True)
class ShardsConfig(RoleConfig):
    """The stores of a run and their servers, each on the disk of one node."""

    # CPUs that Ray reserves for each shard.
    cpus: float = 0.5
    # Number of shards of the store.
    num: int = 1
    # TCP port of the first shard, the others use the ports after it; 0 takes any free ports.
    port: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_minimum(self, num=1, port=0)


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """The roles of a run on a cluster, and how long the driver waits for each before it acts."""

    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    inference: InferenceConfig = field(default_factory=InferenceConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    shards: ShardsConfig = field(default_factory=ShardsConfig)
    # Place rollout and inference workers on other nodes than the learners.
    separate_nodes: bool = False
    # Absolute path of a directory on a local disk of every node for the shards; by default the run's directory, which
    # suits one machine.
    shard_dir: str | None = None
    # File with the token that writers must send to the shards; by default one is generated in the run's directory.
    token_file: str | None = None
    # Number of versions that the policy of a new episode may be behind the learner's, 0 or 1; 0 equals the local run.
    # On-policy runs take the larger of this and their own max_lag.
    max_lag: int = 0
    # Seconds that Ray has to place a role before the run fails.
    placement_timeout_s: float = 120.0
    # Seconds after which a process that does not answer is killed and replaced; its later replies are ignored.
    heartbeat_timeout_s: float = 30.0
    # Seconds after which a process that answers but makes no progress is killed and replaced; doubled after each
    # restart without progress, up to 16 times as long, so that a process that starts slowly gets there at last.
    progress_timeout_s: float = 300.0
    # Seconds after which a shard whose node is gone is looked for on the disks of the other nodes.
    shard_node_timeout_s: float = 60.0
    # Number of times in a row that a learner or actor may be lost, without progress between, before the run fails.
    max_restarts: int = 20

    def __post_init__(self) -> None:
        _check_minimum(self, max_lag=0, max_restarts=0)
        if self.max_lag > 1:
            raise ConfigError(f"max_lag: expected 0 or 1, got {self.max_lag}; at most one wave is collected ahead")
        for name in ("placement_timeout_s", "heartbeat_timeout_s", "progress_timeout_s", "shard_node_timeout_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}: expected more than 0, got {getattr(self, name)}")
        if self.shard_dir is not None and not Path(self.shard_dir).is_absolute():
            raise ConfigError(f"shard_dir: expected an absolute path, the same on every node, got {self.shard_dir}")

    def inference_rows(self) -> int:
        """The most observations that an inference worker takes at once: no more than there are simulators."""
        return min(self.inference.max_rows, self.rollout.num * self.rollout.envs)

    def cpus(self) -> float:
        """CPUs of all roles together."""
        roles = (self.rollout, self.inference, self.learner, self.shards)
        return sum(role.num * role.cpus for role in roles)


def _check_minimum(config: Any, **minimum: int) -> None:
    for name, low in minimum.items():
        if getattr(config, name) < low:
            raise ConfigError(f"{name}: expected a number from {low}, got {getattr(config, name)}")


def _json_object(name: str, text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{name}: expected JSON, got {text!r} ({error})") from None
    if not isinstance(found, dict):
        raise ConfigError(f'{name}: expected a JSON object such as {{"simulator": 1}}, got {text!r}')
    return found

"""What a run is on a cluster: how many of each role, what each takes of a machine, and what it waits for.

None of it changes what is learned, but for `max_lag`. No ray in here: commands and pages read it without.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from understudy.training.runs.config import ConfigError


@dataclass(frozen=True, kw_only=True)
class RoleConfig:
    """What one process of a role takes, as Ray counts it."""

    cpus: float = 1.0
    gpus: float = 0.0
    resources: str = "{}"  # others that nodes were started with, such as {"simulator": 1}, as JSON
    runtime_env: str = "{}"  # Ray's runtime environment, such as {"py_executable": "/opt/sim/bin/python"}, as JSON

    def __post_init__(self) -> None:
        for name in ("cpus", "gpus"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}: expected 0 or more, got {getattr(self, name)}")
        for name in ("resources", "runtime_env"):
            _json_dict(name, getattr(self, name))

    def shape(self) -> dict[str, float]:
        """All that it takes, by Ray's names."""
        others = {name: float(amount) for name, amount in _json_dict("resources", self.resources).items()}
        return {"CPU": self.cpus, "GPU": self.gpus, **others}

    def environment(self) -> dict[str, Any]:
        return _json_dict("runtime_env", self.runtime_env)


@dataclass(frozen=True, kw_only=True)
class RolloutConfig(RoleConfig):
    """Those who live episodes. `num` is a ceiling: those that there is room for work, others join with new nodes."""

    num: int = 2  # over all learners
    envs: int = 1  # simulators of each, in processes of their own

    def __post_init__(self) -> None:
        super().__post_init__()
        _at_least(self, num=1, envs=1)


@dataclass(frozen=True, kw_only=True)
class InferenceConfig(RoleConfig):
    """Those who decide for rollout workers that have no copy of the policy."""

    num: int = 0  # of each learner; 0: every rollout worker has its own copy
    max_rows: int = 64  # decided at once, at most

    def __post_init__(self) -> None:
        super().__post_init__()
        _at_least(self, num=0, max_rows=1)


@dataclass(frozen=True, kw_only=True)
class LearnerConfig(RoleConfig):
    """The ranks that train together. RLPD has one."""

    num: int = 1
    least: int = 1  # if there is no room for `num` within room_s, go on with fewer, down to these

    def __post_init__(self) -> None:
        super().__post_init__()
        _at_least(self, num=1, least=1)
        if self.least > self.num:
            raise ConfigError(f"least: expected at most num ({self.num}), got {self.least}")


@dataclass(frozen=True, kw_only=True)
class ShardsConfig(RoleConfig):
    """The stores and their servers, each on the disk of its node."""

    cpus: float = 0.5
    num: int = 1
    port: int = 0  # of the first, the next ones count on; 0: any that are free

    def __post_init__(self) -> None:
        super().__post_init__()
        _at_least(self, num=1, port=0)


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """Who stands where, and how long anyone is waited for."""

    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    inference: InferenceConfig = field(default_factory=InferenceConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    shards: ShardsConfig = field(default_factory=ShardsConfig)
    apart: bool = False  # rollout and inference on other nodes than the learners
    shard_dir: str | None = None  # on a local disk of each node; None: in the run's directory, for one machine
    token_file: str | None = None  # what writers must show; None: one is made, in the run's directory
    max_lag: int = 0  # versions that a policy may be behind when it acts; 0: exactly the local run
    room_s: float = 120.0  # for Ray to find room for a role
    silent_s: float = 30.0  # a worker that does not answer for so long is replaced, and what it says later is not heard
    stuck_s: float = 300.0  # so is one that answers, and gets nothing done
    shard_away_s: float = 60.0  # a shard whose node is gone for so long is looked for on the other nodes' disks
    max_restarts: int = 20  # of the learners, in a row, without an iteration between

    def __post_init__(self) -> None:
        _at_least(self, max_lag=0, max_restarts=0)
        if self.max_lag > 1:
            raise ConfigError(f"max_lag: expected 0 or 1, got {self.max_lag}; one wave is lived ahead at most")
        for name in ("room_s", "silent_s", "stuck_s", "shard_away_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}: expected more than 0, got {getattr(self, name)}")
        if self.shard_dir is not None and not Path(self.shard_dir).is_absolute():
            raise ConfigError(f"shard_dir: expected an absolute path, the same on every node, got {self.shard_dir}")

    def cpus(self) -> float:
        """Of all roles together."""
        roles = (self.rollout, self.inference, self.learner, self.shards)
        return sum(role.num * role.cpus for role in roles)


def _at_least(config: Any, **least: int) -> None:
    for name, low in least.items():
        if getattr(config, name) < low:
            raise ConfigError(f"{name}: expected a number from {low}, got {getattr(config, name)}")


def _json_dict(name: str, text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{name}: expected JSON, got {text!r} ({error})") from None
    if not isinstance(found, dict):
        raise ConfigError(f'{name}: expected a JSON object such as {{"simulator": 1}}, got {text!r}')
    return found

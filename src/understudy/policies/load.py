"""Load a policy of any kind from a file or a directory."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from understudy.core import StepSpec
from understudy.policies import policy_file
from understudy.policies.lerobot.checkpoint import LeRobotCheckpoint
from understudy.policies.lerobot.config import LeRobotConfig
from understudy.policies.protocol import LoadedPolicy, PolicyError
from understudy.policies.registry import policy_class
from understudy.policies.rlpd.actor import KIND as ACTOR

if TYPE_CHECKING:
    from understudy.policies.openvla import OpenVLAConfig


def is_actor(path: Path) -> bool:
    """Whether the file is an ActorPolicy, which decides step by step and takes no instruction."""
    return not path.is_dir() and policy_file.kind_of(path) == ACTOR


def load_block_policy(
    path: str | Path,
    spec: StepSpec,
    *,
    openvla: OpenVLAConfig | None = None,
    lerobot: LeRobotConfig | None = None,
    device: str | torch.device = "cpu",
) -> LoadedPolicy:
    """A policy of a registered kind (one safetensors file), or a checkpoint of OpenVLA or of lerobot (a directory, used
    as `openvla` or `lerobot` says), for a world with this Spec."""
    path = Path(path)
    try:
        if LeRobotCheckpoint.is_at(path):
            from understudy.policies.lerobot.policy import LeRobotPolicy

            return LeRobotPolicy.load(path, spec, lerobot, device=device)
        if path.is_dir():
            from understudy.policies.openvla import OpenVLAPolicy  # only now: it needs transformers

            return OpenVLAPolicy.load(path, spec, openvla, device=device)
        return load_policy_file(path, spec, device=device)
    except ModuleNotFoundError as error:
        raise PolicyError(
            f"{error.name} is not installed, and this policy needs it; run `pip install 'understudy-robotics[vla]'`"
        ) from None


def load_policy_file(path: Path, spec: StepSpec | None = None, *, device: str | torch.device = "cpu") -> LoadedPolicy:
    """A policy of a registered kind. Given the Spec of a world, refuse a policy that was trained for another."""
    kind = policy_file.kind_of(path)
    if kind == ACTOR:
        raise PolicyError(f"{path}: this policy takes no instructions; give one that `understudy sft` made")
    try:
        found = policy_class(kind)
    except PolicyError as error:
        raise PolicyError(f"{path}: {error}") from error
    return found.load(path, spec, device=device)

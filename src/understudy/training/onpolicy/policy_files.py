"""Policies of a run: where they come from, what of them is trained, and how the newest is kept beside the run.

policy.safetensors   a small VLA, whole; an adapter is merged in
policy/              an OpenVLA checkpoint, whole, at the end of the run
adapter/             what LoRA trained, in peft's files
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from understudy.core import StepSpec
from understudy.durable import files
from understudy.policies.load import load_block_policy
from understudy.training.runs.config import ConfigError
from understudy.training.runs.run import Run

if TYPE_CHECKING:
    from understudy.training.onpolicy.config import OnPolicyConfig
    from understudy.training.onpolicy.policy_gradient_learner import Trainable

Array = np.ndarray[Any, Any]

WHOLE, ADAPTER = "policy", "adapter"  # directories in that of a run
ALPHA = 16.0


@dataclass(frozen=True, kw_only=True)
class AdapterConfig:
    """LoRA: which layers get an adapter, and how large. All else is frozen but for a value head."""

    rank: int = 0  # 0: no adapter, the whole network is trained
    alpha: float = ALPHA  # the adapter counts alpha / rank times
    targets: tuple[str, ...] = ()  # names of layers, such as q_proj v_proj; none: every linear one but the heads

    def __post_init__(self) -> None:
        if self.rank < 0:
            raise ConfigError(f"lora.rank: expected 0 for none, or more, got {self.rank}")
        if self.rank == 0 and (self.alpha, self.targets) != (ALPHA, ()):
            raise ConfigError("lora.rank: is 0, so that alpha and targets would do nothing; give it a rank")


def load_policy(config: OnPolicyConfig, path: Path, spec: StepSpec, *, adapted: bool) -> Any:
    """The policy that a run starts from or is compared with, with what its algorithm needs."""
    judging = config.algorithm.adv_estimator == "gae"
    openvla = config.openvla
    if path.is_dir():
        openvla = replace(openvla, value_head=openvla.value_head or judging)
    elif openvla != type(openvla)():
        raise ConfigError(f"openvla: {path} is a small VLA, which these options do not concern; leave them out")
    policy = load_block_policy(path, spec, openvla=openvla, device=config.device)
    if judging and not policy.has_value:
        policy = policy.judging(seed=config.seed)
    if adapted and config.lora.rank:
        from understudy.policies.lora import ALL_LINEAR, LoraConfig, add_lora  # only now: it needs peft

        chosen = LoraConfig(rank=config.lora.rank, alpha=config.lora.alpha, targets=config.lora.targets or ALL_LINEAR)
        add_lora(policy.model, chosen, seed=config.seed)
    return policy


def policy_path(given: str) -> Path:
    """The file or directory of a policy, or that of the run that made it."""
    path = Path(given)
    if Run.is_at(path):
        path = path / WHOLE if (path / WHOLE).is_dir() else Run(path).policy
    if not path.exists():
        raise ConfigError(f"policy: expected a policy file or a run with one, got {given}, which is not there")
    return path


def digest_of_policy(path: Path) -> str:
    """The same for the same policy. Of a directory, weights count by their files' names and sizes: they are large."""
    digest = xxhash.xxh3_128()
    for file in sorted(one for one in path.rglob("*") if one.is_file()) if path.is_dir() else [path]:
        digest.update(f"{file.relative_to(path)} {file.stat().st_size}\n".encode())
        if not path.is_dir() or file.suffix == ".json":
            digest.update(file.read_bytes())
    return digest.hexdigest()


def keep_policy(policy: Trainable, run: Run, weights: Mapping[str, Array], *, adapted: bool, last: bool) -> None:
    """Write the newest policy beside the run; `weights` are the model's, whole."""
    import torch

    tensors = {name: torch.from_numpy(array) for name, array in weights.items()}
    merged = tensors
    if adapted:
        from understudy.policies.lora import merged_state, save_adapter

        save_adapter(policy.model, run.path / ADAPTER, tensors)
        merged = merged_state(policy.model, tensors)
    if hasattr(policy, "description"):  # one file has it all
        policy.save(run.policy, {name: tensor.numpy() for name, tensor in merged.items()})
    elif last:
        new = run.path / f".{WHOLE}.new"
        shutil.rmtree(new, ignore_errors=True)
        policy.save(new, tensors)  # merges by itself
        shutil.rmtree(run.path / WHOLE, ignore_errors=True)
        files.move_durably(new, run.path / WHOLE)

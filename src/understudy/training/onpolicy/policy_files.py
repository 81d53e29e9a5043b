"""Policy files of an on-policy run: loads the policy that is trained, and saves the newest one in the run.

policy.safetensors   a small VLA or a flow policy, complete; an adapter is merged in
policy/              a complete OpenVLA checkpoint, written at the end of the run
adapter/             the LoRA adapter, in peft's files
policies/            the same of earlier iterations, each in a directory of its own, if the config asks for them
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from understudy.core import StepSpec
from understudy.durable import files
from understudy.policies.load import load_block_policy, load_policy_file
from understudy.training.onpolicy.config import OnPolicyConfig
from understudy.training.onpolicy.trainable_policy import TrainablePolicy
from understudy.training.runs.config import ConfigError
from understudy.training.runs.device import choose_device
from understudy.training.runs.run import KEPT_DIR, POLICY_DIR, Run

if TYPE_CHECKING:
    from torch import nn

Array = np.ndarray[Any, Any]

ADAPTER = "adapter"  # a directory in that of a run


def load_policy(config: OnPolicyConfig, path: Path, spec: StepSpec | None, *, adapted: bool) -> TrainablePolicy:
    """The policy that a run starts from, or the reference; with a value head or adapter if the config needs one.

    Without the Spec of a world, a policy file is loaded for any.
    """
    needs_value = config.algorithm.adv_estimator == "gae"
    openvla = config.openvla
    if path.is_dir():
        openvla = replace(openvla, value_head=openvla.value_head or needs_value)
    elif openvla != type(openvla)():
        raise ConfigError(f"openvla: {path} is no OpenVLA checkpoint, so these options do not apply; leave them out")
    device = choose_device(config.device).name
    loaded: Any = (
        load_policy_file(path, device=device)
        if spec is None
        else load_block_policy(path, spec, openvla=openvla, device=device)
    )
    for name, given in (("noise_level", config.noise_level), ("noise_bounds", config.noise_bounds)):
        if given is not None and not hasattr(loaded, f"with_{name}"):
            raise ConfigError(f"{name}: {path} is no flow policy, so it would have no effect; leave it out")
    if config.noise_level is not None:
        loaded = loaded.with_noise_level(config.noise_level)
    if config.noise_bounds is not None:
        loaded = loaded.with_noise_bounds(config.noise_bounds, seed=config.seed)
    if not hasattr(loaded, "why_no_policy_gradient"):
        raise ConfigError(
            f"policy: {path} is a {type(loaded).__name__}, which can act and not be trained here; see TrainablePolicy"
        )
    why_not = loaded.why_no_policy_gradient
    if why_not is not None:
        raise ConfigError(why_not)
    if needs_value and not loaded.has_value:
        loaded = loaded.with_value_head(seed=config.seed)
    policy: TrainablePolicy = loaded
    if adapted:
        add_adapter(policy.model, config)
    return policy


def add_adapter(model: nn.Module, config: OnPolicyConfig) -> None:
    """Give a network the adapter that the config asks for, if any."""
    if not config.lora.rank:
        return
    from understudy.policies.config import ALL_LINEAR, LoraConfig
    from understudy.policies.lora import add_lora  # only now: it needs peft

    chosen = LoraConfig(rank=config.lora.rank, alpha=config.lora.alpha, targets=config.lora.targets or ALL_LINEAR)
    add_lora(model, chosen, seed=config.seed)


def is_one_file(policy: TrainablePolicy) -> bool:
    """Whether it is a small VLA, which is saved whole each time. Of an OpenVLA only the adapter is, until the end."""
    return hasattr(policy, "description")


def save_policy(policy: TrainablePolicy, run: Run, weights: Mapping[str, Array], *, adapted: bool, last: bool) -> None:
    """Save the newest policy in the run. `weights` are all weights of the model, or those of the adapter if they are
    all that is saved."""
    _write(policy, run.path, weights, adapted=adapted, whole=last)


def keep_policy(
    policy: TrainablePolicy, run: Run, weights: Mapping[str, Array], *, adapted: bool, iteration: int
) -> None:
    """Save the policy of an iteration, whole and with its adapter, in a directory of its own; a crash leaves none."""
    kept = run.path / KEPT_DIR / f"iteration-{iteration:06d}"
    new = kept.with_name(f".{kept.name}.new")
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    _write(policy, new, weights, adapted=adapted, whole=True)
    shutil.rmtree(kept, ignore_errors=True)  # of the same iteration, before the run was killed and resumed
    files.move_durably(new, kept)


def _write(
    policy: TrainablePolicy, directory: Path, weights: Mapping[str, Array], *, adapted: bool, whole: bool
) -> None:
    """Write the adapter, the file of a small policy and, if `whole`, the checkpoint of an OpenVLA."""
    import torch

    tensors = {name: torch.from_numpy(array) for name, array in weights.items()}
    if adapted:
        from understudy.policies.lora import save_adapter

        save_adapter(policy.model, directory / ADAPTER, tensors)
    if is_one_file(policy):
        if adapted:
            from understudy.policies.lora import merged_state

            tensors = merged_state(policy.model, tensors)
        policy.save(Run(directory).policy, {name: tensor.numpy() for name, tensor in tensors.items()})
    elif whole:
        new = directory / f".{POLICY_DIR}.new"
        shutil.rmtree(new, ignore_errors=True)
        policy.save(new, tensors)  # merges the adapter itself
        shutil.rmtree(directory / POLICY_DIR, ignore_errors=True)
        files.move_durably(new, directory / POLICY_DIR)

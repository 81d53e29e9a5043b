"""PolicyCopy: a second policy of a run, which acts beside the one that is trained."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from understudy.core import StepSpec
from understudy.training.distributed.ranks import Ranks
from understudy.training.distributed.single_process import SingleProcess
from understudy.training.onpolicy.config import OnPolicyConfig
from understudy.training.onpolicy.policy_files import load_policy
from understudy.training.runs.device import choose_device

Array = np.ndarray[Any, Any]


class PolicyCopy:
    """`policy` is loaded from the file that the run began with, and acts in the precision that the run trains in."""

    def __init__(self, config: OnPolicyConfig, path: Path, spec: StepSpec, *, device: str):
        device = choose_device(device).name
        self.policy = load_policy(replace(config, device=device), path, spec, adapted=True)
        self.policy.forward = SingleProcess(
            self.policy.model, Ranks(0, 1, device=device), config.engine.precision
        ).forward

    def set_weights(self, version: int, weights: Mapping[str, Array]) -> None:
        """Take the trained arrays of a version, by the names of the module."""
        tensors = dict(self.policy.model.state_dict(keep_vars=True))
        with torch.no_grad():
            for name, array in weights.items():
                tensors[name].copy_(torch.from_numpy(np.array(array)))
        self.policy.version = version

    def share_frozen_weights(self, trained: nn.Module) -> None:
        """Use the memory of the trained module for what is never trained, here and there."""
        theirs = dict(trained.named_parameters())
        for name, value in self.policy.model.named_parameters():
            if not value.requires_grad:
                value.data = theirs[name].data

    def copy_weights(self, version: int, trained: nn.Module) -> None:
        """Take the trained weights and the buffers of a module of this process, as they are now."""
        mine = dict(self.policy.model.state_dict(keep_vars=True))
        for name, value in trained.state_dict(keep_vars=True).items():
            if value.requires_grad or not isinstance(value, nn.Parameter):
                mine[name].data = value.detach().clone()
        self.policy.version = version

"""Encoder: from an observation's cameras and state to one vector of features."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from understudy.core import Spec
from understudy.policies.inputs import Inputs
from understudy.policies.networks import Weights, init_linear
from understudy.policies.protocol import PolicyError
from understudy.policies.stats import Stats

LARGEST_STATE = 10.0  # spreads from the mean; a sensor that runs away does not drown the rest


@dataclass(frozen=True, kw_only=True)
class EncoderConfig:
    """What is seen, and how large the network is that looks at it."""

    inputs: tuple[str, ...] | None = None  # paths in the observation; None: all of them
    filters: tuple[int, ...] = (16, 32, 32, 32)  # of each camera's 3x3 convolutions, each halving the picture
    latent: int = 64  # features of each camera

    def __post_init__(self) -> None:
        if not self.filters or min(self.filters) < 1:
            raise PolicyError(f"filters: expected at least one positive number, got {self.filters}")
        if self.latent < 1:
            raise PolicyError(f"latent: expected a positive number, got {self.latent}")

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> EncoderConfig:
        inputs = value["inputs"]
        return EncoderConfig(
            inputs=None if inputs is None else tuple(inputs), filters=tuple(value["filters"]), latent=value["latent"]
        )


class Encoder:
    """Holds no weights: they are given to each call. Statistics are constants of it."""

    def __init__(self, config: EncoderConfig, observation: Spec, stats: Stats, device: torch.device):
        self.config = config
        self.inputs = Inputs(observation, config.inputs)
        stats.check(self.inputs)
        self.stats = stats
        states = self.inputs.states
        mean = np.concatenate([stats.mean[path] for path in states]) if states else np.zeros(0, np.float32)
        std = np.concatenate([stats.std[path] for path in states]) if states else np.ones(0, np.float32)
        self._mean = torch.tensor(mean, device=device)
        self._scale = torch.tensor(1.0 / std, device=device)
        self.size = self.inputs.state_size + config.latent * len(self.inputs.cameras)

    def init(self, generator: torch.Generator) -> Weights:
        """Weights of the cameras' networks; none if only the state is seen."""
        weights: Weights = {}
        for path in self.inputs.cameras:
            height, width, channels = self.inputs.leaves[path].fixed_shape
            for number, filters in enumerate(self.config.filters):
                name = f"encoder/{path or 'camera'}/conv_{number}"
                bound = math.sqrt(6 / (9 * channels))
                shape = (filters, channels, 3, 3)
                weights[f"{name}/weight"] = torch.empty(shape).uniform_(-bound, bound, generator=generator)
                weights[f"{name}/bias"] = torch.zeros(filters)
                height, width, channels = (height + 1) // 2, (width + 1) // 2, filters
            num_in = height * width * channels
            weights |= init_linear(f"encoder/{path or 'camera'}/latent", num_in, self.config.latent, generator)
        return weights

    def __call__(self, weights: Mapping[str, Tensor], observation: Mapping[str, Tensor]) -> Tensor:
        """Features [B, size] of a batch as `Inputs.tensors` gives it."""
        parts = [self._camera(weights, path, observation[path]) for path in self.inputs.cameras]
        if self.inputs.states:
            states = [observation[path] for path in self.inputs.states]
            state = states[0] if len(states) == 1 else torch.cat(states, dim=1)
            parts.append(((state - self._mean) * self._scale).clamp_(-LARGEST_STATE, LARGEST_STATE))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def _camera(self, weights: Mapping[str, Tensor], path: str, images: Tensor) -> Tensor:
        name = f"encoder/{path or 'camera'}"
        x = images.float().mul_(1 / 255).sub_(0.5).permute(0, 3, 1, 2)  # stays as it lies in memory: channels last
        for number in range(len(self.config.filters)):
            conv = f"{name}/conv_{number}"
            x = torch.relu(functional.conv2d(x, weights[f"{conv}/weight"], weights[f"{conv}/bias"], 2, 1))
        x = functional.linear(x.flatten(1), weights[f"{name}/latent/weight"], weights[f"{name}/latent/bias"])
        return torch.tanh(functional.layer_norm(x, (self.config.latent,)))

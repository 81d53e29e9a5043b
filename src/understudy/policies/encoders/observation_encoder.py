"""ObservationEncoder: from an observation's cameras and state to one vector of features."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn

from understudy.core import Spec
from understudy.policies.config import EncoderConfig
from understudy.policies.encoders.image_encoder import new_image_encoder
from understudy.policies.inputs import Inputs
from understudy.policies.stats import Stats

LARGEST_STATE = 10.0  # standard deviations from the mean; a broken sensor does not drown the rest


class ObservationEncoder(nn.Module):
    """Features [B, size]: those of each camera, then the normalized state."""

    def __init__(self, config: EncoderConfig, observation: Spec, stats: Stats, device: torch.device):
        super().__init__()
        self.config = config
        self.inputs = Inputs(observation, config.inputs, config.image_size)
        self.size = self.inputs.state_size + config.latent * len(self.inputs.cameras)
        shapes = self.inputs.camera_shapes
        self.images = new_image_encoder(config, shapes, device) if shapes else None
        self.register_buffer("_mean", torch.zeros(self.inputs.state_size), persistent=False)
        self.register_buffer("_scale", torch.ones(self.inputs.state_size), persistent=False)
        self.to(device)
        self.stats = stats
        self.set_stats(stats)

    @property
    def digest(self) -> str | None:
        """Of the frozen weights that are not among the parameters; None if there are none."""
        return None if self.images is None else self.images.digest

    def set_stats(self, stats: Stats) -> None:
        """Normalize the state by these statistics from now on."""
        stats.check(self.inputs)
        self.stats = stats
        states = self.inputs.states
        if states:
            self._mean.copy_(torch.from_numpy(np.concatenate([stats.mean[path] for path in states])))
            std = np.concatenate([stats.std[path] for path in states])
            self._scale.copy_(torch.from_numpy(np.asarray(1.0 / std, np.float32)))

    def init_parameters(self, generator: torch.Generator) -> None:
        """New weights for the image encoder; none are drawn if only the state is seen."""
        if self.images is not None:
            self.images.init_parameters(generator)

    def forward(self, observation: Mapping[str, Tensor]) -> Tensor:
        """Features of a batch as `Inputs.tensors` gives it."""
        parts: list[Tensor] = []
        if self.images is not None:
            parts += self.images([observation[path] for path in self.inputs.cameras])
        if self.inputs.states:
            states = [observation[path] for path in self.inputs.states]
            state = states[0] if len(states) == 1 else torch.cat(states, dim=1)
            parts.append(((state - self._mean) * self._scale).clamp_(-LARGEST_STATE, LARGEST_STATE))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def columns_of(self, state: str) -> slice:
        """Where a field of the state is in the features; its mean is 0 there."""
        columns, first = self.inputs.state_columns[state], self.size - self.inputs.state_size
        return slice(first + columns.start, first + columns.stop)

    _mean: Tensor
    _scale: Tensor

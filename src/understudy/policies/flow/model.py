"""FlowModel: an observation, an instruction and a noisy block of actions in; the block's velocity out.

    cameras, state ------ Encoder ------+
    words [W] --- mean of embeddings ---+- features -+- MLP: value
                                                     |
    noisy block [H A], time - sines ---- Linear -----+- residual blocks - Linear: velocity [H A]
    good, bad or unknown -- embedding ---------------+ (with `advantage`)

    features, time - sines -- MLP: noise of a step [H A] (with `noise_bounds`)

Features do not depend on the noisy block: the first of several steps gives them, and the others take them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

from understudy.core import StepSpec
from understudy.policies.actions import Actions
from understudy.policies.encoders.observation_encoder import ObservationEncoder
from understudy.policies.encoders.words import PADDING
from understudy.policies.flow.config import FlowConfig
from understudy.policies.flow.flow_matching import bounded_std
from understudy.policies.mlp import MLP, init_linear, new_linear, uninitialized
from understudy.policies.stats import Stats

WORDS, FEATURES, NOISY, TIME, ADVANTAGE = "words", "features", "noisy", "time", "advantage"
UNKNOWN, BAD, GOOD = range(3)  # what a model with `advantage` is told about a block
TIME_SIZE = 32
LONGEST_PERIOD, SHORTEST_PERIOD = 4.0, 0.04  # of the sines of time

# observation/PATH as Inputs gives it and words int64 [B, W], or features [B, F]; noisy float32 [N, H A] and time [N],
# where N is a multiple of B: the rows of one observation follow each other. With `advantage`: advantage int64 [N]
Tensors = Mapping[str, Tensor]
Output = tuple[Tensor, Tensor | None, Tensor, Tensor | None]  # velocity, value, features, std of the noise of a step


def observed(path: str) -> str:
    """The name of an observation's field among the tensors."""
    return f"observation/{path}"


class FlowModel(nn.Module):
    """The network alone. Its weights are undefined until `init_parameters` or `load_state_dict` fills them."""

    periods: Tensor

    def __init__(self, config: FlowConfig, spec: StepSpec, stats: Stats, *, num_words: int, device: torch.device):
        super().__init__()
        block_size = config.block_steps * Actions(spec.action).size
        self.encoder = ObservationEncoder(config.encoder, spec.observation, stats, device)
        self.words = uninitialized(nn.Embedding, num_words, config.word_size)
        num_features = self.encoder.size + config.word_size
        self.enter = new_linear(block_size + TIME_SIZE + num_features, config.hidden)
        self.layers = nn.ModuleList(ResidualBlock(config.hidden) for _ in range(config.layers))
        self.velocity = new_linear(config.hidden, block_size)
        self.value = MLP((num_features, config.hidden, 1)) if config.value_head else None
        self.advantage = uninitialized(nn.Embedding, 3, config.hidden) if config.advantage else None
        self.noise_bounds = config.noise_bounds
        noise_sizes = (num_features + TIME_SIZE, config.hidden, block_size)
        self.noise = None if config.noise_bounds is None else MLP(noise_sizes, last_gain=0.01)
        shares = torch.arange(TIME_SIZE // 2) / (TIME_SIZE // 2 - 1)
        periods = LONGEST_PERIOD * (SHORTEST_PERIOD / LONGEST_PERIOD) ** shares
        self.register_buffer("periods", periods, persistent=False)
        self.to(device)

    @torch.no_grad()
    def init_parameters(self, generator: torch.Generator) -> None:
        """New weights; a new network says that all velocities are near 0."""
        self.encoder.init_parameters(generator)
        self.words.weight.normal_(generator=generator)
        init_linear(self.enter, generator, gain=math.sqrt(3))
        for layer in self.layers:
            assert isinstance(layer, ResidualBlock)
            layer.init_parameters(generator)
        init_linear(self.velocity, generator, gain=0.1)
        if self.value is not None:
            self.value.init_parameters(generator)
        if self.advantage is not None:
            self.advantage.weight.zero_()  # good is as bad, until it is learned
        if self.noise is not None:
            self.noise.init_parameters(generator)

    def forward(self, tensors: Tensors) -> Output:
        """Velocity float32 [N, H A]; value float32 [B] if it has that head; features [B, F]; and the standard deviation
        of the noise of a step from here, float32 [N, H A], if it has that network."""
        features = tensors[FEATURES] if FEATURES in tensors else self._features(tensors)
        noisy, time = tensors[NOISY], tensors[TIME]
        rows = features.repeat_interleave(len(noisy) // len(features), dim=0)
        sines = self._sines(time)
        x = self.enter(torch.cat([noisy, sines, rows], dim=1))
        if self.advantage is not None:
            x = x + self.advantage(tensors[ADVANTAGE])
        for layer in self.layers:
            x = layer(x)
        velocity = self.velocity(functional.silu(functional.layer_norm(x, x.shape[-1:])))
        value = None if self.value is None else self.value(features).sum(dim=-1)  # no view: FSDP2 puts its hooks on it
        std: Tensor | None = None
        if self.noise is not None and self.noise_bounds is not None:
            std = bounded_std(self.noise(torch.cat([rows, sines], dim=1)).float(), self.noise_bounds)
        return velocity.float(), None if value is None else value.float(), features, std

    def _features(self, tensors: Tensors) -> Tensor:
        prefix = observed("")
        seen = self.encoder(
            {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
        )
        words = tensors[WORDS]
        said = (words != PADDING)[..., None]
        embedded = self.words(words) * said
        return torch.cat([seen, embedded.sum(dim=1) / said.sum(dim=1)], dim=1)

    def _sines(self, time: Tensor) -> Tensor:
        """Features [N, TIME_SIZE] of times [N]."""
        angles = 2.0 * math.pi * time[:, None] / self.periods
        return torch.cat([angles.sin(), angles.cos()], dim=1)


class ResidualBlock(nn.Module):
    """x + Linear(SiLU(Linear(LayerNorm(x))))."""

    def __init__(self, hidden: int):
        super().__init__()
        self.up = new_linear(hidden, hidden)
        self.down = new_linear(hidden, hidden)

    def init_parameters(self, generator: torch.Generator) -> None:
        init_linear(self.up, generator, gain=math.sqrt(6))
        init_linear(self.down, generator)

    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = self.down(functional.silu(self.up(functional.layer_norm(x, x.shape[-1:]))))
        return x + added

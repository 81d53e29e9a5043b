"""ValueModel: how well an episode will go on from an observation, as a distribution over bins of returns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from understudy.core import NO_VERSION, Spec, Tree
from understudy.core import tree as trees
from understudy.policies import policy_file, transfer
from understudy.policies.config import EncoderConfig, ValueConfig
from understudy.policies.encoders.observation_encoder import ObservationEncoder
from understudy.policies.encoders.words import PADDING, Words
from understudy.policies.mlp import MLP, uninitialized
from understudy.policies.protocol import Array
from understudy.policies.stats import Stats

KIND = "value"


class ValueNetwork(nn.Module):
    """The mean of the words' embeddings and the features of the observation, normalized, and a head over the bins."""

    def __init__(
        self,
        config: ValueConfig,
        encoder: EncoderConfig,
        observation: Spec,
        stats: Stats,
        *,
        num_words: int,
        device: torch.device,
    ):
        """Weights are undefined until `init_parameters` or `load_state_dict` fills them."""
        super().__init__()
        self.encoder = ObservationEncoder(encoder, observation, stats, device)
        self.words = uninitialized(nn.Embedding, num_words, config.word_size)
        self.head = MLP((self.encoder.size + config.word_size, *config.hidden, config.num_bins), last_gain=0.1)
        self.device = device
        self.to(device)

    @torch.no_grad()
    def init_parameters(self, generator: torch.Generator) -> None:
        self.encoder.init_parameters(generator)
        self.words.weight.normal_(generator=generator)
        self.head.init_parameters(generator)

    def forward(self, observation: Mapping[str, Tensor], words: Tensor) -> Tensor:
        """[B, num_bins]: logits."""
        said = (words != PADDING)[..., None]
        embedded = (self.words(words) * said).sum(dim=1) / said.sum(dim=1)
        logits: Tensor = self.head(torch.cat([self.encoder(observation), embedded], dim=1))
        return logits.float()


class ValueModel:
    """A network with the words that it knows. A learner may train the network in place, and then raises `version`."""

    def __init__(
        self,
        config: ValueConfig,
        encoder: EncoderConfig,
        words: Words,
        network: ValueNetwork,
        *,
        version: int = NO_VERSION,
    ):
        self.config = config
        self.encoder = encoder
        self.words = words
        self.network = network
        self.version = version
        self.centres = torch.linspace(-1.0, 0.0, config.num_bins, device=network.device)

    @staticmethod
    def new(
        config: ValueConfig,
        encoder: EncoderConfig,
        observation: Spec,
        stats: Stats,
        words: Words,
        *,
        seed: int,
        device: str | torch.device = "cpu",
    ) -> ValueModel:
        network = ValueNetwork(config, encoder, observation, stats, num_words=len(words), device=torch.device("cpu"))
        network.init_parameters(torch.Generator().manual_seed(seed))  # on the CPU: the same weights for every device
        model = ValueModel(config, encoder, words, network)
        if torch.device(device).type == "cpu":
            return model
        return ValueModel.of(model.parameters(), model.description(), device=device)

    @property
    def observation(self) -> Spec:
        return self.network.encoder.inputs.spec

    def logits(self, observation: Tree, instructions: Sequence[str]) -> Tensor:
        """[B, num_bins], with gradients."""
        tensors = self.network.encoder.inputs.tensors(observation, self.network.device)
        words = transfer.to_tensor(self.words.encode(instructions), self.network.device)
        logits: Tensor = self.network(tensors, words)
        return logits

    def expected(self, logits: Tensor) -> Tensor:
        """[B]: the mean return under logits [B, num_bins]."""
        return (torch.softmax(logits, dim=-1) * self.centres).sum(dim=-1)

    def values(self, observation: Tree, instructions: Sequence[str]) -> Array:
        """float32 [B]: the expected returns, from -1 to 0."""
        with torch.inference_mode():
            return transfer.to_array(self.expected(self.logits(observation, instructions)))

    # ---- saving and loading

    def parameters(self) -> Tree:
        """All arrays, in memory of their own."""
        tree = policy_file.pack(policy_file.named_weights(self.network), self.network.encoder.stats)
        return trees.map_leaves(np.array, tree)

    def description(self) -> dict[str, Any]:
        """Plain JSON that, with `parameters`, is the whole model."""
        digest = self.network.encoder.digest
        return {
            "kind": KIND,
            "version": self.version,
            "config": self.config.to_json(),
            "encoder": self.encoder.to_json(),
            "words": list(self.words.known),
            "max_words": self.words.max_words,
            "observation": self.observation.to_json(),
            **({} if digest is None else {"encoder_digest": digest}),
        }

    @staticmethod
    def of(parameters: Tree, description: Mapping[str, Any], *, device: str | torch.device = "cpu") -> ValueModel:
        """The model that `parameters` and `description` were taken of."""
        weights, stats = policy_file.unpack(parameters)
        config, encoder = ValueConfig.from_json(description["config"]), EncoderConfig.from_json(description["encoder"])
        words = Words(description["words"], max_words=int(description["max_words"]))
        observation = Spec.from_json(description["observation"])
        network = ValueNetwork(config, encoder, observation, stats, num_words=len(words), device=torch.device(device))
        policy_file.load_weights(network, weights, description)
        return ValueModel(config, encoder, words, network, version=int(description["version"]))

    def save(self, path: str | Path) -> None:
        """Write one safetensors file; a crash leaves the old file or the new one."""
        policy_file.write(path, self.description(), self.parameters())

    @staticmethod
    def load(path: str | Path, *, device: str | torch.device = "cpu") -> ValueModel:
        return policy_file.load(
            path,
            KIND,
            lambda parameters, description: ValueModel.of(parameters, description, device=device),
            lambda model: None,
        )

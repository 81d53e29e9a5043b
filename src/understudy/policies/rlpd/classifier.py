"""SuccessClassifier: the probability that a frame shows success; a reward where the world gives none."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from understudy.core import NO_VERSION, Spec, Tree
from understudy.policies import policy_file
from understudy.policies.config import ClassifierConfig
from understudy.policies.encoders.observation_encoder import ObservationEncoder
from understudy.policies.mlp import MLP
from understudy.policies.protocol import Array
from understudy.policies.stats import Stats

KIND = "classifier"


class ClassifierNetwork(nn.Module):
    """An encoder and a head that gives the log-odds of success."""

    def __init__(self, config: ClassifierConfig, observation: Spec, stats: Stats, device: torch.device):
        """Weights are undefined until `init_parameters` or `load_state_dict` fills them."""
        super().__init__()
        self.config = config
        self.observation = observation
        self.device = device
        self.encoder = ObservationEncoder(config.encoder, observation, stats, device)
        self.head = MLP((self.encoder.size, *config.hidden, 1), last_gain=0.01)
        self.to(device)

    def init_parameters(self, generator: torch.Generator) -> None:
        self.encoder.init_parameters(generator)
        self.head.init_parameters(generator)

    def forward(self, observation: Mapping[str, Tensor]) -> Tensor:
        """[B]: log-odds of success."""
        logits: Tensor = self.head(self.encoder(observation)).squeeze(-1)
        return logits


class SuccessClassifier:
    """A classifier with its weights, which never change."""

    def __init__(self, network: ClassifierNetwork, *, version: int = NO_VERSION):
        """The classifier takes over the network: nobody else may change its weights."""
        self.network = network.requires_grad_(False)
        self.config = network.config
        self.stats = network.encoder.stats
        self.version = version
        self.device = network.device
        self.observation = network.encoder.inputs.spec

    def probability(self, observation: Tree) -> Array:
        """Of success, float32: [] for one observation, [B] for a batch."""
        inputs = self.network.encoder.inputs
        single = inputs.is_single(observation)
        with torch.inference_mode():
            tensors = inputs.tensors(observation, self.device, single=single)
            found: Array = torch.sigmoid(self.network(tensors)).cpu().numpy()
        return np.asarray(found[0]) if single else found

    def parameters(self) -> Tree:
        """All arrays, as they are published and saved."""
        return policy_file.pack(policy_file.named_weights(self.network), self.stats)

    def description(self) -> dict[str, Any]:
        """Plain JSON that, with `parameters`, is the whole classifier; of a frozen encoder it has the digest."""
        digest = self.network.encoder.digest
        return {
            "kind": KIND,
            "version": self.version,
            "config": self.config.to_json(),
            "observation": self.observation.to_json(),
            **({} if digest is None else {"encoder_digest": digest}),
        }

    @staticmethod
    def of(
        parameters: Tree, description: Mapping[str, Any], *, device: str | torch.device = "cpu"
    ) -> SuccessClassifier:
        """The classifier that `parameters` and `description` were taken of."""
        weights, stats = policy_file.unpack(parameters)
        config, observation = ClassifierConfig.from_json(description["config"]), description["observation"]
        network = ClassifierNetwork(config, Spec.from_json(observation), stats, torch.device(device))
        policy_file.load_weights(network, weights, description)
        return SuccessClassifier(network, version=int(description["version"]))

    def save(self, path: str | Path) -> None:
        """Write one safetensors file; after a crash there is the old file or the new one."""
        policy_file.write(path, self.description(), self.parameters())

    @staticmethod
    def load(
        path: str | Path, observation: Spec | None = None, *, device: str | torch.device = "cpu"
    ) -> SuccessClassifier:
        """Read a file. Given the Spec of an observation, refuse a classifier that was trained for another."""

        def check(classifier: SuccessClassifier) -> None:
            if observation is not None:
                policy_file.check_fields(
                    classifier.observation, observation, "observation", all_of_it=False, what="classifier"
                )

        return policy_file.load(
            path,
            KIND,
            lambda parameters, description: SuccessClassifier.of(parameters, description, device=device),
            check,
        )


def copy_of(network: ClassifierNetwork) -> ClassifierNetwork:
    """A network with the same weights in memory of its own."""
    copy = ClassifierNetwork(network.config, network.observation, network.encoder.stats, network.device)
    copy.load_state_dict(network.state_dict())
    return copy

"""SuccessClassifier: how likely a frame shows that the task is done; a reward where the world gives none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from understudy.core import NO_VERSION, Spec, Tree
from understudy.policies import policy_file as artefact
from understudy.policies.encoder import Encoder, EncoderConfig
from understudy.policies.networks import Weights, init_mlp, mlp
from understudy.policies.protocol import Array, PolicyError
from understudy.policies.stats import Stats

KIND = "classifier"


@dataclass(frozen=True, kw_only=True)
class ClassifierConfig:
    """The shape of a classifier."""

    encoder: EncoderConfig = EncoderConfig()  # noqa: RUF009 (a frozen value)
    hidden: tuple[int, ...] = (256,)

    def __post_init__(self) -> None:
        if not self.hidden or min(self.hidden) < 1:
            raise PolicyError(f"hidden: expected at least one positive number, got {self.hidden}")

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> ClassifierConfig:
        return ClassifierConfig(encoder=EncoderConfig.from_json(value["encoder"]), hidden=tuple(value["hidden"]))


def init_classifier(config: ClassifierConfig, encoder: Encoder, generator: torch.Generator) -> Weights:
    sizes = (encoder.size, *config.hidden, 1)
    return encoder.init(generator) | init_mlp("head", sizes, generator, last_gain=0.01)


def logits(
    config: ClassifierConfig, encoder: Encoder, weights: Mapping[str, Tensor], observation: Mapping[str, Tensor]
) -> Tensor:
    """[B]: log-odds of success."""
    return mlp(weights, "head", encoder(weights, observation), len(config.hidden)).squeeze(-1)


class SuccessClassifier:
    """A classifier with its weights, which never change."""

    def __init__(
        self,
        config: ClassifierConfig,
        observation: Spec,
        stats: Stats,
        weights: Mapping[str, Tensor],
        *,
        version: int = NO_VERSION,
        device: str | torch.device = "cpu",
    ):
        self.config = config
        self.stats = stats
        self.version = version
        self.device = torch.device(device)
        self.encoder = Encoder(config.encoder, observation, stats, self.device)
        self.observation = self.encoder.inputs.spec
        like = init_classifier(config, self.encoder, torch.Generator())
        artefact.check_weights(weights, like)
        self.weights = {name: weights[name].to(self.device, torch.float32) for name in like}

    def probability(self, observation: Tree) -> Array:
        """Of success, float32: [] for one observation, [B] for a batch."""
        single = self.encoder.inputs.is_single(observation)
        with torch.inference_mode():
            tensors = self.encoder.inputs.tensors(observation, self.device, single=single)
            found: Array = torch.sigmoid(logits(self.config, self.encoder, self.weights, tensors)).cpu().numpy()
        return np.asarray(found[0]) if single else found

    def parameters(self) -> Tree:
        """All arrays, as they are published and saved."""
        return artefact.pack(self.weights, self.stats)

    def description(self) -> dict[str, Any]:
        """Plain JSON that, with `parameters`, is the whole classifier."""
        return {
            "kind": KIND,
            "version": self.version,
            "config": self.config.to_json(),
            "observation": self.observation.to_json(),
        }

    @staticmethod
    def of(
        parameters: Tree, description: Mapping[str, Any], *, device: str | torch.device = "cpu"
    ) -> SuccessClassifier:
        """The classifier that `parameters` and `description` were taken of."""
        weights, stats = artefact.unpack(parameters)
        return SuccessClassifier(
            ClassifierConfig.from_json(description["config"]),
            Spec.from_json(description["observation"]),
            stats,
            weights,
            version=int(description["version"]),
            device=device,
        )

    def save(self, path: str | Path) -> None:
        """Into one safetensors file; a crash leaves the old file or the new one."""
        artefact.write(path, self.description(), self.parameters())

    @staticmethod
    def load(
        path: str | Path, observation: Spec | None = None, *, device: str | torch.device = "cpu"
    ) -> SuccessClassifier:
        """From a file; with the Spec of what it is to look at, refuse another than it was made for."""

        def check(classifier: SuccessClassifier) -> None:
            if observation is not None:
                artefact.check_fields(classifier.observation, observation, "observation", all_of_it=False)

        return artefact.load(
            path, KIND, lambda parameters, said: SuccessClassifier.of(parameters, said, device=device), check
        )

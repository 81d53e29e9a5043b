"""Success: learn from labelled frames to tell when a task is done."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from understudy.algorithms import state_dict as saved
from understudy.algorithms.algorithm import AlgorithmError
from understudy.algorithms.offpolicy import sac_losses as losses
from understudy.algorithms.offpolicy.augment import shifted
from understudy.algorithms.offpolicy.flat_adam import Trained
from understudy.algorithms.offpolicy.transitions import numbers
from understudy.core import NO_VERSION, Spec, TransitionBatch, Tree
from understudy.core.spec import describe
from understudy.policies import ClassifierConfig, Stats, SuccessClassifier
from understudy.policies.classifier import init_classifier, logits
from understudy.policies.encoder import Encoder
from understudy.policies.inputs import to_tensor
from understudy.policies.protocol import Array

KIND = "classifier"


@dataclass(frozen=True, kw_only=True, eq=False)
class Frames:
    """B labelled frames."""

    observation: Tree  # [B, ...]
    label: Array  # [B] bool: the task is done here

    @staticmethod
    def of(batch: TransitionBatch) -> Frames:
        """What each step led to: done if the task ended there with a positive reward."""
        return Frames(observation=batch.next_observation, label=batch.terminated & (batch.reward > 0))

    def __len__(self) -> int:
        return len(self.label)


@dataclass(frozen=True, kw_only=True)
class ClassifierTrainingConfig:
    """The options of training a classifier."""

    classifier: ClassifierConfig = ClassifierConfig()  # noqa: RUF009 (a frozen value)
    learning_rate: float = 3e-4
    balance: bool = True  # whether successes and failures of a batch count the same, whatever their numbers
    shift_pixels: int = 4  # of the pictures, at most; 0: none

    def __post_init__(self) -> None:
        if self.shift_pixels < 0:
            raise AlgorithmError(f"shift_pixels: expected 0 or more, got {self.shift_pixels}")


class ClassifierTraining(saved.Saves):
    """An Algorithm whose outcome is a SuccessClassifier."""

    def __init__(
        self,
        config: ClassifierTrainingConfig,
        observation: Spec,
        stats: Stats,
        *,
        seed: int,
        device: str | torch.device = "cpu",
    ):
        self.config = config
        self.observation = observation
        self.num_updates = 0
        self.device = torch.device(device)
        self._use(stats)
        init = torch.Generator().manual_seed(seed)
        weights = init_classifier(config.classifier, self.encoder, init)
        self._network = Trained(weights, learning_rate=config.learning_rate, device=self.device)
        self._generator = torch.Generator(self.device).manual_seed(int(torch.randint(2**62, (), generator=init)))

    def _use(self, stats: Stats) -> None:
        self.stats = stats
        self.encoder = Encoder(self.config.classifier.encoder, self.observation, stats, self.device)

    def update(self, batch: TransitionBatch | Frames, *, report: bool = True) -> dict[str, float]:
        """One step towards the labels; of transitions, those of `Frames.of`."""
        frames = Frames.of(batch) if isinstance(batch, TransitionBatch) else batch
        if np.ndim(frames.label) != 1 or np.asarray(frames.label).dtype != bool:
            raise AlgorithmError(f"label: expected bool [B], got {describe(frames.label)}; True where the task is done")
        label = to_tensor(np.asarray(frames.label, np.float32), self.device)
        observation = self.encoder.inputs.tensors(frames.observation, self.device)
        observation = shifted(observation, self.encoder.inputs.cameras, self.config.shift_pixels, self._generator)
        found = logits(self.config.classifier, self.encoder, self._network.weights, observation)
        weight = losses.balancing_weight(label) if self.config.balance else torch.ones_like(label)
        loss = losses.success_loss(found, label, weight)
        self._network.step(loss)
        self.num_updates += 1
        if not report:
            return {}
        right = ((found > 0) == (label > 0.5)).float()
        metrics = {
            "loss": loss,
            "gradient": self._network.gradient_norm(),
            "accuracy": right.mean(),
            "positive_share": label.mean(),
        }
        if frames.label.any():
            metrics["recall"] = (right * label).sum() / label.sum()
        if not frames.label.all():
            metrics["false_alarms"] = ((1 - right) * (1 - label)).sum() / (1 - label).sum()
        return numbers(metrics)

    def classifier(self, *, version: int = NO_VERSION) -> SuccessClassifier:
        """The classifier as it is now; later updates do not change it."""
        weights = {name: weight.clone() for name, weight in self._network.frozen.items()}
        return SuccessClassifier(
            self.config.classifier, self.observation, self.stats, weights, version=version, device=self.device
        )

    def probability(self, observation: Tree) -> Array:
        """Of success, by the weights as they are now."""
        return self.classifier().probability(observation)

    def parameters(self) -> Tree:
        return self.classifier().parameters()

    def description(self) -> dict[str, Any]:
        return self.classifier().description()

    def _parts(self) -> saved.Parts:
        return saved.Parts(
            kind=KIND,
            config=self.config,
            spec=self.observation,
            stats=self.stats,
            generator=self._generator,
            trained={"network": self._network},
            tensors={},
        )

"""Training of the success classifier from labelled frames."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from understudy.algorithms.algorithm import AlgorithmError
from understudy.algorithms.offpolicy import sac_losses as losses
from understudy.algorithms.offpolicy.augment import shifted
from understudy.algorithms.offpolicy.config import ClassifierTrainingConfig
from understudy.algorithms.offpolicy.transitions import numbers
from understudy.algorithms.optimizers import FlatAdam
from understudy.algorithms.state_dict import Resumable, StateParts
from understudy.core import NO_VERSION, Spec, TransitionBatch, Tree
from understudy.core.spec import describe
from understudy.policies.protocol import Array
from understudy.policies.rlpd.classifier import ClassifierNetwork, SuccessClassifier, copy_of
from understudy.policies.stats import Stats
from understudy.policies.transfer import to_tensor

KIND = "classifier"


@dataclass(frozen=True, kw_only=True, eq=False)
class Frames:
    """B labelled frames."""

    observation: Tree  # [B, ...]
    label: Array  # [B] bool: the frame shows success

    @staticmethod
    def of(batch: TransitionBatch) -> Frames:
        """The frame after each step: a success if the task ended there with a positive reward."""
        return Frames(observation=batch.next_observation, label=batch.terminated & (batch.reward > 0))

    def __len__(self) -> int:
        return len(self.label)


class ClassifierTraining(Resumable):
    """An Algorithm whose result is a SuccessClassifier."""

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
        self.network = ClassifierNetwork(config.classifier, observation, stats, self.device)
        init = torch.Generator().manual_seed(seed)
        self.network.init_parameters(init)
        self._adam = FlatAdam(self.network.parameters(), learning_rate=config.learning_rate)
        self._generator = torch.Generator(self.device).manual_seed(int(torch.randint(2**62, (), generator=init)))

    def _set_stats(self, stats: Stats) -> None:
        self.network.encoder.set_stats(stats)

    @property
    def stats(self) -> Stats:
        """Statistics of the observation's state fields."""
        return self.network.encoder.stats

    def update(self, batch: TransitionBatch | Frames, *, report: bool = True) -> dict[str, float]:
        """One step towards the labels; `Frames.of` labels a batch of transitions."""
        frames = Frames.of(batch) if isinstance(batch, TransitionBatch) else batch
        if np.ndim(frames.label) != 1 or np.asarray(frames.label).dtype != bool:
            raise AlgorithmError(
                f"label: expected bool [B], got {describe(frames.label)}; True where the frame shows success"
            )
        label = to_tensor(np.asarray(frames.label, np.float32), self.device)
        inputs = self.network.encoder.inputs
        observation = inputs.tensors(frames.observation, self.device)
        observation = shifted(observation, inputs.cameras, self.config.shift_pixels, self._generator)
        found = self.network(observation)
        weight = losses.balancing_weight(label) if self.config.balance else torch.ones_like(label)
        loss = losses.success_loss(found, label, weight)
        self._adam.descend(loss)
        self.num_updates += 1
        if not report:
            return {}
        right = ((found > 0) == (label > 0.5)).float()
        metrics = {
            "loss": loss,
            "gradient": self._adam.gradient_norm(),
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
        return SuccessClassifier(copy_of(self.network), version=version)

    def probability(self, observation: Tree) -> Array:
        """Probability of success under the present weights."""
        return self.classifier().probability(observation)

    def parameters(self) -> Tree:
        return self.classifier().parameters()

    def description(self) -> dict[str, Any]:
        return self.classifier().description()

    def _state_parts(self) -> StateParts:
        return StateParts(
            kind=KIND,
            config=self.config,
            spec=self.observation,
            stats=self.stats,
            generator=self._generator,
            modules={"network": self.network},
            optimizers={"network": self._adam},
            encoder_digest=self.network.encoder.digest,
        )

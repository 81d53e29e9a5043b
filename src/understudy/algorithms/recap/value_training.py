"""ValueTraining: a value model learns the returns of recorded steps, by cross-entropy over bins."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.nn import functional

from understudy.algorithms.offpolicy.transitions import numbers
from understudy.algorithms.optimizers import AdamW, init_moments
from understudy.algorithms.recap import returns
from understudy.algorithms.recap.config import ValueTrainingConfig
from understudy.algorithms.state_dict import Resumable, StateParts
from understudy.core import NO_VERSION, Tree
from understudy.policies.protocol import Array
from understudy.policies.stats import Stats
from understudy.policies.transfer import to_tensor
from understudy.policies.value_model import ValueModel

KIND = "value"


@dataclass(frozen=True, kw_only=True, eq=False)
class ValueSteps:
    """B steps and what became of them."""

    observation: Tree  # [B, ...]
    instruction: tuple[str, ...]  # B
    value: Array  # [B] float32: returns from -1 to 0


class ValueTraining(Resumable):
    """An update rule over steps. It trains the given model in place."""

    def __init__(self, config: ValueTrainingConfig, model: ValueModel, *, seed: int):
        self.config = config
        self.num_updates = 0
        self._model = model
        self._device = model.network.device
        weights = [weight for weight in model.network.parameters() if weight.requires_grad]
        groups: list[dict[str, Any]] = [
            {"params": [weight for weight in weights if weight.ndim > 1]},
            {"params": [weight for weight in weights if weight.ndim <= 1], "weight_decay": 0.0},
        ]
        self._weights = weights
        self._adam = AdamW(groups, config.learning_rate, weight_decay=config.weight_decay, fused=True)
        init_moments(self._adam)
        self._generator = torch.Generator(self._device).manual_seed(seed)

    def update(self, batch: ValueSteps, *, report: bool = True) -> dict[str, float]:
        """One step towards the returns of the batch."""
        model = self._model
        logits = model.logits(batch.observation, batch.instruction)
        loss = functional.cross_entropy(logits, to_tensor(returns.to_bins(batch.value), self._device))
        self._adam.zero_grad()
        torch.autograd.backward(loss)
        gradient = torch.nn.utils.clip_grad_norm_(self._weights, 1.0)
        self._adam.step()
        self.num_updates += 1
        if not report:
            return {}
        away = (model.expected(logits.detach()) - to_tensor(batch.value, self._device)).abs().mean()
        return numbers({"loss": loss, "error": away, "gradient": gradient})

    def model(self, *, version: int = NO_VERSION) -> ValueModel:
        """The model as it is now; later updates do not change it."""
        description = {**self._model.description(), "version": version}
        return ValueModel.of(self._model.parameters(), description, device=self._device)

    def description(self) -> dict[str, Any]:
        return self._model.description()

    def _set_stats(self, stats: Stats) -> None:
        self._model.network.encoder.set_stats(stats)

    def _state_parts(self) -> StateParts:
        model = self._model
        return StateParts(
            kind=KIND,
            config={"update": asdict(self.config), "value": model.config.to_json(), "words": list(model.words.known)},
            spec=model.observation,
            stats=model.network.encoder.stats,
            generator=self._generator,
            modules={"network": model.network},
            optimizers={"network": self._adam},
            encoder_digest=model.network.encoder.digest,
        )

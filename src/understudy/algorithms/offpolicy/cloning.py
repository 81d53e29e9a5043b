"""Cloning: do in each observation what was done there; supervised, and the baseline of everything else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from understudy.algorithms import state_dict as saved
from understudy.algorithms.algorithm import AlgorithmError
from understudy.algorithms.offpolicy import sac_losses as losses
from understudy.algorithms.offpolicy.augment import shifted
from understudy.algorithms.offpolicy.flat_adam import Trained
from understudy.algorithms.offpolicy.transitions import numbers
from understudy.core import NO_VERSION, StepSpec, TransitionBatch, Tree
from understudy.policies import ActorConfig, ActorPolicy, Stats, tanh_normal
from understudy.policies.actor import Actor
from understudy.policies.inputs import to_tensor

KIND = "cloning"


@dataclass(frozen=True, kw_only=True)
class CloningConfig:
    """The options of cloning."""

    actor: ActorConfig = ActorConfig()  # noqa: RUF009 (a frozen value)
    loss: Literal["mse", "likelihood"] = "mse"  # distance of the mode; or log-likelihood, which learns a spread too
    learning_rate: float = 1e-3
    shift_pixels: int = 4  # of the pictures, at most; 0: none

    def __post_init__(self) -> None:
        if self.loss not in ("mse", "likelihood"):
            raise AlgorithmError(f"loss: expected 'mse' or 'likelihood', got {self.loss!r}")
        if self.shift_pixels < 0:
            raise AlgorithmError(f"shift_pixels: expected 0 or more, got {self.shift_pixels}")


class Cloning(saved.Saves):
    """An Algorithm that looks at observations and actions only. Every row of a batch is an example to follow."""

    def __init__(
        self, config: CloningConfig, spec: StepSpec, stats: Stats, *, seed: int, device: str | torch.device = "cpu"
    ):
        self.config = config
        self.spec = spec
        self.num_updates = 0
        self.device = torch.device(device)
        self._use(stats)
        init = torch.Generator().manual_seed(seed)
        self._actor = Trained(self.actor.init(init), learning_rate=config.learning_rate, device=self.device)
        self._generator = torch.Generator(self.device).manual_seed(int(torch.randint(2**62, (), generator=init)))

    def _use(self, stats: Stats) -> None:
        self.stats = stats
        self.actor = Actor(self.config.actor, self.spec, stats, self.device)

    def update(self, batch: TransitionBatch, *, report: bool = True) -> dict[str, float]:
        """One step towards the batch's actions."""
        actor, weights = self.actor, self._actor.weights
        observation = actor.encoder.inputs.tensors(batch.observation, self.device)
        arm, choice = actor.split(actor.actions.to_unit(batch.action, self.device))
        weight = to_tensor(batch.weight, self.device)
        observation = shifted(observation, actor.encoder.inputs.cameras, self.config.shift_pixels, self._generator)
        features = actor.encoder(weights, observation)
        mean, log_std = actor.distribution(weights, features)
        log_prob = tanh_normal.log_prob(tanh_normal.unsqueeze(arm), mean, log_std)
        mse = losses.imitation_mse(torch.tanh(mean), arm, weight)
        loss = mse if self.config.loss == "mse" else losses.imitation_likelihood(log_prob, weight)
        metrics: dict[str, Tensor] = {"mse": mse, "log_likelihood": log_prob.mean()}
        if choice is not None:
            values = actor.gripper_values(weights, features)
            choice_loss = losses.choice_loss(values, choice, weight)
            loss = loss + choice_loss
            agrees = (values.argmax(dim=1) == choice).float().mean()
            metrics |= {"gripper_loss": choice_loss, "gripper_agreement": agrees}
        self._actor.step(loss)
        self.num_updates += 1
        return numbers({"loss": loss, "gradient": self._actor.gradient_norm(), **metrics}) if report else {}

    def policy(self, *, version: int = NO_VERSION) -> ActorPolicy:
        """The policy as it is now; later updates do not change it."""
        weights = {name: weight.clone() for name, weight in self._actor.frozen.items()}
        return ActorPolicy(self.config.actor, self.spec, self.stats, weights, version=version, device=self.device)

    def parameters(self) -> Tree:
        return self.policy().parameters()

    def description(self) -> dict[str, Any]:
        return self.policy().description()

    def _parts(self) -> saved.Parts:
        return saved.Parts(
            kind=KIND,
            config=self.config,
            spec=self.spec,
            stats=self.stats,
            generator=self._generator,
            trained={"actor": self._actor},
            tensors={},
        )

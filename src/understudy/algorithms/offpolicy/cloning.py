"""Behaviour cloning: supervised learning of the demonstrated actions, and the baseline of everything else."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from understudy.algorithms.offpolicy import sac_losses as losses
from understudy.algorithms.offpolicy.augment import shifted
from understudy.algorithms.offpolicy.config import CloningConfig
from understudy.algorithms.offpolicy.transitions import numbers
from understudy.algorithms.optimizers import FlatAdam
from understudy.algorithms.state_dict import Resumable, StateParts
from understudy.core import NO_VERSION, StepSpec, TransitionBatch, Tree
from understudy.policies.rlpd import tanh_normal
from understudy.policies.rlpd.actor import Actor, ActorPolicy, copy_of
from understudy.policies.stats import Stats
from understudy.policies.transfer import to_tensor

KIND = "cloning"


class Cloning(Resumable):
    """An Algorithm that reads observations and actions only. Every row of a batch is a demonstration."""

    def __init__(
        self, config: CloningConfig, spec: StepSpec, stats: Stats, *, seed: int, device: str | torch.device = "cpu"
    ):
        self.config = config
        self.spec = spec
        self.num_updates = 0
        self.device = torch.device(device)
        self.actor = Actor(config.actor, spec, stats, self.device)
        init = torch.Generator().manual_seed(seed)
        self.actor.init_parameters(init)
        self._adam = FlatAdam(self.actor.parameters(), learning_rate=config.learning_rate)
        self._generator = torch.Generator(self.device).manual_seed(int(torch.randint(2**62, (), generator=init)))

    def _set_stats(self, stats: Stats) -> None:
        self.actor.encoder.set_stats(stats)

    @property
    def stats(self) -> Stats:
        """Statistics of the observation's state fields."""
        return self.actor.encoder.stats

    def update(self, batch: TransitionBatch, *, report: bool = True) -> dict[str, float]:
        """One step towards the batch's actions."""
        actor = self.actor
        observation = actor.encoder.inputs.tensors(batch.observation, self.device)
        arm, choice = actor.split(actor.actions.to_unit(batch.action, self.device))
        weight = to_tensor(batch.weight, self.device)
        observation = shifted(observation, actor.encoder.inputs.cameras, self.config.shift_pixels, self._generator)
        features = actor.encoder(observation)
        mean, log_std = actor.distribution(features)
        log_prob = tanh_normal.log_prob(tanh_normal.unsqueeze(arm), mean, log_std)
        mse = losses.bc_mse(torch.tanh(mean), arm, weight)
        loss = mse if self.config.loss == "mse" else losses.bc_likelihood(log_prob, weight)
        metrics: dict[str, Tensor] = {"mse": mse, "log_likelihood": log_prob.mean()}
        if choice is not None:
            values = actor.gripper_values(features)
            choice_loss = losses.choice_loss(values, choice, weight)
            loss = loss + choice_loss
            agrees = (values.argmax(dim=1) == choice).float().mean()
            metrics |= {"gripper_loss": choice_loss, "gripper_agreement": agrees}
        self._adam.descend(loss)
        self.num_updates += 1
        return numbers({"loss": loss, "gradient": self._adam.gradient_norm(), **metrics}) if report else {}

    def policy(self, *, version: int = NO_VERSION) -> ActorPolicy:
        """The policy as it is now; later updates do not change it."""
        return ActorPolicy(copy_of(self.actor), version=version)

    def parameters(self) -> Tree:
        return self.policy().parameters()

    def description(self) -> dict[str, Any]:
        return self.policy().description()

    def _state_parts(self) -> StateParts:
        return StateParts(
            kind=KIND,
            config=self.config,
            spec=self.spec,
            stats=self.stats,
            generator=self._generator,
            modules={"actor": self.actor},
            optimizers={"actor": self._adam},
            encoder_digest=self.actor.encoder.digest,
        )

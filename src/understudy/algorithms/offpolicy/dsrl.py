"""DSRL: SAC for an actor that chooses the noise of a frozen policy (Wagenmaker et al. 2025, with noise aliasing).

There are two ensembles of critics. The action critics learn from the blocks of actions that were executed, whoever
chose them. The noise critics learn what the action critics say of the blocks that the frozen policy makes of noise,
without its gradients, and the actor follows the noise critics.

One update runs `critic_steps` steps of the action critics, each on its own part of the batch and each followed by a
step of their targets; then one step of the noise critics, one of the actor and one of the temperature on the last part.
`docs/dsrl.md` has the equations.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from understudy.algorithms.algorithm import AlgorithmError
from understudy.algorithms.offpolicy import sac_losses as losses
from understudy.algorithms.offpolicy.augment import shifted
from understudy.algorithms.offpolicy.block_transitions import Array, BlockTransitions, block_transitions
from understudy.algorithms.offpolicy.config import SACConfig
from understudy.algorithms.offpolicy.critics import CriticEnsemble, drawn_targets
from understudy.algorithms.offpolicy.transitions import numbers
from understudy.algorithms.optimizers import FlatAdam, flatten_parameters
from understudy.algorithms.state_dict import Resumable, StateParts
from understudy.core import NO_VERSION, ArraySpec, SequenceBatch, Spec, StepSpec, Tree
from understudy.policies import transfer
from understudy.policies.actions import Actions
from understudy.policies.rlpd import tanh_normal
from understudy.policies.rlpd.actor import Actor, ActorPolicy, copy_of
from understudy.policies.stats import Stats

KIND = "dsrl"


class NoiseToBlock(Protocol):
    """A frozen policy as a function of noise."""

    @property
    def block_steps(self) -> int:
        """H."""
        ...

    @property
    def noise_shape(self) -> tuple[int, ...]:
        """The shape of the noise of one block."""
        ...

    def __call__(self, observation: Tree, noise: Array) -> Array:
        """Blocks [B, H, D] from -1 to 1 for observations [B, ...] and noise [B, *noise_shape]."""
        ...


def noise_spec(spec: StepSpec, noise_shape: tuple[int, ...], bound: float) -> StepSpec:
    """The spec of an actor that sees the observations of a world and chooses noise from -bound to bound."""
    noise = ArraySpec(shape=noise_shape, dtype="float32", low=-bound, high=bound)
    return StepSpec(observation=spec.observation, action=Spec(noise))


class DSRL(Resumable):
    """An Algorithm for batches of sequences. All weights and random numbers of its updates are made from `seed`."""

    def __init__(
        self,
        config: SACConfig,
        spec: StepSpec,
        stats: Stats,
        base: NoiseToBlock,
        *,
        seed: int,
        device: str | torch.device = "cpu",
    ):
        """`spec` is that of the world."""
        if config.noise_bound is None:
            raise AlgorithmError("noise_bound: expected the largest noise that the actor may choose, got None; try 1.5")
        self.config = config
        self.spec = spec
        self.base = base
        self.bound = config.noise_bound
        self.num_updates = 0
        self.device = torch.device(device)
        self.actions = Actions(spec.action)
        self.actor = Actor(config.actor, noise_spec(spec, base.noise_shape, self.bound), stats, self.device)
        self.target_entropy = config.target_entropy or 0.0
        encoder, noise_size = self.actor.encoder, self.actor.arm_size
        block_size = base.block_steps * self.actions.size
        num, norm = config.num_critics, config.layer_norm
        self.critic = CriticEnsemble(num, (encoder.size + block_size, *config.critic_hidden), layer_norm=norm)
        self.noise_critic = CriticEnsemble(num, (encoder.size + noise_size, *config.critic_hidden), layer_norm=norm)
        init = torch.Generator().manual_seed(seed)
        self.actor.init_parameters(init)
        for critic in (self.critic, self.noise_critic):
            critic.init_parameters(init)
            critic.to(self.device)
        self.target = copy.deepcopy(self.critic).requires_grad_(False)  # the encoder has no target network
        self.log_temperature = nn.Parameter(torch.tensor(math.log(config.initial_temperature), device=self.device))
        learned_from_returns = [*encoder.parameters(), *self.critic.parameters()]
        self._critic_adam = FlatAdam(learned_from_returns, learning_rate=config.critic_lr)
        self._noise_critic_adam = FlatAdam(self.noise_critic.parameters(), learning_rate=config.critic_lr)
        self._actor_adam = FlatAdam(self.actor.actor.parameters(), learning_rate=config.actor_lr)
        self._temperature_adam = FlatAdam([self.log_temperature], learning_rate=config.temperature_lr)
        self._flat_target = flatten_parameters(list(self.target.parameters()))
        self._flat_critic = self._critic_adam.flat.detach()[-len(self._flat_target) :]  # it stands behind the encoder
        self._generator = torch.Generator(self.device).manual_seed(int(torch.randint(2**62, (), generator=init)))

    def _set_stats(self, stats: Stats) -> None:
        self.actor.encoder.set_stats(stats)

    # ---- learning

    def update(self, batch: SequenceBatch, *, report: bool = True) -> dict[str, float]:
        """Learn from a batch; see the module's docstring for the stages."""
        config, steps = self.config, self.config.critic_steps
        if len(batch) % steps or not len(batch):
            raise AlgorithmError(f"batch: expected a multiple of critic_steps ({steps}) rows, got {len(batch)}")
        whole = block_transitions(batch, self.actions, block_steps=self.base.block_steps, discount=config.discount)
        *others, last = (whole.part(number, steps) for number in range(steps))
        for part in others:
            self._critic_step(part, None)
        metrics: dict[str, Tensor] | None = {} if report else None
        features = self._critic_step(last, metrics)
        self._noise_critic_step(last, features, metrics)
        self._actor_step(features, metrics)
        self.num_updates += 1
        return {} if metrics is None else numbers(metrics)

    def _critic_step(self, part: BlockTransitions, metrics: dict[str, Tensor] | None) -> Tensor:
        """A step of the action critics; returns the features of the observations, for the others."""
        config = self.config
        features = self._features(part.observation)
        with torch.no_grad():
            next_features = self._features(part.next_observation)
            next_noise, next_log_prob = tanh_normal.draw(*self.actor.distribution(next_features), self._generator)
            next_block = self._blocks(part.next_observation, next_noise)
            chosen = drawn_targets(config.num_critics, config.num_target_critics, self._generator)
            next_q = self.target(torch.cat([next_features, next_block], dim=1), chosen)
            temperature = self.log_temperature.exp() if config.backup_entropy else None
            target = losses.bellman_target(
                self._floats(part.reward),
                self._floats(part.terminated),
                self._floats(part.num_steps),
                losses.pessimistic(next_q, temperature, next_log_prob),
                discount=config.discount,
            )
        q = self.critic(torch.cat([features, self._executed(part)], dim=1))
        loss = losses.critic_loss(q, target, torch.ones_like(target))
        self._critic_adam.descend(loss)
        self._flat_target.lerp_(self._flat_critic, config.tau)
        if metrics is not None:
            metrics |= {
                "critic_loss": loss,
                "q": q.mean(),
                "q_disagreement": q.std(dim=0, correction=0).mean(),
                "q_target": target.mean(),
                "q_target_max": target.max(),
                "td_error": (q - target).abs().mean(),
                "critic_gradient": self._critic_adam.gradient_norm(),
            }
        return features.detach()

    def _executed(self, part: BlockTransitions) -> Tensor:
        """The blocks [B, H D] that were executed; what would have come behind the end is random, for it changes
        nothing."""
        action = self._floats(part.action)
        anything = 2.0 * torch.rand(action.shape, generator=self._generator, device=self.device) - 1.0
        executed = torch.from_numpy(part.executed).to(self.device)
        return torch.where(executed[..., None], action, anything).flatten(1)

    def _noise_critic_step(self, part: BlockTransitions, features: Tensor, metrics: dict[str, Tensor] | None) -> None:
        """A step of the noise critics: half of the noise is the actor's, and half is what the base policy draws."""
        with torch.no_grad():
            chosen, _ = tanh_normal.draw(*self.actor.distribution(features), self._generator)
            normal = torch.randn(chosen.shape, generator=self._generator, device=self.device)
            own = (normal / self.bound).clamp(-1.0, 1.0)
            is_own = torch.arange(len(own), device=self.device)[:, None] % 2 == 0
            noise = torch.where(is_own, own, chosen)
            target = self.critic(torch.cat([features, self._blocks(part.observation, noise)], dim=1))
        q = self.noise_critic(torch.cat([features, noise], dim=1))
        loss = losses.critic_loss(q, target, torch.ones_like(target[0]))
        self._noise_critic_adam.descend(loss)
        if metrics is not None:
            with torch.no_grad():
                own_q = self.noise_critic(torch.cat([features, own], dim=1)).mean()
            metrics |= {"noise_critic_loss": loss, "own_noise_q": own_q}

    def _actor_step(self, features: Tensor, metrics: dict[str, Tensor] | None) -> None:
        temperature = self.log_temperature.detach().exp()
        noise, log_prob = tanh_normal.draw(*self.actor.distribution(features), self._generator)
        q = self.noise_critic(torch.cat([features, noise], dim=1))
        loss = losses.actor_loss(q, log_prob, temperature, torch.ones_like(log_prob))
        self._actor_adam.descend(loss)
        noise, log_prob = noise.detach(), log_prob.detach()
        self._temperature_adam.descend(losses.temperature_loss(self.log_temperature, log_prob, self.target_entropy))
        if metrics is not None:
            metrics |= {
                "actor_loss": loss,
                "actor_gradient": self._actor_adam.gradient_norm(),
                "actor_q": q.mean(),
                "entropy": -log_prob.mean(),
                "saturation": (noise.abs() > 0.99).float().mean(),
                "temperature": temperature,
            }

    def _features(self, observation: Tree) -> Tensor:
        """Of a batch of observations, whose images are shifted at random."""
        encoder = self.actor.encoder
        tensors = encoder.inputs.tensors(observation, self.device)
        found: Tensor = encoder(shifted(tensors, encoder.inputs.cameras, self.config.shift_pixels, self._generator))
        return found

    def _blocks(self, observation: Tree, unit: Tensor) -> Tensor:
        """The blocks [B, H D] that the base policy makes of noise [B, N] from -1 to 1, as the actor gives it."""
        noise = np.asarray(self.actor.actions.from_unit(transfer.to_array(unit)))  # a tree of one array
        return self._floats(self.base(observation, noise)).flatten(1)

    def _floats(self, array: Array) -> Tensor:
        return transfer.to_tensor(array, self.device)

    # ---- publishing and resuming

    def policy(self, *, version: int = NO_VERSION) -> ActorPolicy:
        """The actor as it is now, which chooses noise; later updates do not change it."""
        return ActorPolicy(copy_of(self.actor), version=version)

    def parameters(self) -> Tree:
        return self.policy().parameters()

    def description(self) -> dict[str, Any]:
        return self.policy().description()

    def _state_parts(self) -> StateParts:
        modules: Mapping[str, nn.Module] = {
            "actor": self.actor,
            "critic": self.critic,
            "noise_critic": self.noise_critic,
            "target": self.target,
            "temperature": nn.ParameterDict({"log": self.log_temperature}),
        }
        return StateParts(
            kind=KIND,
            config=self.config,
            spec=self.spec,
            stats=self.actor.encoder.stats,
            generator=self._generator,
            modules=modules,
            optimizers={
                "critic": self._critic_adam,
                "noise_critic": self._noise_critic_adam,
                "actor": self._actor_adam,
                "temperature": self._temperature_adam,
            },
            encoder_digest=self.actor.encoder.digest,
        )

"""SAC as in RLPD: an ensemble of critics with LayerNorm, many updates per step, demonstrations in every batch.

One update runs `critic_steps` steps of the critics (and of the gripper's critic), each on its own part of the batch and
each followed by a step of the target critics; then one step of the actor and one of the temperature on the last part.
`docs/rlpd.md` has the equations, what each option is for and what each metric tells.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from understudy.algorithms.algorithm import AlgorithmError
from understudy.algorithms.offpolicy import sac_losses as losses
from understudy.algorithms.offpolicy.augment import shifted
from understudy.algorithms.offpolicy.config import SACConfig
from understudy.algorithms.offpolicy.critics import CriticEnsemble, drawn_targets
from understudy.algorithms.offpolicy.transitions import TransitionTensors, numbers, to_tensors
from understudy.algorithms.optimizers import FlatAdam, flatten_parameters
from understudy.algorithms.state_dict import Resumable, StateParts
from understudy.core import NO_VERSION, StepSpec, TransitionBatch, Tree
from understudy.policies.rlpd import tanh_normal
from understudy.policies.rlpd.actor import BASE_ACTION, Actor, ActorPolicy, copy_of
from understudy.policies.stats import Stats

KIND = "sac"


class SAC(Resumable):
    """An Algorithm. All weights are made from `seed`, and so is every random number of its updates."""

    def __init__(
        self, config: SACConfig, spec: StepSpec, stats: Stats, *, seed: int, device: str | torch.device = "cpu"
    ):
        if config.noise_bound is not None:
            raise AlgorithmError(
                f"noise_bound: expected None, because SAC chooses actions, got {config.noise_bound}; use DSRL, which "
                f"chooses the noise of a base policy"
            )
        self.config = config
        self.spec = spec
        self.num_updates = 0
        self.device = torch.device(device)
        self.actor = Actor(config.actor, spec, stats, self.device)
        given = config.target_entropy
        self.target_entropy = -0.5 * self.actor.arm_size if given is None else given
        sizes = (self.actor.encoder.size + self.actor.arm_size, *config.critic_hidden)
        self.critic = CriticEnsemble(config.num_critics, sizes, layer_norm=config.layer_norm)
        init = torch.Generator().manual_seed(seed)
        self.actor.init_parameters(init)
        self.critic.init_parameters(init)
        self.critic.to(self.device)
        heads: dict[str, nn.Module] = {"critic": self.critic}
        if self.actor.gripper is not None:
            heads["gripper"] = self.actor.gripper
        self.target = nn.ModuleDict(copy.deepcopy(heads)).requires_grad_(False)  # the encoder has no target network
        heads_of = [parameter for head in heads.values() for parameter in head.parameters()]
        self.log_temperature = nn.Parameter(torch.tensor(math.log(config.initial_temperature), device=self.device))
        learned_from_returns = [*self.actor.encoder.parameters(), *heads_of]
        self._critic_adam = FlatAdam(learned_from_returns, learning_rate=config.critic_lr)
        self._actor_adam = FlatAdam(self.actor.actor.parameters(), learning_rate=config.actor_lr)
        self._temperature_adam = FlatAdam([self.log_temperature], learning_rate=config.temperature_lr)
        self._flat_target = flatten_parameters(list(self.target.parameters()))
        self._flat_heads = self._critic_adam.flat.detach()[-len(self._flat_target) :]  # they stand behind the encoder
        self._generator = torch.Generator(self.device).manual_seed(int(torch.randint(2**62, (), generator=init)))

    def start_from(self, policy: ActorPolicy) -> None:
        """Begin with the actor, encoder and statistics of another policy, such as a clone.

        The gripper's critic is not taken over: that of a clone gives log-odds, not returns.
        """
        if policy.config != self.config.actor:
            raise AlgorithmError(f"actor: expected a policy of {self.config.actor}, got one of {policy.config}")
        policy.check_world(self.spec)
        self._set_stats(policy.stats)
        self.actor.encoder.load_state_dict(policy.actor.encoder.state_dict())
        self.actor.actor.load_state_dict(policy.actor.actor.state_dict())

    def _set_stats(self, stats: Stats) -> None:
        self.actor.encoder.set_stats(stats)

    @property
    def stats(self) -> Stats:
        """Statistics of the observation's state fields."""
        return self.actor.encoder.stats

    # ---- learning

    def update(self, batch: TransitionBatch, *, report: bool = True) -> dict[str, float]:
        """Learn from a batch; see the module's docstring for the stages."""
        steps = self.config.critic_steps
        if len(batch) % steps or not len(batch):
            raise AlgorithmError(f"batch: expected a multiple of critic_steps ({steps}) rows, got {len(batch)}")
        whole = to_tensors(batch, self.actor, penalty=self.config.gripper_penalty)
        *others, last = (whole.part(number, steps) for number in range(steps))
        for part in others:
            self._critic_step(part, None)
        metrics: dict[str, Tensor] | None = {} if report else None
        features = self._critic_step(last, metrics)
        self._actor_step(last, features, metrics)
        self.num_updates += 1
        return {} if metrics is None else numbers(metrics)

    def _critic_step(self, part: TransitionTensors, metrics: dict[str, Tensor] | None) -> Tensor:
        """Returns the features of the observations, for the actor."""
        config, encoder = self.config, self.actor.encoder
        features: Tensor = encoder(self._shifted(part.observation))
        arm, choice = self.actor.split(part.action)
        with torch.no_grad():
            next_features = encoder(self._shifted(part.next_observation))
            drawn, next_log_prob = tanh_normal.draw(*self.actor.distribution(next_features), self._generator)
            next_arm = self.actor.executed(part.next_observation, drawn)
            chosen = drawn_targets(config.num_critics, config.num_target_critics, self._generator)
            next_q = self.target["critic"](torch.cat([next_features, next_arm], dim=1), chosen)
            temperature = self.log_temperature.exp() if config.backup_entropy else None
            target = self._target_of(part, part.reward, losses.pessimistic(next_q, temperature, next_log_prob))
        q = self.critic(torch.cat([features, arm], dim=1))
        loss = losses.critic_loss(q, target, part.weight)
        if metrics is not None:
            metrics |= {
                "critic_loss": loss,
                "q": q.mean(),
                "q_disagreement": q.std(dim=0, correction=0).mean(),
                "q_target": target.mean(),
                "q_target_max": target.max(),
                "td_error": (q - target).abs().mean(),
            }
        if choice is not None:
            loss = loss + self._gripper_loss(part, features, next_features, choice, metrics)
        self._critic_adam.descend(loss)
        self._flat_target.lerp_(self._flat_heads, config.tau)
        if metrics is not None:
            metrics["critic_gradient"] = self._critic_adam.gradient_norm()
        return features.detach()

    def _gripper_loss(
        self,
        part: TransitionTensors,
        features: Tensor,
        next_features: Tensor,
        choice: Tensor,
        metrics: dict[str, Tensor] | None,
    ) -> Tensor:
        """Double Q-learning over the gripper's values; the arm counts as a part of the world."""
        with torch.no_grad():
            next_value = losses.double_q(
                self.actor.gripper_values(next_features), self.target["gripper"](next_features)
            )
            reward = part.reward if part.penalty is None else part.reward + part.penalty
            target = self._target_of(part, reward, next_value)
        values = self.actor.gripper_values(features)
        loss = losses.gripper_loss(values, choice, target, part.weight)
        if metrics is not None:
            agrees = (values.argmax(dim=1) == choice).float().mean()
            metrics |= {"gripper_loss": loss, "gripper_q": values.mean(), "gripper_agreement": agrees}
        return loss

    def _target_of(self, part: TransitionTensors, reward: Tensor, next_value: Tensor) -> Tensor:
        discount = self.config.discount
        return losses.bellman_target(reward, part.terminated, part.num_steps, next_value, discount=discount)

    def _actor_step(self, part: TransitionTensors, features: Tensor, metrics: dict[str, Tensor] | None) -> None:
        temperature = self.log_temperature.detach().exp()
        mean, log_std = self.actor.distribution(self._with_hidden_base_actions(features))
        drawn, log_prob = tanh_normal.draw(mean, log_std, self._generator)
        arm = self.actor.executed(part.observation, drawn)
        q = self.critic(torch.cat([features, arm], dim=1))
        loss = losses.actor_loss(q, log_prob, temperature, part.weight)
        if self.config.bc_weight:
            wanted, weight = self._imitated(part)
            distance = losses.bc_mse(
                self.actor.executed(part.observation, torch.tanh(mean)), wanted, part.weight * weight
            )
            loss = loss + self.config.bc_weight * distance
            if metrics is not None:
                metrics["bc_mse"] = distance / weight.mean().clamp(min=1e-6)
        self._actor_adam.descend(loss)
        drawn, log_prob = drawn.detach(), log_prob.detach()
        self._temperature_adam.descend(losses.temperature_loss(self.log_temperature, log_prob, self.target_entropy))
        if metrics is not None:
            metrics |= {
                "actor_loss": loss,
                "actor_gradient": self._actor_adam.gradient_norm(),
                "actor_q": q.mean(),
                "entropy": -log_prob.mean(),
                "saturation": (drawn.abs() > 0.99).float().mean(),
                "temperature": temperature,
            }

    def _with_hidden_base_actions(self, features: Tensor) -> Tensor:
        """What the actor sees in its own loss: in some rows the base action is at its mean, where it tells nothing."""
        share = self.config.base_action_dropout
        if not share:
            return features
        hidden = torch.rand((len(features), 1), generator=self._generator, device=features.device) < share
        columns = self.actor.encoder.columns_of(BASE_ACTION)
        seen = features.clone()
        seen[:, columns] = seen[:, columns].masked_fill(hidden, 0.0)
        return seen

    def _imitated(self, part: TransitionTensors) -> tuple[Tensor, Tensor]:
        """The arm's numbers [B, arm] that the actor is kept close to, and in which rows [B]: those of humans and
        scripts, and in the other rows of a residual actor the base action."""
        demonstrated, _ = self.actor.split(part.action)
        if self.config.actor.residual_scale is None:
            return demonstrated, part.demonstrated
        is_demonstrated = part.demonstrated[:, None] > 0
        wanted = torch.where(is_demonstrated, demonstrated, self.actor.base(part.observation))
        return wanted, torch.ones_like(part.demonstrated)

    def _shifted(self, observation: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return shifted(observation, self.actor.encoder.inputs.cameras, self.config.shift_pixels, self._generator)

    # ---- publishing and resuming

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
            modules={
                "actor": self.actor,
                "critic": self.critic,
                "target": self.target,
                "temperature": nn.ParameterDict({"log": self.log_temperature}),
            },
            optimizers={
                "critic": self._critic_adam,
                "actor": self._actor_adam,
                "temperature": self._temperature_adam,
            },
            encoder_digest=self.actor.encoder.digest,
        )

"""SAC as in RLPD: an ensemble of critics with LayerNorm, many updates per step, demonstrations in every batch.

One update: `critic_steps` times a step of the critics (and of the gripper's) on a part of the batch, each followed by a
step of their targets; then one step of the actor and one of the temperature on the last part. The page `docs/rlpd.md`
has the equations, what each option is for and what each metric tells.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from understudy.algorithms import state_dict as saved
from understudy.algorithms.algorithm import AlgorithmError
from understudy.algorithms.offpolicy import sac_losses as losses
from understudy.algorithms.offpolicy.augment import shifted
from understudy.algorithms.offpolicy.critics import critics, init_critics, subset
from understudy.algorithms.offpolicy.flat_adam import Trained, flattened
from understudy.algorithms.offpolicy.transitions import Minibatch, numbers, to_minibatch
from understudy.core import NO_VERSION, StepSpec, TransitionBatch, Tree
from understudy.policies import ActorConfig, ActorPolicy, Stats, tanh_normal
from understudy.policies.actor import Actor

KIND = "sac"


@dataclass(frozen=True, kw_only=True)
class SACConfig:
    """The options of SAC; `docs/rlpd.md` says why each has its default."""

    actor: ActorConfig = ActorConfig()  # noqa: RUF009 (a frozen value)
    critic_hidden: tuple[int, ...] = (256, 256)
    num_critics: int = 2
    num_target_critics: int = 2  # of them, drawn anew for each critic step, whose least value is the target
    layer_norm: bool = True  # in the critics
    discount: float = 0.97
    tau: float = 0.005  # share of the critics that goes into their targets at each critic step
    critic_steps: int = 1  # per update, each on its own part of the batch
    actor_lr: float = 3e-4
    critic_lr: float = 3e-4
    temperature_lr: float = 3e-4
    initial_temperature: float = 0.01
    target_entropy: float | None = None  # None: minus half of the arm's numbers
    backup_entropy: bool = False  # whether later randomness is worth something to the critics
    imitation: float = 0.0  # weight, in the actor's loss, of doing what a human or a script did
    shift_pixels: int = 4  # of the pictures, at most; 0: none
    gripper_penalty: str | None = None  # path in the batch's extras of what is added to the gripper's reward

    def __post_init__(self) -> None:
        if not self.critic_hidden or min(self.critic_hidden) < 1:
            raise AlgorithmError(f"critic_hidden: expected at least one positive number, got {self.critic_hidden}")
        for name in ("num_critics", "critic_steps"):
            if getattr(self, name) < 1:
                raise AlgorithmError(f"{name}: expected at least 1, got {getattr(self, name)}")
        if not 1 <= self.num_target_critics <= self.num_critics:
            most, got = self.num_critics, self.num_target_critics
            raise AlgorithmError(f"num_target_critics: expected from 1 to num_critics ({most}), got {got}")
        if self.shift_pixels < 0:
            raise AlgorithmError(f"shift_pixels: expected 0 or more, got {self.shift_pixels}")
        if not 0.0 <= self.discount < 1.0:
            raise AlgorithmError(f"discount: expected from 0 to less than 1, got {self.discount}")
        if not 0.0 < self.tau <= 1.0:
            raise AlgorithmError(f"tau: expected more than 0 and at most 1, got {self.tau}")
        if self.initial_temperature <= 0.0:
            raise AlgorithmError(f"initial_temperature: expected more than 0, got {self.initial_temperature}")
        if self.gripper_penalty is not None and self.actor.gripper is None:
            raise AlgorithmError("gripper_penalty: expected None for an actor without a gripper; give it a Gripper")


class SAC(saved.Saves):
    """An Algorithm. All weights are made from `seed`, and so is every random number of its updates."""

    def __init__(
        self, config: SACConfig, spec: StepSpec, stats: Stats, *, seed: int, device: str | torch.device = "cpu"
    ):
        self.config = config
        self.spec = spec
        self.num_updates = 0
        self.device = torch.device(device)
        self._use(stats)
        init = torch.Generator().manual_seed(seed)
        weights = self.actor.init(init)
        acting = {name: weight for name, weight in weights.items() if name.startswith("actor/")}
        seeing = {name: weight for name, weight in weights.items() if name.startswith("encoder/")}
        sizes = (self.actor.encoder.size + self.actor.arm_size, *config.critic_hidden, 1)
        judging = {name: weight for name, weight in weights.items() if name.startswith("gripper/")}
        judging |= init_critics(config.num_critics, sizes, init)
        self._actor = Trained(acting, learning_rate=config.actor_lr, device=self.device)
        self._critic = Trained({**seeing, **judging}, learning_rate=config.critic_lr, device=self.device)
        self._target_flat, self._target = flattened(judging, self.device)  # there is one encoder, and it has no target
        log_temperature = torch.tensor(math.log(config.initial_temperature))
        self._temperature = Trained({"log": log_temperature}, learning_rate=config.temperature_lr, device=self.device)
        self._generator = torch.Generator(self.device).manual_seed(int(torch.randint(2**62, (), generator=init)))

    def _use(self, stats: Stats) -> None:
        self.stats = stats
        self.actor = Actor(self.config.actor, self.spec, stats, self.device)
        given = self.config.target_entropy
        self.target_entropy = -0.5 * self.actor.arm_size if given is None else given

    def start_from(self, policy: ActorPolicy) -> None:
        """Begin with another's actor, encoder and statistics, such as a clone's. A gripper's values are not taken over:
        those of a clone are odds, and not returns."""
        if policy.config != self.config.actor:
            raise AlgorithmError(f"actor: expected a policy of {self.config.actor}, got one of {policy.config}")
        policy.check_world(self.spec)
        self._use(policy.stats)
        for name, weight in {**self._critic.frozen, **self._actor.frozen}.items():
            if name.startswith(("actor/", "encoder/")):
                weight.copy_(policy.weights[name])

    # ---- learning

    def update(self, batch: TransitionBatch, *, report: bool = True) -> dict[str, float]:
        """Learn from a batch; see the module's docstring for the stages."""
        steps = self.config.critic_steps
        if len(batch) % steps or not len(batch):
            raise AlgorithmError(f"batch: expected a multiple of critic_steps ({steps}) rows, got {len(batch)}")
        whole = to_minibatch(batch, self.actor, penalty=self.config.gripper_penalty)
        *others, last = (whole.part(number, steps) for number in range(steps))
        for part in others:
            self._critic_step(part, None)
        metrics: dict[str, Tensor] | None = {} if report else None
        features = self._critic_step(last, metrics)
        self._actor_step(last, features, metrics)
        self.num_updates += 1
        return {} if metrics is None else numbers(metrics)

    def _critic_step(self, part: Minibatch, metrics: dict[str, Tensor] | None) -> Tensor:
        """Returns the features of the observations, for the actor."""
        config, encoder = self.config, self.actor.encoder
        features = encoder(self._critic.weights, self._shifted(part.observation))
        arm, choice = self.actor.split(part.action)
        with torch.no_grad():
            next_features = encoder(self._critic.frozen, self._shifted(part.next_observation))
            next_arm, next_log_prob = self._draw(*self.actor.distribution(self._actor.frozen, next_features))
            next_q = self._judge(self._target_critics(), next_features, next_arm)
            temperature = self._temperature.frozen["log"].exp() if config.backup_entropy else None
            target = self._target_of(part, part.reward, losses.pessimistic(next_q, temperature, next_log_prob))
        q = self._judge(self._critic.weights, features, arm)
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
        self._critic.step(loss)
        self._target_flat.lerp_(self._critic.flat[-len(self._target_flat) :], config.tau)
        if metrics is not None:
            metrics["critic_gradient"] = self._critic.gradient_norm()
        return features.detach()

    def _gripper_loss(
        self,
        part: Minibatch,
        features: Tensor,
        next_features: Tensor,
        choice: Tensor,
        metrics: dict[str, Tensor] | None,
    ) -> Tensor:
        """Double Q-learning over the gripper's values, with the arm as a part of the world."""
        with torch.no_grad():
            next_value = losses.double_q(
                self.actor.gripper_values(self._critic.frozen, next_features),
                self.actor.gripper_values(self._target, next_features),
            )
            reward = part.reward if part.penalty is None else part.reward + part.penalty
            target = self._target_of(part, reward, next_value)
        values = self.actor.gripper_values(self._critic.weights, features)
        loss = losses.gripper_loss(values, choice, target, part.weight)
        if metrics is not None:
            agrees = (values.argmax(dim=1) == choice).float().mean()
            metrics |= {"gripper_loss": loss, "gripper_q": values.mean(), "gripper_agreement": agrees}
        return loss

    def _target_of(self, part: Minibatch, reward: Tensor, next_value: Tensor) -> Tensor:
        discount = self.config.discount
        return losses.bellman_target(reward, part.terminated, part.num_steps, next_value, discount=discount)

    def _actor_step(self, part: Minibatch, features: Tensor, metrics: dict[str, Tensor] | None) -> None:
        temperature = self._temperature.frozen["log"].exp()
        mean, log_std = self.actor.distribution(self._actor.weights, features)
        arm, log_prob = self._draw(mean, log_std)
        q = self._judge(self._critic.frozen, features, arm)
        loss = losses.actor_loss(q, log_prob, temperature, part.weight)
        if self.config.imitation:
            shown, _ = self.actor.split(part.action)
            distance = losses.imitation_mse(torch.tanh(mean), shown, part.weight * part.shown)
            loss = loss + self.config.imitation * distance
            if metrics is not None:
                metrics["imitation_mse"] = distance / part.shown.mean().clamp(min=1e-6)
        self._actor.step(loss)
        arm, log_prob = arm.detach(), log_prob.detach()
        log_temperature = self._temperature.weights["log"]
        self._temperature.step(losses.temperature_loss(log_temperature, log_prob, self.target_entropy))
        if metrics is not None:
            metrics |= {
                "actor_loss": loss,
                "actor_gradient": self._actor.gradient_norm(),
                "actor_q": q.mean(),
                "entropy": -log_prob.mean(),
                "saturation": (arm.abs() > 0.99).float().mean(),
                "temperature": temperature,
            }

    def _draw(self, mean: Tensor, log_std: Tensor) -> tuple[Tensor, Tensor]:
        """The arm's numbers [B, arm] from -1 to 1 and their log-prob [B]."""
        noise = torch.randn(mean.shape, generator=self._generator, device=self.device)
        pre_tanh = mean + torch.exp(log_std) * noise
        return torch.tanh(pre_tanh), tanh_normal.log_prob_of_noise(noise, pre_tanh, log_std)

    def _judge(self, weights: Mapping[str, Tensor], features: Tensor, arm: Tensor) -> Tensor:
        x = torch.cat([features, arm], dim=1)
        return critics(weights, x, len(self.config.critic_hidden), layer_norm=self.config.layer_norm)

    def _target_critics(self) -> Mapping[str, Tensor]:
        if self.config.num_target_critics == self.config.num_critics:
            return self._target
        order = torch.randperm(self.config.num_critics, generator=self._generator, device=self.device)
        return subset(self._target, order[: self.config.num_target_critics])

    def _shifted(self, observation: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return shifted(observation, self.actor.encoder.inputs.cameras, self.config.shift_pixels, self._generator)

    # ---- what others need of it

    def policy(self, *, version: int = NO_VERSION) -> ActorPolicy:
        """The policy as it is now; later updates do not change it."""
        all_weights = {**self._critic.frozen, **self._actor.frozen}
        weights = {name: one.clone() for name, one in all_weights.items() if not name.startswith("critic/")}
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
            trained={"critic": self._critic, "actor": self._actor, "temperature": self._temperature},
            tensors={f"target/{name}": weight for name, weight in self._target.items()},
        )

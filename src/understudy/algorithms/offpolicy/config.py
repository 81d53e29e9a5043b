"""The options of SAC, cloning and the success classifier. Importing them does not import torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from understudy.algorithms.algorithm import AlgorithmError
from understudy.policies.config import ActorConfig, ClassifierConfig


@dataclass(frozen=True, kw_only=True)
class SACConfig:
    """The options of SAC; `docs/rlpd.md` says why each has its default."""

    actor: ActorConfig = field(default_factory=ActorConfig)
    """The network of the actor, and its image encoder."""
    critic_hidden: tuple[int, ...] = (256, 256)
    """Number of units of each hidden layer of a critic."""
    num_critics: int = 2
    """Number of critics in the ensemble."""
    num_target_critics: int = 2
    """Number of target critics, drawn anew for each critic step, whose lowest value is the target."""
    layer_norm: bool = True
    """Whether the critics have LayerNorm behind each hidden layer."""
    discount: float = 0.97
    """Discount of the return per environment step, from 0 to less than 1."""
    tau: float = 0.005
    """Share by which the target critics move towards the critics at each critic step, from 0 to 1."""
    critic_steps: int = 1
    """Number of critic steps per update, each on its own part of the batch."""
    actor_lr: float = 3e-4
    """Learning rate of the actor."""
    critic_lr: float = 3e-4
    """Learning rate of the critics and of the image encoder."""
    temperature_lr: float = 3e-4
    """Learning rate of the temperature."""
    initial_temperature: float = 0.01
    """Temperature at the start: the reward that one nat of entropy is worth."""
    target_entropy: float | None = None
    """Entropy of the arm's actions, in nats, that the temperature aims at. None is -0.5 per number of its action, and 0
    where the actor chooses the noise of a base policy."""
    backup_entropy: bool = False
    """Whether the targets of the critics include the entropy of later actions."""
    bc_weight: float = 0.0
    """Weight of the behaviour-cloning loss on human and scripted steps in the actor's loss; with a base policy also on
    the other steps, towards the base action. 0 turns it off."""
    base_action_dropout: float = 0.0
    """Share of the rows in the actor's loss whose base action is hidden from the actor's network, from 0 to less than
    1. It keeps an actor over a base policy from repeating the base action; RLT hides it in half of the rows."""
    shift_pixels: int = 4
    """Largest random shift of the camera images, in pixels. 0 turns augmentation off."""
    gripper_penalty: str | None = None
    """Path in the batch's extras of a penalty that is added to the gripper's reward. None adds nothing."""
    noise_bound: float | None = None
    """Largest absolute value of each number of the noise that the actor chooses for a base policy (DSRL), such as 1.5.
    None chooses actions."""

    def __post_init__(self) -> None:
        if not self.critic_hidden or min(self.critic_hidden) < 1:
            raise AlgorithmError(f"critic_hidden: expected at least one positive number, got {self.critic_hidden}")
        for name in ("num_critics", "critic_steps"):
            if getattr(self, name) < 1:
                raise AlgorithmError(f"{name}: expected at least 1, got {getattr(self, name)}")
        if not 1 <= self.num_target_critics <= self.num_critics:
            most, got = self.num_critics, self.num_target_critics
            raise AlgorithmError(f"num_target_critics: expected from 1 to num_critics ({most}), got {got}")
        for name in ("shift_pixels", "bc_weight"):
            if getattr(self, name) < 0:
                raise AlgorithmError(f"{name}: expected 0 or more, got {getattr(self, name)}")
        if not 0.0 <= self.discount < 1.0:
            raise AlgorithmError(f"discount: expected from 0 to less than 1, got {self.discount}")
        if not 0.0 < self.tau <= 1.0:
            raise AlgorithmError(f"tau: expected more than 0 and at most 1, got {self.tau}")
        if self.initial_temperature <= 0.0:
            raise AlgorithmError(f"initial_temperature: expected more than 0, got {self.initial_temperature}")
        if self.gripper_penalty is not None and self.actor.gripper is None:
            raise AlgorithmError("gripper_penalty: expected None for an actor without a gripper; give it a Gripper")
        if not 0.0 <= self.base_action_dropout < 1.0:
            raise AlgorithmError(f"base_action_dropout: expected from 0 to less than 1, got {self.base_action_dropout}")
        if self.noise_bound is not None:
            self._check_noise_bound(self.noise_bound)
        elif self.base_action_dropout and self.actor.residual_scale is None:
            raise AlgorithmError(
                f"base_action_dropout: has no effect without a base action, got {self.base_action_dropout}; set the "
                f"actor's residual_scale, or leave it at 0"
            )

    def _check_noise_bound(self, bound: float) -> None:
        if not 0.0 < bound < math.inf:
            raise AlgorithmError(f"noise_bound: expected more than 0, got {bound}; 1 to 2.5 are usual")
        for name, given in (
            ("bc_weight", self.bc_weight),
            ("base_action_dropout", self.base_action_dropout),
            ("actor/gripper", self.actor.gripper),
            ("actor/residual_scale", self.actor.residual_scale),
        ):
            if given:
                raise AlgorithmError(
                    f"{name}: has no effect with noise_bound, because the actor chooses noise and no actions, got "
                    f"{given}; leave out one of the two"
                )


@dataclass(frozen=True, kw_only=True)
class CloningConfig:
    """The options of behaviour cloning."""

    actor: ActorConfig = field(default_factory=ActorConfig)
    """The network of the actor, and its image encoder."""
    loss: Literal["mse", "likelihood"] = "mse"
    """Loss: mse is the squared distance of the most likely action; likelihood is minus the log-likelihood of the
    demonstrated one, which also learns a spread."""
    learning_rate: float = 1e-3
    """Learning rate of all weights."""
    shift_pixels: int = 4
    """Largest random shift of the camera images, in pixels. 0 turns augmentation off."""

    def __post_init__(self) -> None:
        if self.loss not in ("mse", "likelihood"):
            raise AlgorithmError(f"loss: expected 'mse' or 'likelihood', got {self.loss!r}")
        if self.shift_pixels < 0:
            raise AlgorithmError(f"shift_pixels: expected 0 or more, got {self.shift_pixels}")


@dataclass(frozen=True, kw_only=True)
class ClassifierTrainingConfig:
    """The options of training a success classifier."""

    classifier: ClassifierConfig = field(default_factory=ClassifierConfig)
    """The network of the success classifier, and its image encoder."""
    learning_rate: float = 3e-4
    """Learning rate of all weights."""
    balance: bool = True
    """Whether the successes and the failures of a batch weigh the same in total, whatever their numbers."""
    shift_pixels: int = 4
    """Largest random shift of the camera images, in pixels. 0 turns augmentation off."""

    def __post_init__(self) -> None:
        if self.shift_pixels < 0:
            raise AlgorithmError(f"shift_pixels: expected 0 or more, got {self.shift_pixels}")

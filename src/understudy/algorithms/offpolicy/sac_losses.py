"""Losses of SAC, cloning and the classifier: pure functions of tensors, in any float dtype.

B rows, E critics, K values of a gripper. Each row's loss is multiplied by its weight, and the mean is taken over rows.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def bellman_target(
    reward: Tensor, terminated: Tensor, num_steps: Tensor, next_value: Tensor, *, discount: float
) -> Tensor:
    """[B]: reward + discount^num_steps * next_value, without the second term where the task ended.

    There is no `truncated` here, on purpose: after a time limit the value of the next state still counts.
    """
    return reward + discount**num_steps * (1.0 - terminated) * next_value


def pessimistic(next_q: Tensor, temperature: Tensor | None, log_prob: Tensor) -> Tensor:
    """[B]: the lowest of the critics [E, B]; with a temperature, plus the policy's entropy there."""
    lowest = next_q.amin(dim=0)
    return lowest if temperature is None else lowest - temperature * log_prob


def critic_loss(q: Tensor, target: Tensor, weight: Tensor) -> Tensor:
    """Mean over critics [E, B] of the squared distance from the target [B], or from one of each critic [E, B]."""
    return (weight * (q - target).square().mean(dim=0)).mean()


def actor_loss(q: Tensor, log_prob: Tensor, temperature: Tensor, weight: Tensor) -> Tensor:
    """Minus the mean of the critics [E, B], plus the temperature times the log-prob."""
    return (weight * (temperature * log_prob - q.mean(dim=0))).mean()


def temperature_loss(log_temperature: Tensor, log_prob: Tensor, target_entropy: float) -> Tensor:
    """Lowers the temperature while the entropy is above the target, and raises it while it is below."""
    return torch.exp(log_temperature) * (-log_prob - target_entropy).mean()


def double_q(next_values: Tensor, next_values_target: Tensor) -> Tensor:
    """[B]: the target network's value of the choice that the online network [B, K] rates best."""
    return next_values_target.gather(1, next_values.argmax(dim=1, keepdim=True)).squeeze(1)


def gripper_loss(values: Tensor, choice: Tensor, target: Tensor, weight: Tensor) -> Tensor:
    """Squared distance between the value [B, K] of the executed choice [B] and its target [B]."""
    return (weight * (values.gather(1, choice[:, None]).squeeze(1) - target).square()).mean()


def bc_mse(action: Tensor, demonstrated: Tensor, weight: Tensor) -> Tensor:
    """Squared distance of actions [B, D] from -1 to 1, averaged over their numbers."""
    return (weight * (action - demonstrated).square().mean(dim=1)).mean()


def bc_likelihood(log_prob: Tensor, weight: Tensor) -> Tensor:
    """Minus the log-likelihood [B] of what was demonstrated."""
    return -(weight * log_prob).mean()


def choice_loss(values: Tensor, choice: Tensor, weight: Tensor) -> Tensor:
    """Cross-entropy of the gripper's values [B, K], read as logits, with what was demonstrated [B]."""
    return (weight * functional.cross_entropy(values, choice, reduction="none")).mean()


def success_loss(logits: Tensor, label: Tensor, weight: Tensor) -> Tensor:
    """Binary cross-entropy of log-odds [B] with labels [B] of 0 and 1."""
    return (weight * functional.binary_cross_entropy_with_logits(logits, label, reduction="none")).mean()


def balancing_weight(label: Tensor) -> Tensor:
    """[B]: weights of mean 1 with which successes and failures weigh the same in total, if both occur."""
    positive = label.sum()
    negative = len(label) - positive
    both = ((positive > 0) & (negative > 0)).to(label.dtype)
    share = label / positive.clamp(min=1) + (1 - label) / negative.clamp(min=1)
    return both * share * (0.5 * len(label)) + (1 - both)

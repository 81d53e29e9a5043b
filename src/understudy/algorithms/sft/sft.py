"""SFT: supervised fine-tuning of a VLA that decides on blocks of action tokens, from demonstrations.

A demonstrated number lies between two bins. Its target is a normal distribution over the bins around it, so that the
network learns that neighbouring bins are close: ten demonstrations of a task are too few to learn exact bins.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from understudy.algorithms.algorithm import AlgorithmError
from understudy.algorithms.offpolicy.augment import shifted
from understudy.algorithms.offpolicy.transitions import numbers
from understudy.algorithms.optimizers import AdamW, init_moments
from understudy.algorithms.sft.blocks import Blocks
from understudy.algorithms.sft.config import SFTUpdateConfig
from understudy.algorithms.state_dict import Resumable, StateParts
from understudy.core import NO_VERSION, SpecError, Tree
from understudy.core import tree as trees
from understudy.policies.inputs import to_tensor
from understudy.policies.stats import Stats
from understudy.policies.vla import VLAConfig, VLAPolicy
from understudy.policies.vla.bins import to_position
from understudy.policies.vla.model import image

KIND = "sft"


# ---- pure functions


def soft_targets(position: Tensor, num_bins: int, sigma: float) -> Tensor:
    """[..., K]: a normal around each position [...] from 0 to K - 1, cut at the ends; sigma 0 is the nearest bin."""
    if sigma == 0:
        return torch.nn.functional.one_hot(position.round().long(), num_bins).to(position.dtype)
    distance = torch.arange(num_bins, device=position.device, dtype=position.dtype) - position[..., None]
    return torch.softmax(-0.5 * (distance / sigma).square(), dim=-1)


def soft_cross_entropy(logits: Tensor, targets: Tensor, weight: Tensor) -> Tensor:
    """Of logits with targets, both [B, H, A, K]: the mean over all numbers of the actions that weigh [B, H]."""
    each = -(targets * torch.log_softmax(logits, dim=-1)).sum(dim=-1).mean(dim=-1)
    return weighted_mean(each, weight)


def weighted_mean(each: Tensor, weight: Tensor) -> Tensor:
    """Mean of numbers [B, H] with weights [B, H]; 0 if all weights are 0."""
    return (weight * each).sum() / weight.sum().clamp(min=1e-6)


def cosine(number: int, *, total: int, warmup: int, min_ratio: float) -> float:
    """Learning rate of update `number` (from 0) of `total` over the highest: linear warm-up, then a cosine."""
    if number < warmup:
        return (number + 1) / warmup
    way = min(1.0, (number - warmup) / max(1, total - warmup))
    return min_ratio + (1.0 - min_ratio) * 0.5 * (1.0 + math.cos(math.pi * way))


# ---- the algorithm


@dataclass(frozen=True, kw_only=True)
class _Settings:
    """Everything that must be equal between a saved state and the run that resumes it."""

    update: SFTUpdateConfig
    vla: VLAConfig
    words: tuple[str, ...]
    total_updates: int


class SFT(Resumable):
    """An update rule over blocks. It trains the given policy in place."""

    def __init__(self, config: SFTUpdateConfig, policy: VLAPolicy, *, total_updates: int, seed: int):
        """The learning rate falls over `total_updates`."""
        if total_updates < 1:
            raise AlgorithmError(f"total_updates: expected a number from 1, got {total_updates}")
        self.config = config
        self.total_updates = total_updates
        self.num_updates = 0
        self.device = policy.device
        self._policy = policy
        policy.model.checkpoint_gradients(config.checkpoint_gradients)
        self._named = {name.replace(".", "/"): weight for name, weight in policy.model.named_parameters()}
        matrices = [weight for weight in self._named.values() if weight.ndim > 1]
        others = [weight for weight in self._named.values() if weight.ndim <= 1]
        groups: list[dict[str, Any]] = [{"params": matrices}, {"params": others, "weight_decay": 0.0}]
        self._adam = AdamW(groups, config.learning_rate, weight_decay=config.weight_decay, fused=True)
        init_moments(self._adam)
        self._generator = torch.Generator(self.device).manual_seed(seed)

    def update(self, batch: Blocks, *, report: bool = True) -> dict[str, float]:
        """One step towards the batch's actions."""
        policy, config = self._policy, self.config
        tensors = policy.tensors(batch.observation, batch.instruction)
        cameras = [image(camera) for camera in policy.inputs.cameras]
        tensors = shifted(tensors, cameras, config.shift_pixels, self._generator)
        unit, weight = self._demonstrated(batch)
        num_bins = policy.config.num_bins
        position = to_position(unit, num_bins)
        logits, _ = policy.model(tensors)
        loss = soft_cross_entropy(logits, soft_targets(position, num_bins, config.sigma), weight)
        scale = cosine(
            self.num_updates, total=self.total_updates, warmup=config.warmup_updates, min_ratio=config.min_lr_ratio
        )
        for group in self._adam.param_groups:
            group["lr"] = config.learning_rate * scale
        self._adam.zero_grad()
        torch.autograd.backward(loss)
        most = math.inf if config.clip_norm is None else config.clip_norm
        trained = [weight for weight in self._named.values() if weight.grad is not None]  # not the value head
        gradient = torch.nn.utils.clip_grad_norm_(trained, most)
        self._adam.step()
        self.num_updates += 1
        if not report:
            return {}
        away = (logits.detach().argmax(dim=-1) - position).abs()
        log_probs = torch.log_softmax(logits.detach(), dim=-1)
        entropy = -(log_probs.exp() * log_probs).sum(dim=-1)
        return {
            **numbers(
                {
                    "loss": loss,
                    "gradient": gradient,
                    "error": weighted_mean(away.mean(dim=-1), weight) * (2.0 / (num_bins - 1)),
                    "entropy": weighted_mean(entropy.mean(dim=-1), weight),
                }
            ),
            "learning_rate": config.learning_rate * scale,
        }

    def policy(self, *, version: int = NO_VERSION) -> VLAPolicy:
        """The policy as it is now; later updates do not change it."""
        return self._policy.with_parameters(self._policy.parameters(), version=version)

    def parameters(self) -> Tree:
        return self._policy.parameters()

    def description(self) -> dict[str, Any]:
        return self._policy.description()

    def _demonstrated(self, batch: Blocks) -> tuple[Tensor, Tensor]:
        """Actions [B, H, A] from -1 to 1 and their weights [B, H]."""
        policy = self._policy
        shape = (len(batch.instruction), policy.block_steps)
        if batch.weight.shape != shape:
            raise SpecError(
                f"weight: expected {list(shape)}, one number an action, got {list(batch.weight.shape)}; "
                f"draw blocks of {policy.block_steps} steps"
            )
        rows = trees.map_leaves(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), batch.action)
        unit = policy.actions.to_unit(rows, self.device).view(*shape, -1)
        return unit, to_tensor(batch.weight, self.device)

    # ---- state

    def _set_stats(self, stats: Stats) -> None:
        policy = self._policy
        self._policy = VLAPolicy(
            policy.config, policy.spec, policy.words, stats, policy.model, version=policy.version, device=policy.device
        )

    def _state_parts(self) -> StateParts:
        policy = self._policy
        settings = _Settings(
            update=self.config, vla=policy.config, words=policy.words.known, total_updates=self.total_updates
        )
        return StateParts(
            kind=KIND,
            config=settings,
            spec=policy.spec,
            stats=policy.stats,
            generator=self._generator,
            modules={"policy": policy.model},
            optimizers={"policy": self._adam},
        )

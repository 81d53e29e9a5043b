"""SFT: supervised fine-tuning of a policy that decides on blocks of actions, from demonstrations.

The loss is the policy's own (`ImitationPolicy`): here are its optimizer, its schedule and its state.
"""

from __future__ import annotations

import math
from dataclasses import asdict, fields
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
from understudy.policies.imitation import ImitationPolicy
from understudy.policies.stats import Stats
from understudy.policies.transfer import to_tensor

KIND = "sft"
LOSS_OPTIONS = ("sigma", "advantage_dropout")  # of SFTUpdateConfig, that only some policies' losses have


# ---- pure functions


def cosine(number: int, *, total: int, warmup: int, min_ratio: float) -> float:
    """Learning rate of update `number` (from 0) of `total` over the highest: linear warm-up, then a cosine."""
    if number < warmup:
        return (number + 1) / warmup
    way = min(1.0, (number - warmup) / max(1, total - warmup))
    return min_ratio + (1.0 - min_ratio) * 0.5 * (1.0 + math.cos(math.pi * way))


# ---- the algorithm


class SFT(Resumable):
    """An update rule over blocks. It trains the given policy in place."""

    def __init__(self, config: SFTUpdateConfig, policy: ImitationPolicy, *, total_updates: int, seed: int):
        """The learning rate falls over `total_updates`."""
        if total_updates < 1:
            raise AlgorithmError(f"total_updates: expected a number from 1, got {total_updates}")
        _check(config, policy)
        self.config = config
        self.total_updates = total_updates
        self.num_updates = 0
        self.device = policy.device
        self._policy = policy
        model: Any = policy.model
        if hasattr(model, "checkpoint_gradients"):
            model.checkpoint_gradients(config.checkpoint_gradients)
        self._loss_options = {name: getattr(config, name) for name in policy.imitation_options}
        self._named = {
            name.replace(".", "/"): weight for name, weight in policy.model.named_parameters() if weight.requires_grad
        }
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
        tensors = shifted(tensors, policy.image_names, config.shift_pixels, self._generator)
        unit, weight = self._demonstrated(batch)
        options = dict(self._loss_options)
        if batch.good is not None:
            options["good"] = to_tensor(batch.good, self.device)
        found = policy.imitation_loss(tensors, unit, weight, generator=self._generator, **options)
        reported = found.report() if report else {}
        scale = cosine(
            self.num_updates, total=self.total_updates, warmup=config.warmup_updates, min_ratio=config.min_lr_ratio
        )
        for group in self._adam.param_groups:
            group["lr"] = config.learning_rate * scale
        self._adam.zero_grad()
        torch.autograd.backward(found.loss)
        most = math.inf if config.clip_norm is None else config.clip_norm
        trained = [weight for weight in self._named.values() if weight.grad is not None]  # not the value head
        gradient = torch.nn.utils.clip_grad_norm_(trained, most)
        self._adam.step()
        self.num_updates += 1
        if not report:
            return {}
        return {
            **numbers({"loss": found.loss, "gradient": gradient, **reported}),
            "learning_rate": config.learning_rate * scale,
        }

    def policy(self, *, version: int = NO_VERSION) -> ImitationPolicy:
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
        self._policy = self._policy.with_stats(stats)

    def _state_parts(self) -> StateParts:
        policy = self._policy
        description = policy.description()
        update = asdict(self.config)
        if "advantage_dropout" not in policy.imitation_options:
            del update["advantage_dropout"]  # states are older than this option
        settings = {  # everything that must be equal between a saved state and the run that resumes it
            "update": update,
            "total_updates": self.total_updates,
            str(description["kind"]): description["config"],
            **({"words": description["words"]} if "words" in description else {}),
        }
        return StateParts(
            kind=KIND,
            config=settings,
            spec=policy.spec,
            stats=policy.stats,
            generator=self._generator,
            modules={"policy": policy.model},
            optimizers={"policy": self._adam},
            encoder_digest=description.get("encoder_digest"),
        )


def _check(config: SFTUpdateConfig, policy: ImitationPolicy) -> None:
    """Refuse a policy that cannot imitate, and options that would have no effect on this one."""
    if not hasattr(policy, "imitation_loss"):
        raise AlgorithmError(
            f"policy: expected one that can imitate, got {type(policy).__name__}, which has no imitation_loss; "
            f"see ImitationPolicy"
        )
    default = {field.name: field.default for field in fields(config)}
    without = [name for name in LOSS_OPTIONS if name not in policy.imitation_options]
    if not policy.image_names:
        without.append("shift_pixels")
    if not hasattr(policy.model, "checkpoint_gradients"):
        without.append("checkpoint_gradients")
    for name in without:
        if getattr(config, name) != default[name]:
            raise AlgorithmError(
                f"sft.{name}: has no effect on this {type(policy).__name__}; leave it out, or train another policy"
            )

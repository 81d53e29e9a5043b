"""TransitionTensors: a TransitionBatch as tensors on the device, for SAC's losses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from understudy.algorithms.algorithm import AlgorithmError
from understudy.core import Source, TransitionBatch
from understudy.core import tree as trees
from understudy.core.spec import describe
from understudy.policies.rlpd.actor import Actor
from understudy.policies.transfer import to_tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class TransitionTensors:
    """B transitions in the form that the losses take."""

    observation: Mapping[str, Tensor]
    action: Tensor  # [B, D] from -1 to 1
    reward: Tensor  # [B]
    next_observation: Mapping[str, Tensor]
    terminated: Tensor  # [B] 0 or 1
    num_steps: Tensor  # [B]
    weight: Tensor  # [B]
    demonstrated: Tensor  # [B] 0 or 1: chosen by a human or a script
    penalty: Tensor | None  # [B], of the gripper

    def part(self, number: int, of: int) -> TransitionTensors:
        """Every `of`-th row from row `number` on, so that each part has the mixture's shares."""
        if of == 1:
            return self
        rows = slice(number, None, of)
        return TransitionTensors(
            observation={path: tensor[rows] for path, tensor in self.observation.items()},
            action=self.action[rows],
            reward=self.reward[rows],
            next_observation={path: tensor[rows] for path, tensor in self.next_observation.items()},
            terminated=self.terminated[rows],
            num_steps=self.num_steps[rows],
            weight=self.weight[rows],
            demonstrated=self.demonstrated[rows],
            penalty=None if self.penalty is None else self.penalty[rows],
        )


def to_tensors(batch: TransitionBatch, actor: Actor, *, penalty: str | None = None) -> TransitionTensors:
    """The batch on the actor's device; `penalty` is a path in its extras."""
    inputs, device = actor.encoder.inputs, actor.device
    if batch.reward.ndim != 1:
        raise AlgorithmError(f"reward: expected one number a step, got {describe(batch.reward)}; sum it before append")

    def floats(array: np.ndarray[tuple[int], np.dtype[np.generic]]) -> Tensor:
        return to_tensor(array.astype(np.float32, copy=False), device)

    found = None
    if penalty is not None:
        extras = trees.flatten(batch.extras)
        if penalty not in extras:
            raise AlgorithmError(
                f"extras/{penalty}: expected the gripper's penalty, got {', '.join(extras) or 'no extras'}; "
                f"record it with each step, or set gripper_penalty to None"
            )
        found = floats(extras[penalty])
    return TransitionTensors(
        observation=inputs.tensors(batch.observation, device),
        action=actor.actions.to_unit(batch.action, device),
        reward=floats(batch.reward),
        next_observation=inputs.tensors(batch.next_observation, device),
        terminated=floats(batch.terminated),
        num_steps=floats(batch.num_steps),
        weight=floats(batch.weight),
        demonstrated=floats((batch.source == Source.HUMAN) | (batch.source == Source.SCRIPT)),
        penalty=found,
    )


def numbers(metrics: Mapping[str, Tensor]) -> dict[str, float]:
    """All metrics in one transfer."""
    values = torch.stack([metric.detach().float() for metric in metrics.values()]).tolist()
    return dict(zip(metrics, values, strict=True))

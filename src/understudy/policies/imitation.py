"""ImitationPolicy: a block policy that supervised fine-tuning can train, with a loss of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from understudy.core import StepSpec, Tree
from understudy.policies.protocol import BlockPolicy
from understudy.policies.stats import Stats


@dataclass(frozen=True, kw_only=True, eq=False)
class ImitationLoss:
    """How far a policy is from demonstrations."""

    loss: Tensor  # [], differentiable
    report: Callable[[], dict[str, Tensor]]  # further metrics, [] each; called before the weights change


class ImitationPolicy(BlockPolicy, Protocol):
    """A block policy whose model supervised fine-tuning trains in place."""

    model: nn.Module
    actions: Any  # an `Actions`
    imitation_options: tuple[str, ...]  # of SFTUpdateConfig, that `imitation_loss` takes as keywords

    @property
    def device(self) -> torch.device: ...
    @property
    def spec(self) -> StepSpec: ...
    @property
    def stats(self) -> Stats: ...
    @property
    def image_names(self) -> tuple[str, ...]:
        """Which of its tensors are camera images, uint8 [B, H, W, C]."""
        ...

    def tensors(self, observation: Tree, instructions: Sequence[str]) -> dict[str, Tensor]:
        """The model's inputs for a batch of observations."""
        ...

    def imitation_loss(
        self, tensors: Mapping[str, Tensor], action: Tensor, weight: Tensor, *, generator: torch.Generator
    ) -> ImitationLoss:
        """Of demonstrated blocks: actions [B, H, A] from -1 to 1 with weights [B, H]; tensors as `tensors` gives.

        A policy that can be told which blocks are good also takes `good`, bool [B].
        """
        ...

    def with_stats(self, stats: Stats) -> ImitationPolicy:
        """The policy with other statistics of its inputs. It has the same model: use only one of the two."""
        ...

    def with_parameters(self, parameters: Tree, *, version: int) -> ImitationPolicy: ...
    def parameters(self) -> Tree: ...
    def description(self) -> dict[str, Any]: ...


def weighted_mean(each: Tensor, weight: Tensor) -> Tensor:
    """Mean of numbers [B, H] with weights [B, H]; 0 if all weights are 0."""
    return (weight * each).sum() / weight.sum().clamp(min=1e-6)

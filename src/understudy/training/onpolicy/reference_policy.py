"""Reference policy: the one that a run started from, which the KL divergence is measured from.

| trained | reference | memory |
|---|---|---|
| an adapter (LoRA) | the trained network with its adapter switched off | none |
| the whole network, with FSDP | a frozen network, sharded and offloaded as the trained one | a shard |
| the whole network, without | a frozen network | a whole one on each device |

It computes in the precision of the engine, so that the KL divergence is 0 until something is learned.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import torch
from torch import Tensor

from understudy.training.distributed.config import EngineConfig
from understudy.training.distributed.module_blocks import find_blocks
from understudy.training.distributed.ranks import Ranks
from understudy.training.distributed.single_process import SingleProcess
from understudy.training.onpolicy.trainable_policy import TrainablePolicy


class ReferencePolicy(Protocol):
    """A policy that is what it was when the run started, within `evaluating`."""

    def evaluating(self) -> AbstractContextManager[TrainablePolicy]: ...


class AdapterOff:
    """The trained policy without its adapter. Make it before anything is trained."""

    def __init__(self, policy: TrainablePolicy):
        from understudy.policies.lora import trained_whole  # only now: it needs peft

        self._policy = policy
        # Small heads that are trained beside the adapter; a scale head has a part in log-probs.
        self._heads = [(head, head.detach().clone()) for head in trained_whole(policy.model)]

    @contextmanager
    def evaluating(self) -> Iterator[TrainablePolicy]:
        from understudy.policies.lora import adapter_off

        with adapter_off(self._policy.model):
            self._swap()
            try:
                yield self._policy
            finally:
                self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        """Exchange the heads with those of the start."""
        for head, other in self._heads:
            kept: Tensor = head.detach().clone()
            head.copy_(other)
            other.copy_(kept)


class Frozen:
    """A policy of its own, which nobody trains."""

    def __init__(self, policy: TrainablePolicy, config: EngineConfig, ranks: Ranks):
        policy.model.requires_grad_(False)
        self._policy = policy
        wrapped = SingleProcess(policy.model, ranks, config.precision)
        if config.parallel == "fsdp":
            from understudy.training.distributed.fsdp import FSDPSharded

            blocks = find_blocks(policy.model, config.blocks)
            wrapped = FSDPSharded(
                policy.model, ranks, config.precision, blocks=blocks, offload=config.offload_parameters
            )
        policy.forward = wrapped.forward

    def evaluating(self) -> AbstractContextManager[TrainablePolicy]:
        return nullcontext(self._policy)

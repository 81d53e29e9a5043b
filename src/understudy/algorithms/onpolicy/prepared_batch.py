"""PreparedBatch: a batch of blocks with its advantages, in numpy. LossInputs: rows of it as tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from understudy.algorithms.algorithm import AlgorithmError
from understudy.algorithms.onpolicy.minibatches import MiniBatch
from understudy.core import BlockBatch

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, kw_only=True, eq=False)
class PreparedBatch:
    """A batch of N blocks with everything that the loss needs."""

    advantage: Array  # [N] float32
    returns: Array | None  # [N] float32: what the values should have been, with gae
    old_value: Array | None  # [N] float32, as recorded, with gae
    old_log_prob: Array  # [N, H, D] float32, that ratios begin from: as recorded, or as the learner computed them again
    importance: Array | None  # [N, H, D] float32: weights for the difference of these from the recorded ones
    reference_log_prob: Array | None  # [N, H, D] float32, where the loss needs it
    kl_coef: float  # the cost of KL divergence in this batch
    metrics: dict[str, float]

    def __len__(self) -> int:
        return len(self.advantage)


@dataclass(frozen=True, kw_only=True, eq=False)
class LossInputs:
    """What the loss needs of B blocks, besides the policy's evaluation of them, as tensors."""

    old_log_prob: Tensor  # [B, H, D]
    importance: Tensor | None  # [B, H, D]
    reference_log_prob: Tensor | None  # [B, H, D]
    advantage: Tensor  # [B]
    returns: Tensor | None  # [B]
    old_value: Tensor | None  # [B]
    weight: Tensor  # [B, H]
    value_weight: Tensor  # [B]
    kl_coef: float


def loss_inputs(prepared: PreparedBatch, part: MiniBatch, device: str | torch.device = "cpu") -> LossInputs:
    """The rows of a mini batch, or of a part of one, on the device; padding weighs 0."""

    def at(array: Array) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array[part.rows], np.float32)).to(device)

    def at_or_none(array: Array | None) -> Tensor | None:
        return None if array is None else at(array)

    return LossInputs(
        old_log_prob=at(prepared.old_log_prob),
        importance=at_or_none(prepared.importance),
        reference_log_prob=at_or_none(prepared.reference_log_prob),
        advantage=at(prepared.advantage),
        returns=at_or_none(prepared.returns),
        old_value=at_or_none(prepared.old_value),
        weight=torch.from_numpy(part.weight).to(device),
        value_weight=torch.from_numpy(part.value_weight).to(device),
        kl_coef=prepared.kl_coef,
    )


def check_blocks(batch: BlockBatch) -> None:
    """Refuse blocks that make no mini batches."""
    if not len(batch):
        raise AlgorithmError("batch: expected at least one block, got none; collect before you learn")
    known = (batch.episode >= 0) & (batch.episode < len(batch.group))  # an episode without steps has no blocks
    if not known.all() or (np.diff(batch.episode) < 0).any():
        raise AlgorithmError(
            f"episode: expected 0 to {len(batch.group) - 1} in order, one after another; sort the blocks by episode"
        )
    if not batch.executed.any(axis=1).all():
        row = int(np.argmin(batch.executed.any(axis=1)))
        raise AlgorithmError(f"executed: nothing of block {row} was executed; leave such blocks out of the batch")


def check(
    batch: BlockBatch,
    reference_log_prob: Array | None,
    log_prob: Array | None,
    *,
    needs_value: bool,
    needs_reference: bool,
) -> None:
    """Refuse a batch that cannot be learned from, before anything is computed."""
    check_blocks(batch)
    if needs_value and (batch.value is None or batch.next_value is None):
        raise AlgorithmError(
            "value: adv_estimator 'gae' needs a policy with a value head, got no values; "
            "give the policy a value head, or take 'grpo', 'rloo' or 'reinforce_plus_plus'"
        )
    if needs_reference and reference_log_prob is None:
        raise AlgorithmError(
            "reference_log_prob: kl_in needs it, got none; "
            "evaluate the blocks with a reference policy, or set kl_in to 'none'"
        )
    recorded = {"log_prob": batch.log_prob, "reward": batch.reward[..., None]}
    for name, given in (("reference_log_prob", reference_log_prob), ("recomputed log_prob", log_prob)):
        if given is None:
            continue
        if given.shape != batch.log_prob.shape:
            wanted, got = list(batch.log_prob.shape), list(given.shape)
            raise AlgorithmError(f"{name}: expected shape {wanted}, got {got}; evaluate it on the same blocks")
        recorded[name] = given
    for name, found in recorded.items():
        bad = ~np.isfinite(found).all(axis=2) & batch.executed
        if bad.any():
            row, step = (int(one[0]) for one in np.nonzero(bad))
            raise AlgorithmError(f"{name}: not finite at block {row}, step {step}, which was executed; find out why")

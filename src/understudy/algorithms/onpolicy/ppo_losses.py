"""PPO's losses: pure functions of tensors, in any float dtype. B rows (blocks), H actions, D log-probs of an action.

A loss is a weighted *sum*. The weights are made for a whole mini batch, so that the sums of its parts, however it was
cut into micro batches and ranks, add up to the loss of the whole. What weighs 0 (steps behind the end, padding) has no
influence, whatever stands there. Metrics are sums too, in float64, which the caller adds up.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from understudy.algorithms.onpolicy.config import Aggregation

Array = np.ndarray[Any, Any]

MAX_LOG_RATIO = 20.0  # beyond it exp() over- or underflows; there is no gradient there


def weights(executed: Array, episode_steps: Array, num_log_probs: int, mode: Aggregation) -> Array:
    """float32 [M, H]: what each log-prob of a step weighs in the loss of a mini batch of M blocks.

    executed [M, H]; episode_steps [M] is how many steps the whole episode of each block has; num_log_probs is D.
    Each executed step counts as the part 1/episode_steps of an episode, so that a mini batch holds a number of episodes
    also where blocks are shuffled and it has only some of each.

    token-mean    every log-prob weighs the same; the mean over them
    episode-mean  every episode weighs the same; the mean over episodes of the mean over its log-probs
    episode-sum   the mean over episodes of the sum over its log-probs: all weigh the same, and long episodes more
    """
    share = executed / episode_steps.astype(np.float64)[:, None]
    if mode == "token-mean":
        found = executed / (num_log_probs * executed.sum(dtype=np.float64))
    elif mode == "episode-mean":
        found = share / (num_log_probs * share.sum())
    else:
        found = executed / share.sum()
    return np.asarray(found, np.float32)


def weighted_sum(terms: Tensor, weight: Tensor) -> Tensor:
    """[]: the sum of weight [B, H] * terms [B, H, D]; where the weight is 0, a term may be anything, even nan."""
    return (weight[..., None] * counting(terms, weight)).sum()


def policy_loss(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantage: Tensor,
    weight: Tensor,
    *,
    clip_ratio_low: float,
    clip_ratio_high: float,
    clip_ratio_c: float | None,
    importance: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The clipped surrogate of log-probs [B, H, D] with advantages [B] and weights [B, H], and its metrics.

    ratio = exp(log_prob - old_log_prob);  term = max(-A ratio, -A clip(ratio, 1 - low, 1 + high))
    With a dual clip a term is at most -A c where A is negative. Terms are multiplied by `importance` [B, H, D], if any.
    """
    log_ratio = counting(log_prob - old_log_prob, weight).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = log_ratio.exp()
    gain = advantage[:, None, None]
    low, high = 1.0 - clip_ratio_low, 1.0 + clip_ratio_high
    terms = torch.maximum(-gain * ratio, -gain * ratio.clamp(low, high))
    if clip_ratio_c is not None:
        terms = torch.where(gain < 0, torch.minimum(terms, -gain * clip_ratio_c), terms)
    if importance is not None:
        terms = terms * importance
    loss = weighted_sum(terms, weight)
    with torch.no_grad():
        counts = (weight > 0)[..., None].expand_as(ratio)
        metrics = {
            "policy_loss": total(loss),
            "log_probs": total(counts),
            "ratio": total(ratio * counts),
            "ratio_spread": total((ratio - 1).square() * counts),
            "approx_kl": total((torch.expm1(log_ratio) - log_ratio) * counts),
            "clip_low": total(counts & (gain < 0) & (ratio < low)),
            "clip_high": total(counts & (gain > 0) & (ratio > high)),
        }
        if clip_ratio_c is not None:
            metrics["clip_dual"] = total(counts & (gain < 0) & (ratio > clip_ratio_c))
    return loss, metrics


def value_loss(
    value: Tensor, returns: Tensor, old_value: Tensor, weight: Tensor, *, clip: float | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """The squared distance of values [B] from returns [B], and its metrics. With `clip`, the worse of this and that of
    a value which moved at most so far from where it was recorded: no gradient for having moved further."""
    value = torch.where(weight > 0, value, torch.zeros_like(value))
    squares = (value - returns).square()
    metrics = {}
    if clip is not None:
        near = old_value + (value - old_value).clamp(-clip, clip)
        clipped = (near - returns).square()
        metrics["value_clip_fraction"] = total((clipped > squares) & (weight > 0))
        squares = torch.maximum(squares, clipped)
    loss = (weight * squares).sum()
    return loss, {"value_loss": total(loss), "blocks": total(weight > 0), **metrics}


def total(values: Tensor) -> Tensor:
    """[]: their sum in float64, without a gradient."""
    return values.detach().sum(dtype=torch.float64)


def counting(terms: Tensor, weight: Tensor) -> Tensor:
    """The terms [B, H, D], and 0 where they weigh nothing: what is not finite there goes no further, either way."""
    return torch.where((weight > 0)[..., None], terms, torch.zeros_like(terms))

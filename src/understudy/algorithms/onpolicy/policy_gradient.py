"""Policy gradient: GRPO, RLOO, REINFORCE++ and PPO, which differ in the advantage and in little else.

    mini_batches = algorithm.mini_batches(batch, seed=iteration)         # the same on every rank
    prepared = algorithm.prepare(batch, reference_log_prob=None)         # once per batch, the same on every rank
    for mini_batch in mini_batches:                                      # one step of the optimizer each
        for part in algorithm.micro_batches(mini_batch, rank=rank, world_size=world_size):
            evaluated = policy.evaluate(... of batch at part.rows ...)
            loss, sums = algorithm.loss(evaluated, loss_inputs(prepared, part, device))
            loss.backward()                                              # add up gradients and sums, also over ranks
    metrics = {**prepared.metrics, **algorithm.finish_metrics(sums)}

It knows no store, no world and no engine. `docs/ppo.md` has the equations, and explains each option and each metric.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from understudy.algorithms.algorithm import AlgorithmError
from understudy.algorithms.onpolicy import advantages, kl, minibatches
from understudy.algorithms.onpolicy import ppo_losses as ppo
from understudy.algorithms.onpolicy.config import PolicyGradientConfig
from understudy.algorithms.onpolicy.minibatches import MiniBatch
from understudy.algorithms.onpolicy.prepared_batch import LossInputs, PreparedBatch, check, check_blocks, loss_inputs
from understudy.core import BlockBatch
from understudy.policies.protocol import Evaluated

__all__ = ["LossInputs", "MiniBatch", "PolicyGradient", "PolicyGradientConfig", "PreparedBatch", "loss_inputs"]

Array = np.ndarray[Any, Any]

PER_LOG_PROB = ("ratio", "ratio_spread", "approx_kl", "clip_low", "clip_high", "clip_dual", "entropy")
PER_MINI_BATCH = ("loss", "policy_loss", "value_loss", "kl_loss")


class PolicyGradient:
    """See the module's docstring for the order of calls. Its only state is the cost of KL divergence."""

    def __init__(self, config: PolicyGradientConfig):
        self.config = config
        self._kl: kl.FixedKL | kl.AdaptiveKL
        if config.kl_controller == "adaptive":
            self._kl = kl.AdaptiveKL(coef=config.kl_coef, target=config.kl_target, horizon=config.kl_horizon)
        else:
            self._kl = kl.FixedKL(coef=config.kl_coef)

    @property
    def needs_reference(self) -> bool:
        """Whether `prepare` wants the log-probs of a reference policy."""
        return self.config.kl_in != "none"

    @property
    def needs_value(self) -> bool:
        """Whether the policy must have a value head."""
        return self.config.adv_estimator == "gae"

    def recomputes(self, precision: str) -> bool:
        """Whether `prepare` wants the log-probs of the batch as a learner of this precision computes them."""
        return self.config.recomputes(precision)

    # ---- once per batch

    def prepare(
        self, batch: BlockBatch, *, reference_log_prob: Array | None = None, log_prob: Array | None = None
    ) -> PreparedBatch:
        """Advantages of a whole batch, in numpy. An adaptive KL controller then sets the cost for the next batch.

        `log_prob` are the log-probs of the batch as the learner computes them. Ratios then begin from these, and
        importance weights account for their difference from those of the sampler, which the batch holds.
        """
        check(batch, reference_log_prob, log_prob, needs_value=self.needs_value, needs_reference=self.needs_reference)
        steps = batch.executed.sum(axis=1)  # [N]
        reward, score = self._rewards(batch)
        metrics = {
            "score": float(score.mean()),
            "success": float(batch.success.mean()),
            "episode_steps": float(steps.sum() / len(batch.group)),
        }
        old_log_prob, importance = batch.log_prob, None
        if log_prob is not None:
            old_log_prob = log_prob
            importance, more = self._importance(batch, log_prob)
            metrics |= more
        kl_coef = self._kl.coef
        if reference_log_prob is not None and self.needs_reference:
            costs = self._kl_of_blocks(batch, old_log_prob, reference_log_prob)  # [N]
            mean = float(costs.sum() / (steps.sum() * batch.log_prob.shape[2]))
            metrics |= {"kl": mean, "kl_coef": kl_coef}
            self._kl.update(mean, len(batch.group))
            if self.config.kl_in == "reward":
                reward = reward - kl_coef * costs
        advantage, returns = self._advantage(batch, reward)
        if self.config.whitens:
            advantage = advantages.whiten(advantage, steps)
        metrics |= _advantage_metrics(advantage, steps)
        if returns is not None and batch.value is not None:
            metrics |= {
                "value": float(batch.value.mean()),
                "return": float(returns.mean()),
                "explained_variance": advantages.explained_variance(batch.value, returns),
            }
        return PreparedBatch(
            advantage=advantage,
            returns=returns,
            old_value=batch.value if self.needs_value else None,
            old_log_prob=old_log_prob,
            importance=importance,
            reference_log_prob=reference_log_prob if self.config.kl_in == "loss" else None,
            kl_coef=kl_coef,
            metrics=metrics,
        )

    def _rewards(self, batch: BlockBatch) -> tuple[Array, Array]:
        """float64 [N], of each decision, and [E], of each episode."""
        if self.config.reward_source == "rewards":
            reward = np.where(batch.executed, batch.reward, 0).sum(axis=1, dtype=np.float64)
            return reward, np.bincount(batch.episode, reward, len(batch.group))
        is_last = np.append(np.diff(batch.episode) != 0, True)
        return is_last * batch.success[batch.episode].astype(np.float64), batch.success.astype(np.float64)

    def _importance(self, batch: BlockBatch, log_prob: Array) -> tuple[Array | None, dict[str, float]]:
        """Truncated importance weights [N, H, D], recomputed over recorded probability, and how far these differ."""
        counts = np.broadcast_to(batch.executed[..., None], log_prob.shape)
        difference = np.where(counts, log_prob.astype(np.float64) - batch.log_prob, 0.0)
        difference = np.clip(difference, -ppo.MAX_LOG_RATIO, ppo.MAX_LOG_RATIO)
        ratio, num = np.exp(difference), counts.sum()
        metrics = {
            "sampler_ratio": float(ratio[counts].sum() / num),
            "sampler_ratio_spread": float(np.sqrt(np.square(ratio - 1).sum() / num)),
            "sampler_kl": float((np.expm1(difference) - difference).sum() / num),  # of the sampler from the learner
        }
        threshold = self.config.rollout_is_threshold
        if threshold is None:
            return None, metrics
        metrics["sampler_clip"] = float((counts & (ratio > threshold)).sum() / num)
        return np.minimum(ratio, threshold).astype(np.float32), metrics

    def _kl_of_blocks(self, batch: BlockBatch, log_prob: Array, reference_log_prob: Array) -> Array:
        """float64 [N]: summed over the log-probs of what was executed."""
        given, reference = (torch.from_numpy(one.astype(np.float64)) for one in (log_prob, reference_log_prob))
        each = kl.estimate(given, reference, self.config.kl_estimator).numpy()
        return np.asarray(np.where(batch.executed[..., None], each, 0.0).sum(axis=(1, 2)))

    def _advantage(self, batch: BlockBatch, reward: Array) -> tuple[Array, Array | None]:
        """Advantage and, with gae, return, float32 [N]."""
        config = self.config
        if config.adv_estimator == "gae":
            assert batch.value is not None
            assert batch.next_value is not None
            return advantages.gae(
                reward,
                batch.value,
                batch.next_value,
                batch.episode,
                batch.terminated if config.bootstraps else np.ones_like(batch.terminated),
                discount=config.discount,
                lam=config.gae_lambda,
            )
        if config.adv_estimator == "reinforce_plus_plus":
            return advantages.discounted_returns(reward, batch.episode, discount=config.discount), None
        score = np.bincount(batch.episode, reward, len(batch.group))
        if config.adv_estimator == "rloo":
            return advantages.rloo(score, batch.group)[batch.episode], None
        return advantages.grpo(score, batch.group, use_std=config.grpo_use_std)[batch.episode], None

    # ---- mini batches and micro batches

    def mini_batches(self, batch: BlockBatch, *, seed: int) -> list[MiniBatch]:
        """Over all epochs, in order; each is one step of the optimizer."""
        check_blocks(batch)
        config, episode_steps = self.config, _episode_steps(batch)
        size, epochs = config.ppo_mini_batch_size, config.ppo_epochs
        if config.mini_batch_unit == "episodes":
            rows = minibatches.whole_episodes(batch.episode, size, epochs, shuffle=config.shuffle, seed=seed)
        else:
            rows = minibatches.mini_batches(len(batch), size, epochs, shuffle=config.shuffle, seed=seed)
        found = []
        for chosen in rows:
            weight = ppo.weights(
                batch.executed[chosen],
                episode_steps[chosen],
                batch.log_prob.shape[2],
                config.loss_aggregation,
            )
            value_weight = np.full(len(chosen), 1.0 / len(chosen), np.float32)
            found.append(MiniBatch(rows=chosen, weight=weight, value_weight=value_weight))
        return found

    def micro_batches(
        self, mini_batch: MiniBatch, *, rank: int = 0, world_size: int = 1, lengths: Array | None = None
    ) -> list[MiniBatch]:
        """A rank's share of a mini batch, in pieces that fit; equally many on every rank.

        `lengths` is the number of tokens of each row of the batch [N], for `max_tokens`.
        """
        positions = np.arange(len(mini_batch))
        mine, is_padding = minibatches.split(positions, rank, world_size)
        if self.config.ppo_micro_batch_size is not None:
            pieces = minibatches.micro_batches(np.arange(len(mine)), self.config.ppo_micro_batch_size)
        else:
            if lengths is None:
                raise AlgorithmError("lengths: max_tokens needs the number of tokens of each row, got none; give them")
            assert self.config.max_tokens is not None
            shares = [minibatches.split(positions, one, world_size)[0] for one in range(world_size)]
            tokens = [lengths[mini_batch.rows[share]] for share in shares]
            pieces = minibatches.by_length(tokens, self.config.max_tokens)[rank]
        return [mini_batch.part(mine[piece], is_padding[piece]) for piece in pieces]

    # ---- the loss

    def loss(self, evaluated: Evaluated, given: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        """The share of these rows in the loss of their mini batch, and their metrics as sums in float64.

        Add up both over micro batches and ranks: no mean is taken of anything.
        """
        config = self.config
        log_prob, entropy = _full(evaluated.log_prob), _full(evaluated.entropy)
        if log_prob.shape != given.old_log_prob.shape:
            wanted, got = list(given.old_log_prob.shape), list(log_prob.shape)
            raise AlgorithmError(f"log_prob: expected shape {wanted}, got {got}; evaluate the same rows")
        weight, dtype = given.weight.to(log_prob.dtype), log_prob.dtype
        loss, sums = ppo.policy_loss(
            log_prob,
            given.old_log_prob.to(dtype),
            given.advantage.to(dtype),
            weight,
            importance=None if given.importance is None else given.importance.to(dtype),
            clip_ratio_low=config.clip_ratio_low,
            clip_ratio_high=config.clip_ratio_high,
            clip_ratio_c=config.clip_ratio_c,
        )
        sums["entropy"] = ppo.total(ppo.counting(entropy, weight))
        if config.entropy_coeff:
            if log_prob.requires_grad and not entropy.requires_grad:
                raise AlgorithmError(
                    "entropy_coeff: the entropy of this policy does not depend on its weights, so that a bonus for it "
                    "has no effect; leave it out"
                )
            loss = loss - config.entropy_coeff * ppo.weighted_sum(entropy, weight)
        if self.needs_value:
            if evaluated.value is None or given.returns is None or given.old_value is None:
                raise AlgorithmError("value: adv_estimator 'gae' needs a policy with a value head, got no values")
            value = _full(evaluated.value)
            distance, more = ppo.value_loss(
                value,
                given.returns.to(value.dtype),
                given.old_value.to(value.dtype),
                given.value_weight.to(value.dtype),
                clip=config.value_clip,
            )
            loss = loss + config.value_coef * distance
            sums |= more
        if given.reference_log_prob is not None:
            each = kl.estimate(log_prob, given.reference_log_prob.to(dtype), config.kl_estimator)
            cost = ppo.weighted_sum(each, weight)
            loss = loss + given.kl_coef * cost
            sums["kl_loss"] = ppo.total(cost)
        sums |= {"loss": ppo.total(loss), "mini_batches": ppo.total(given.value_weight)}
        return loss, sums

    def finish_metrics(self, sums: Mapping[str, Tensor | float]) -> dict[str, float]:
        """Means, of sums over all parts of one or more mini batches."""
        number = {name: float(value) for name, value in sums.items()}
        found = {name: number[name] / number["log_probs"] for name in PER_LOG_PROB if name in number}
        found |= {name: number[name] / number["mini_batches"] for name in PER_MINI_BATCH if name in number}
        found["ratio_spread"] = math.sqrt(found["ratio_spread"])
        if "value_clip_fraction" in number:
            found["value_clip_fraction"] = number["value_clip_fraction"] / number["blocks"]
        return found

    # ---- resuming

    def state(self) -> dict[str, Any]:
        """Plain JSON: everything that the next batch depends on, except the config."""
        return self._kl.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue as the algorithm whose state this is; if the state is refused, nothing has changed."""
        self._kl.restore(state)


def _advantage_metrics(advantage: Array, steps: Array) -> dict[str, float]:
    """Over executed steps."""
    mean = float(np.average(advantage, weights=steps))
    return {
        "advantage": mean,
        "advantage_std": float(np.sqrt(np.average((advantage - mean) ** 2, weights=steps))),
        "no_advantage": float(np.average(advantage == 0, weights=steps)),
    }


def _episode_steps(batch: BlockBatch) -> Array:
    """[N] int64: how many steps the episode of each block has."""
    return np.bincount(batch.episode, batch.executed.sum(axis=1))[batch.episode].astype(np.int64)


def _full(values: Tensor) -> Tensor:
    """Half precision is enough for networks, and not for ratios."""
    return values.float() if values.dtype in (torch.float16, torch.bfloat16) else values

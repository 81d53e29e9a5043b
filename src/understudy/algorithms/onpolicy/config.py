"""The options of GRPO, RLOO, REINFORCE++ and PPO. Importing them does not import torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Literal, TypeAlias, get_args, get_origin, get_type_hints

from understudy.algorithms.algorithm import AlgorithmError
from understudy.core.suggestion import did_you_mean

AdvEstimator: TypeAlias = Literal["grpo", "rloo", "reinforce_plus_plus", "gae"]
Aggregation: TypeAlias = Literal["token-mean", "episode-mean", "episode-sum"]
Estimator: TypeAlias = Literal["kl", "abs", "mse", "low_var_kl"]


@dataclass(frozen=True, kw_only=True)
class PolicyGradientConfig:
    """The options of GRPO, RLOO, REINFORCE++ and PPO; `docs/ppo.md` says why each has its default.

    An option that has no effect with the others must keep its default.
    """

    adv_estimator: AdvEstimator = "grpo"
    """How advantages are computed: grpo, rloo, reinforce_plus_plus, or gae (PPO with a value head)."""
    reward_source: Literal["success", "rewards"] = "success"
    """The reward to learn from: 1 at the end of a successful episode (success), or the recorded rewards (rewards)."""
    grpo_use_std: bool = True
    """Whether GRPO divides advantages by the standard deviation of the scores within the group."""
    discount: float = 0.99
    """Discount of rewards per block of actions, more than 0 and at most 1."""
    gae_lambda: float = 0.95
    """Lambda of generalized advantage estimation, from 0 to 1."""
    bootstrap_truncated: bool | None = None
    """Whether the value of the final observation stands for what a time limit cut off. None does so for reward_source
    rewards; with success, an episode that is not successful within the limit has failed."""
    whiten_advantages: bool | None = None
    """Whether advantages get mean 0 and variance 1 over the batch. None does so for gae and reinforce_plus_plus."""
    clip_ratio_low: float = 0.2
    """How far a probability ratio may fall below 1 before its gradient is clipped."""
    clip_ratio_high: float = 0.28
    """How far a probability ratio may rise above 1 before its gradient is clipped."""
    clip_ratio_c: float | None = None
    """Dual clip: bounds the loss at this multiple of a negative advantage. None turns it off."""
    loss_aggregation: Aggregation = "token-mean"
    """How terms are averaged: token-mean over log-probs, episode-mean over episodes, episode-sum of each episode."""
    ppo_epochs: int = 2
    """Number of passes over a batch."""
    ppo_mini_batch_size: int = 128
    """Largest number of blocks, or of episodes (see mini_batch_unit), in one optimizer step, over all ranks."""
    mini_batch_unit: Literal["blocks", "episodes"] = "blocks"
    """What ppo_mini_batch_size counts: blocks of actions, or whole episodes with all their blocks."""
    ppo_micro_batch_size: int | None = 32
    """Largest number of blocks in one backward pass of a rank. None lets max_tokens decide."""
    max_tokens: int | None = None
    """Largest number of tokens in one backward pass of a rank. None lets ppo_micro_batch_size decide."""
    recompute_log_probs: bool | None = None
    """Whether the learner computes the log-probs that ratios begin from again, in the micro batches that it trains in,
    instead of taking those that were recorded while acting. None does so if the engine computes in bfloat16, and if
    episodes are run by an older policy (max_lag 1)."""
    rollout_is_threshold: float | None = 2.0
    """Largest importance weight of a log-prob, recomputed over recorded probability; None does not weigh. It has an
    effect where log-probs are recomputed."""
    shuffle: bool = True
    """Whether the blocks or episodes of a batch are shuffled for each pass."""
    entropy_coeff: float = 0.0
    """Weight of the entropy bonus in the loss, per nat."""
    value_coef: float = 0.5
    """Weight of the value loss in the loss."""
    value_clip: float | None = None
    """How far a value may move from the recorded one before its gradient is clipped. None does not clip."""
    kl_in: Literal["none", "reward", "loss"] = "none"
    """Where the KL divergence from the reference policy is charged: nowhere, in the reward, or in the loss."""
    kl_coef: float = 0.01
    """Cost of one nat of KL divergence; the first one if kl_controller is adaptive."""
    kl_estimator: Estimator = "low_var_kl"
    """How the KL divergence is estimated from log-probs (docs/ppo.md)."""
    kl_controller: Literal["fixed", "adaptive"] = "fixed"
    """Whether kl_coef stays fixed, or adapts so that the KL divergence approaches kl_target."""
    kl_target: float = 0.1
    """KL divergence, in nats per log-prob, that the adaptive controller aims at."""
    kl_horizon: float = 1000.0
    """Number of episodes over which the adaptive controller changes kl_coef."""

    def __post_init__(self) -> None:
        for name, hint in get_type_hints(type(self)).items():
            value, known = getattr(self, name), get_args(hint)
            if get_origin(hint) is Literal and value not in known:
                advice = did_you_mean(value, known, "choose one")
                raise AlgorithmError(f"{name}: expected one of {', '.join(known)}, got {value!r}; {advice}")
        self._within("discount", "more than 0 and at most 1", 0 < self.discount <= 1)
        self._within("gae_lambda", "from 0 to 1", 0 <= self.gae_lambda <= 1)
        self._within("clip_ratio_low", "more than 0 and less than 1", 0 < self.clip_ratio_low < 1)
        self._within("clip_ratio_high", "more than 0", 0 < self.clip_ratio_high < math.inf)
        for name, least in (("clip_ratio_c", 1), ("value_clip", 0), ("rollout_is_threshold", 0)):
            value = getattr(self, name)
            self._within(name, f"more than {least}, or None", value is None or least < value < math.inf)
        for name in ("ppo_epochs", "ppo_mini_batch_size"):
            self._within(name, "at least 1", getattr(self, name) >= 1)
        for name in ("ppo_micro_batch_size", "max_tokens"):
            self._within(name, "at least 1, or None", getattr(self, name) is None or getattr(self, name) >= 1)
        for name in ("entropy_coeff", "value_coef", "kl_coef"):
            self._within(name, "0 or more", 0 <= getattr(self, name) < math.inf)
        for name in ("kl_target", "kl_horizon"):
            self._within(name, "more than 0", 0 < getattr(self, name) < math.inf)
        if (self.ppo_micro_batch_size is None) == (self.max_tokens is None):
            raise AlgorithmError("max_tokens: expected either it or ppo_micro_batch_size; set the other to None")
        if self.kl_in == "loss" and self.kl_estimator == "kl":
            raise AlgorithmError(
                "kl_estimator: 'kl' has no effect in a loss, since its gradient is 0 on average; "
                "take 'low_var_kl' or 'mse'"
            )
        self._refuse_without_effect()

    def _within(self, name: str, wanted: str, good: bool) -> None:
        if not good:
            raise AlgorithmError(f"{name}: expected {wanted}, got {getattr(self, name)}")

    def _refuse_without_effect(self) -> None:
        """Refuse options that would do nothing, so that nobody waits a day for one."""
        needs = [
            ("grpo_use_std", "adv_estimator", ("grpo",)),
            ("discount", "adv_estimator", ("gae", "reinforce_plus_plus")),
            ("gae_lambda", "adv_estimator", ("gae",)),
            ("bootstrap_truncated", "adv_estimator", ("gae",)),
            ("value_coef", "adv_estimator", ("gae",)),
            ("value_clip", "adv_estimator", ("gae",)),
            ("rollout_is_threshold", "recompute_log_probs", (None, True)),
            ("kl_coef", "kl_in", ("reward", "loss")),
            ("kl_estimator", "kl_in", ("reward", "loss")),
            ("kl_controller", "kl_in", ("reward", "loss")),
            ("kl_target", "kl_controller", ("adaptive",)),
            ("kl_horizon", "kl_controller", ("adaptive",)),
        ]
        default = {field.name: field.default for field in fields(self)}
        for name, other, values in needs:
            if getattr(self, name) != default[name] and getattr(self, other) not in values:
                raise AlgorithmError(
                    f"{name}: has no effect with {other} {getattr(self, other)!r}; "
                    f"leave it out, or set {other} to {' or '.join(repr(value) for value in values)}"
                )

    @property
    def bootstraps(self) -> bool:
        """Whether an episode that a time limit ended would have gone on."""
        return self.reward_source == "rewards" if self.bootstrap_truncated is None else self.bootstrap_truncated

    @property
    def whitens(self) -> bool:
        """Whether advantages are whitened."""
        if self.whiten_advantages is None:
            return self.adv_estimator in ("gae", "reinforce_plus_plus")
        return self.whiten_advantages

    def with_max_lag(self, max_lag: int) -> PolicyGradientConfig:
        """The config for episodes that a policy `max_lag` versions older has run: ratios begin from the trained one."""
        return replace(self, recompute_log_probs=True) if max_lag and self.recompute_log_probs is None else self

    def recomputes(self, precision: str) -> bool:
        """Whether a learner of this precision computes the log-probs of a batch again."""
        if self.recompute_log_probs is None:
            return precision != "float32"  # in which sampler and learner differ by the order of sums alone
        return self.recompute_log_probs

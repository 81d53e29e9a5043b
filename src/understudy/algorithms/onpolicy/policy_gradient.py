"""Policy gradient: GRPO, RLOO, REINFORCE++ and PPO, which differ in the advantage and in little else.

    prepared = algorithm.prepare(batch, reference_log_prob=None)         # once per batch, the same on every rank
    for mini_batch in algorithm.mini_batches(prepared, seed=iteration):  # one step of the optimizer each
        for part in algorithm.micro_batches(mini_batch, rank=rank, world_size=world_size):
            loss, sums = algorithm.loss(policy.evaluate(... of batch at part.rows ...), rows(prepared, part, device))
            loss.backward()                                              # add up gradients and sums, also over ranks
    metrics = {**prepared.metrics, **algorithm.finish_metrics(sums)}

It knows no store, no world and no engine. `docs/ppo.md` has the equations, what each option is for and what each metric
tells.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeAlias, get_args, get_origin, get_type_hints

import numpy as np
import torch
from torch import Tensor

from understudy.algorithms.algorithm import AlgorithmError
from understudy.algorithms.onpolicy import advantages, kl, minibatches
from understudy.algorithms.onpolicy import ppo_losses as ppo
from understudy.algorithms.onpolicy.minibatches import MiniBatch
from understudy.algorithms.onpolicy.prepared import Prepared, Rows, check, rows
from understudy.core import BlockBatch
from understudy.policies import Evaluated

__all__ = ["MiniBatch", "PolicyGradient", "PolicyGradientConfig", "Prepared", "Rows", "rows"]

Array = np.ndarray[Any, Any]

AdvEstimator: TypeAlias = Literal["grpo", "rloo", "reinforce_plus_plus", "gae"]

PER_LOG_PROB = ("ratio", "ratio_spread", "approx_kl", "clip_low", "clip_high", "clip_dual", "entropy")
PER_MINI_BATCH = ("loss", "policy_loss", "value_loss", "kl_loss")


@dataclass(frozen=True, kw_only=True)
class PolicyGradientConfig:
    """The options of GRPO, RLOO, REINFORCE++ and PPO; `docs/ppo.md` says why each has its default.

    An option that the others leave without effect must keep its default.
    """

    adv_estimator: AdvEstimator = "grpo"
    reward_source: Literal["success", "rewards"] = "success"  # 1 at the end of a success; or the recorded rewards
    grpo_use_std: bool = True  # divide by the spread within the group
    discount: float = 0.99  # per block
    gae_lambda: float = 0.95
    whiten_advantages: bool | None = None  # over the whole batch; None: with gae and reinforce_plus_plus
    clip_ratio_low: float = 0.2
    clip_ratio_high: float = 0.28
    clip_ratio_c: float | None = None  # bounds the loss of what was bad and became likely; None: off
    loss_aggregation: ppo.Aggregation = "token-mean"
    ppo_epochs: int = 2  # passes over a batch
    ppo_mini_batch_size: int = 128  # blocks of a step of the optimizer, over all ranks, at most
    ppo_micro_batch_size: int | None = 32  # blocks in one backward pass, per rank; None: as max_tokens allows
    max_tokens: int | None = None  # in one backward pass, per rank
    shuffle: bool = True  # the blocks of a batch, for each pass
    entropy_coeff: float = 0.0
    value_coef: float = 0.5
    value_clip: float | None = None  # how far a value may move from the recorded one; None: as far as it likes
    kl_in: Literal["none", "reward", "loss"] = "none"  # where distance from the reference policy costs
    kl_coef: float = 0.01
    kl_estimator: kl.Estimator = "low_var_kl"
    kl_controller: Literal["fixed", "adaptive"] = "fixed"
    kl_target: float = 0.1  # KL per log-prob
    kl_horizon: float = 1000.0  # episodes

    def __post_init__(self) -> None:
        for name, hint in get_type_hints(type(self)).items():
            value, known = getattr(self, name), get_args(hint)
            if get_origin(hint) is Literal and value not in known:
                near = difflib.get_close_matches(str(value), known, 1)
                question = f"; did you mean {near[0]!r}?" if near else ""
                raise AlgorithmError(f"{name}: expected one of {', '.join(known)}, got {value!r}{question}")
        self._within("discount", "more than 0 and at most 1", 0 < self.discount <= 1)
        self._within("gae_lambda", "from 0 to 1", 0 <= self.gae_lambda <= 1)
        self._within("clip_ratio_low", "more than 0 and less than 1", 0 < self.clip_ratio_low < 1)
        self._within("clip_ratio_high", "more than 0", 0 < self.clip_ratio_high < math.inf)
        for name, least in (("clip_ratio_c", 1), ("value_clip", 0)):
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
        """Nobody should wait a day for an option that did nothing."""
        needs = [
            ("grpo_use_std", "adv_estimator", ("grpo",)),
            ("discount", "adv_estimator", ("gae", "reinforce_plus_plus")),
            ("gae_lambda", "adv_estimator", ("gae",)),
            ("value_coef", "adv_estimator", ("gae",)),
            ("value_clip", "adv_estimator", ("gae",)),
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
    def whitens(self) -> bool:
        """Whether advantages are whitened."""
        if self.whiten_advantages is None:
            return self.adv_estimator in ("gae", "reinforce_plus_plus")
        return self.whiten_advantages


class PolicyGradient:
    """See the module's docstring for the order of calls. Its only state is the price of KL."""

    def __init__(self, config: PolicyGradientConfig):
        self.config = config
        self._price: kl.FixedKL | kl.AdaptiveKL
        if config.kl_controller == "adaptive":
            self._price = kl.AdaptiveKL(coef=config.kl_coef, target=config.kl_target, horizon=config.kl_horizon)
        else:
            self._price = kl.FixedKL(coef=config.kl_coef)

    @property
    def needs_reference(self) -> bool:
        """Whether `prepare` wants the log-probs of a reference policy."""
        return self.config.kl_in != "none"

    @property
    def needs_value(self) -> bool:
        """Whether the policy must judge states."""
        return self.config.adv_estimator == "gae"

    # ---- once per batch

    def prepare(self, batch: BlockBatch, *, reference_log_prob: Array | None = None) -> Prepared:
        """Advantages of a whole batch, from numpy to numpy. An adaptive price of KL is then set for the next batch."""
        check(batch, reference_log_prob, needs_value=self.needs_value, needs_reference=self.needs_reference)
        steps = batch.executed.sum(axis=1)  # [N]
        reward, score = self._rewards(batch)
        metrics = {
            "score": float(score.mean()),
            "success": float(batch.success.mean()),
            "episode_steps": float(steps.sum() / len(batch.group)),
        }
        price = self._price.coef
        if reference_log_prob is not None and self.needs_reference:
            costs = self._kl_of_blocks(batch, reference_log_prob)  # [N]
            mean = float(costs.sum() / (steps.sum() * batch.log_prob.shape[2]))
            metrics |= {"kl": mean, "kl_coef": price}
            self._price.update(mean, len(batch.group))
            if self.config.kl_in == "reward":
                reward = reward - price * costs
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
        return Prepared(
            advantage=advantage,
            returns=returns,
            old_value=batch.value if self.needs_value else None,
            old_log_prob=batch.log_prob,
            reference_log_prob=reference_log_prob if self.config.kl_in == "loss" else None,
            executed=batch.executed,
            episode_steps=np.bincount(batch.episode, steps)[batch.episode].astype(np.int64),
            kl_coef=price,
            metrics=metrics,
        )

    def _rewards(self, batch: BlockBatch) -> tuple[Array, Array]:
        """float64 [N], of each decision, and [E], of each episode."""
        if self.config.reward_source == "rewards":
            reward = np.where(batch.executed, batch.reward, 0).sum(axis=1, dtype=np.float64)
            return reward, np.bincount(batch.episode, reward, len(batch.group))
        is_last = np.append(np.diff(batch.episode) != 0, True)
        return is_last * batch.success[batch.episode].astype(np.float64), batch.success.astype(np.float64)

    def _kl_of_blocks(self, batch: BlockBatch, reference_log_prob: Array) -> Array:
        """float64 [N]: summed over the log-probs of what was executed."""
        log_prob, reference = (torch.from_numpy(one.astype(np.float64)) for one in (batch.log_prob, reference_log_prob))
        each = kl.estimate(log_prob, reference, self.config.kl_estimator).numpy()
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
                batch.terminated,
                discount=config.discount,
                lam=config.gae_lambda,
            )
        if config.adv_estimator == "reinforce_plus_plus":
            return advantages.discounted_returns(reward, batch.episode, discount=config.discount), None
        score = np.bincount(batch.episode, reward, len(batch.group))
        if config.adv_estimator == "rloo":
            return advantages.rloo(score, batch.group)[batch.episode], None
        return advantages.grpo(score, batch.group, use_std=config.grpo_use_std)[batch.episode], None

    # ---- what to learn from, in which order

    def mini_batches(self, prepared: Prepared, *, seed: int) -> list[MiniBatch]:
        """Over all epochs, in order; each is one step of the optimizer."""
        config = self.config
        found = []
        for chosen in minibatches.mini_batches(
            len(prepared), config.ppo_mini_batch_size, config.ppo_epochs, config.shuffle, seed
        ):
            weight = ppo.weights(
                prepared.executed[chosen],
                prepared.episode_steps[chosen],
                prepared.old_log_prob.shape[2],
                config.loss_aggregation,
            )
            value_weight = np.full(len(chosen), 1.0 / len(chosen), np.float32)
            found.append(MiniBatch(rows=chosen, weight=weight, value_weight=value_weight))
        return found

    def micro_batches(
        self, mini_batch: MiniBatch, *, rank: int = 0, world_size: int = 1, lengths: Array | None = None
    ) -> list[MiniBatch]:
        """What a rank has of a mini batch, in pieces that fit; as many on every rank. `lengths` is the number of tokens
        of each row of the batch [N], for `max_tokens`."""
        places = np.arange(len(mini_batch))
        mine, is_padding = minibatches.split(places, rank, world_size)
        if self.config.ppo_micro_batch_size is not None:
            pieces = minibatches.micro_batches(np.arange(len(mine)), self.config.ppo_micro_batch_size)
        else:
            if lengths is None:
                raise AlgorithmError("lengths: max_tokens needs the number of tokens of each row, got none; give them")
            assert self.config.max_tokens is not None
            shares = [minibatches.split(places, one, world_size)[0] for one in range(world_size)]
            tokens = [lengths[mini_batch.rows[share]] for share in shares]
            pieces = minibatches.by_length(tokens, self.config.max_tokens)[rank]
        return [mini_batch.part(mine[piece], is_padding[piece]) for piece in pieces]

    # ---- the loss

    def loss(self, evaluated: Evaluated, given: Rows) -> tuple[Tensor, dict[str, Tensor]]:
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
            clip_ratio_low=config.clip_ratio_low,
            clip_ratio_high=config.clip_ratio_high,
            clip_ratio_c=config.clip_ratio_c,
        )
        sums["entropy"] = ppo.total(ppo.counting(entropy, weight))
        if config.entropy_coeff:
            loss = loss - config.entropy_coeff * ppo.weighted_sum(entropy, weight)
        if self.needs_value:
            if evaluated.value is None or given.returns is None or given.old_value is None:
                raise AlgorithmError("value: adv_estimator 'gae' needs a policy that judges states, got no values")
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

    # ---- going on

    def state(self) -> dict[str, Any]:
        """Plain JSON: all that the next batch depends on, beside the config."""
        return self._price.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on as the one that the state was taken of would have; or refuse it, and change nothing."""
        self._price.restore(state)


def _advantage_metrics(advantage: Array, steps: Array) -> dict[str, float]:
    """Over executed steps."""
    mean = float(np.average(advantage, weights=steps))
    return {
        "advantage": mean,
        "advantage_std": float(np.sqrt(np.average((advantage - mean) ** 2, weights=steps))),
        "no_advantage": float(np.average(advantage == 0, weights=steps)),
    }


def _full(values: Tensor) -> Tensor:
    """Half precision is for networks, and not for ratios."""
    return values.float() if values.dtype in (torch.float16, torch.bfloat16) else values

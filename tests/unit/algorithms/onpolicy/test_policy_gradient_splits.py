"""Policy gradient: any split of the work gives the same gradient, and what weighs nothing has no influence."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tests.unit.algorithms.blocks import FULL, SEES, D, H, K, N, Network, blocks, learned, of, reference, whole

from understudy.algorithms.onpolicy.policy_gradient import PolicyGradient, PolicyGradientConfig, loss_inputs
from understudy.policies import Evaluated


def test_a_mini_batch_knows_how_long_its_episodes_are() -> None:
    batch = blocks()
    steps = np.array([7, 3, 5, 10, 3, 9])[batch.episode]
    for aggregation in ("token-mean", "episode-mean", "episode-sum"):
        algorithm = of(loss_aggregation=aggregation, ppo_mini_batch_size=5, ppo_epochs=1)
        for found in algorithm.mini_batches(batch, seed=1):
            executed = batch.executed[found.rows]
            share = executed / steps[found.rows][:, None]
            wanted = {
                "token-mean": executed / (D * executed.sum()),
                "episode-mean": share / (D * share.sum()),
                "episode-sum": executed / share.sum(),
            }
            np.testing.assert_allclose(found.weight, wanted[aggregation], rtol=1e-6)
            np.testing.assert_allclose(found.value_weight, 1 / len(found), rtol=1e-6)


def test_a_mini_batch_of_whole_episodes_is_a_mean_over_them_by_hand() -> None:
    """The first three of six episodes have 3, 1 and 2 blocks, 7, 3 and 5 steps, and two log-probs for each step."""
    batch = blocks()
    options: dict[str, Any] = {"ppo_mini_batch_size": 4, "ppo_epochs": 1, "shuffle": False}
    algorithm = of(mini_batch_unit="episodes", loss_aggregation="episode-mean", **options)
    first, second = algorithm.mini_batches(batch, seed=1)
    assert (first.rows.tolist(), second.rows.tolist()) == ([*range(6)], [*range(6, 14)])
    each = np.array([7, 7, 7, 3, 5, 5])
    np.testing.assert_allclose(first.weight, batch.executed[:6] / (3 * 2 * each[:, None]), rtol=1e-6)
    assert first.weight.sum() * 2 == pytest.approx(1.0)
    in_blocks = of(loss_aggregation="episode-mean", **options)
    assert [len(one) for one in in_blocks.mini_batches(batch, seed=1)] == [4, 4, 3, 3]


@pytest.mark.parametrize("aggregation", ["token-mean", "episode-mean", "episode-sum"])
@pytest.mark.parametrize("options", [FULL, {"adv_estimator": "grpo"}, {"adv_estimator": "rloo", "entropy_coeff": 0.1}])
def test_any_split_over_ranks_and_micro_batches_gives_the_gradient_of_the_whole(
    options: dict[str, Any], aggregation: Any
) -> None:
    batch = blocks()
    config = PolicyGradientConfig(**options, loss_aggregation=aggregation, ppo_mini_batch_size=10, ppo_epochs=1)
    algorithm = PolicyGradient(config)
    prepared = algorithm.prepare(batch, reference_log_prob=reference(batch))
    lengths = np.random.default_rng(0).integers(5, 40, N)
    for mini_batch in algorithm.mini_batches(batch, seed=3):
        wanted, wanted_sums = learned(algorithm, batch, prepared, [mini_batch])
        assert np.abs(wanted).max() > 1e-3
        for world_size in (1, 2, 3, 5, 16):
            for micro in ({"ppo_micro_batch_size": 1}, {"ppo_micro_batch_size": 3}, {"max_tokens": 60}):
                cut = PolicyGradient(replace(config, **{"ppo_micro_batch_size": None, **micro}))
                parts = [
                    cut.micro_batches(mini_batch, rank=rank, world_size=world_size, lengths=lengths)
                    for rank in range(world_size)
                ]
                assert len({len(one) for one in parts}) == 1  # as many on every rank
                gradient, sums = learned(cut, batch, prepared, [part for one in parts for part in one])
                np.testing.assert_allclose(gradient, wanted, rtol=0, atol=1e-12)
                assert sums == pytest.approx(wanted_sums, rel=1e-12, abs=1e-12)


def test_metrics_are_means_over_all_mini_batches() -> None:
    batch, algorithm = blocks(), of(**FULL, ppo_epochs=2, ppo_mini_batch_size=5)
    prepared = algorithm.prepare(batch, reference_log_prob=reference(batch))
    mini_batches = algorithm.mini_batches(batch, seed=0)
    assert len(mini_batches) == 6
    _, sums = learned(algorithm, batch, prepared, mini_batches)
    each = [algorithm.finish_metrics(learned(algorithm, batch, prepared, [one])[1]) for one in mini_batches]
    found = algorithm.finish_metrics(sums)
    for name in ("loss", "policy_loss", "value_loss", "kl_loss"):
        assert found[name] == pytest.approx(np.mean([one[name] for one in each]), rel=1e-6)
    _, sums = learned(algorithm, batch, prepared, [whole(algorithm, batch)])
    for name in ("ratio", "approx_kl", "entropy", "clip_low", "clip_high", "clip_dual", "value_clip_fraction"):
        assert found[name] == pytest.approx(algorithm.finish_metrics(sums)[name], rel=1e-6)


def test_padding_has_a_gradient_of_exactly_zero_and_nothing_to_say() -> None:
    batch, algorithm = blocks(), of(**FULL, ppo_mini_batch_size=2)
    prepared = algorithm.prepare(batch, reference_log_prob=reference(batch))
    (part,) = algorithm.micro_batches(algorithm.mini_batches(batch, seed=0)[0], rank=4, world_size=5)
    assert (len(part), part.weight.any(), part.value_weight.any()) == (1, False, False)
    gradient, sums = learned(algorithm, batch, prepared, [part])
    assert len(gradient) == SEES * (H * D * K + 1)  # all of it is there, so that an all-reduce is
    assert not gradient.any()
    assert set(sums.values()) == {0.0}


@pytest.mark.parametrize("bad", [50.0, math.nan, -math.inf])
@pytest.mark.parametrize(
    "options", [FULL, {**FULL, "kl_estimator": "mse"}, {**FULL, "kl_in": "reward"}, {"reward_source": "rewards"}]
)
def test_steps_behind_the_end_have_no_influence(options: dict[str, Any], bad: float) -> None:
    batch, algorithm = blocks(), of(**options)
    other = reference(batch)
    behind = ~batch.executed
    spoiled = {name: array.copy() for name, array in (("log_prob", batch.log_prob), ("reward", batch.reward))}
    for array in (*spoiled.values(), spoiled_other := other.copy()):
        array[behind] = bad
    outcomes = []
    for one, theirs, change in ((batch, other, 0.0), (replace(batch, **spoiled), spoiled_other, bad)):
        prepared = algorithm.prepare(one, reference_log_prob=theirs)
        now = Network()(batch, np.arange(N))
        log_prob, entropy = (
            torch.where(torch.tensor(behind)[..., None], change, values.detach()).requires_grad_()
            for values in (now.log_prob, now.entropy)
        )
        loss, sums = algorithm.loss(
            Evaluated(log_prob=log_prob, entropy=entropy, value=now.value),
            loss_inputs(prepared, whole(algorithm, batch)),
        )
        loss.backward()
        assert log_prob.grad is not None
        numbers = [loss.item(), *(value.item() for value in sums.values()), *prepared.metrics.values()]
        outcomes.append((numbers, prepared.advantage.tolist(), log_prob.grad.tolist()))
        assert np.isfinite(numbers).all()
        assert not log_prob.grad.numpy()[behind].any()
    assert outcomes[0] == outcomes[1]


def test_half_precision_is_for_networks_and_not_for_ratios() -> None:
    batch, algorithm = blocks(), of()
    prepared = algorithm.prepare(batch)
    now = Network()(batch, np.arange(N))
    half = Evaluated(log_prob=now.log_prob.bfloat16(), entropy=now.entropy.bfloat16(), value=None)
    full = Evaluated(log_prob=half.log_prob.float(), entropy=half.entropy.float(), value=None)
    given = loss_inputs(prepared, whole(algorithm, batch))
    found, wanted = algorithm.loss(half, given)[0], algorithm.loss(full, given)[0]
    assert found.dtype == torch.float32
    assert found.item() == wanted.item()

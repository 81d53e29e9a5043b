"""Policy gradient: whole losses in numpy, every option, any split of the work, and what must have no influence."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tests.unit.algorithms.blocks import FULL, LENGTHS, SEES, D, H, K, N, Network, blocks, learned, of, reference, whole

from understudy.algorithms import AlgorithmError
from understudy.algorithms.onpolicy.policy_gradient import MiniBatch, PolicyGradient, loss_inputs
from understudy.core import BlockBatch

# ---- the whole loss


def test_the_whole_of_ppo_against_numpy() -> None:
    options = {"clip_ratio_low": 0.1, "clip_ratio_high": 0.15, "discount": 0.9, "gae_lambda": 0.8}
    algorithm, batch = of(**FULL, **options, bootstrap_truncated=True), blocks()
    prepared = algorithm.prepare(batch, reference_log_prob=reference(batch))
    _, sums = learned(algorithm, batch, prepared, [whole(algorithm, batch)])
    found = algorithm.finish_metrics(sums)

    # advantages: the sum of errors to come, whitened over executed steps
    assert batch.value is not None
    assert batch.next_value is not None
    value, advantage = batch.value.astype(np.float64), np.zeros(N)
    for one in range(6):
        mine = np.flatnonzero(batch.episode == one)
        after = [*value[mine[1:]], 0.0 if batch.terminated[one] else float(batch.next_value[mine[-1]])]
        reward = np.zeros(len(mine))
        reward[-1] = batch.success[one]
        errors = reward + 0.9 * np.array(after) - value[mine]
        for t in range(len(mine)):
            advantage[mine[t]] = sum(0.72 ** (k - t) * errors[k] for k in range(t, len(mine)))
    returns = advantage + value
    steps = batch.executed.sum(axis=1)
    mean = (advantage * steps).sum() / steps.sum()
    spread = math.sqrt(((advantage - mean) ** 2 * steps).sum() / steps.sum() + 1e-8)
    advantage = (advantage - mean) / spread

    # the loss, term by term
    with torch.no_grad():
        now = Network()(batch, np.arange(N))
    assert now.value is not None
    new, entropy, judged = now.log_prob.numpy(), now.entropy.numpy(), now.value.numpy()
    old, other = batch.log_prob.astype(np.float64), reference(batch).astype(np.float64)
    each: dict[str, list[float]] = {name: [] for name in ("term", "entropy", "kl", "ratio", "off", "old_kl")}
    clips = {"clip_low": 0.0, "clip_high": 0.0, "clip_dual": 0.0}
    for n, h, d in np.ndindex(N, H, D):
        if not batch.executed[n, h]:
            continue
        r, gain, away = math.exp(new[n, h, d] - old[n, h, d]), advantage[n], new[n, h, d] - other[n, h, d]
        term = max(-gain * r, -gain * min(max(r, 0.9), 1.15))
        each["term"].append(min(term, -gain * 1.5) if gain < 0 else term)
        each["entropy"].append(entropy[n, h, d])
        each["kl"].append(math.exp(-away) - 1 + away)
        each["ratio"].append(r)
        each["off"].append((r - 1) ** 2)
        each["old_kl"].append(r - 1 - math.log(r))
        clips["clip_low"] += gain < 0 and r < 0.9
        clips["clip_high"] += gain > 0 and r > 1.15
        clips["clip_dual"] += gain < 0 and r > 1.5
    assert min(clips.values()) > 0
    near = value + np.clip(judged - value, -0.3, 0.3)
    distance = np.maximum((judged - returns) ** 2, (near - returns) ** 2).mean()
    wanted = {
        "policy_loss": np.mean(each["term"]),
        "value_loss": distance,
        "kl_loss": np.mean(each["kl"]),
        "loss": np.mean(each["term"]) - 0.02 * np.mean(each["entropy"]) + 0.5 * distance + 0.1 * np.mean(each["kl"]),
        "entropy": np.mean(each["entropy"]),
        "ratio": np.mean(each["ratio"]),
        "ratio_spread": math.sqrt(np.mean(each["off"])),
        "approx_kl": np.mean(each["old_kl"]),
        "value_clip_fraction": ((near - returns) ** 2 > (judged - returns) ** 2).mean(),
        **{name: count / len(each["ratio"]) for name, count in clips.items()},
    }
    assert found == pytest.approx(wanted, rel=1e-6)
    assert prepared.metrics["explained_variance"] == pytest.approx(
        1 - np.var(returns - value) / np.var(returns), rel=1e-6
    )
    assert prepared.metrics["value"] == pytest.approx(value.mean(), rel=1e-6)
    assert prepared.metrics["return"] == pytest.approx(returns.mean(), rel=1e-6)


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "reinforce_plus_plus", "gae"])
def test_at_the_recorded_weights_the_gradient_is_that_of_advantage_times_log_prob(estimator: str) -> None:
    algorithm, batch, network = of(adv_estimator=estimator), blocks(), Network()
    prepared = algorithm.prepare(batch)
    prepared = replace(prepared, old_log_prob=network(batch, np.arange(N)).log_prob.detach().float().numpy())
    loss, _ = algorithm.loss(network(batch, np.arange(N)), loss_inputs(prepared, whole(algorithm, batch)))
    loss.backward()
    assert network.tokens.grad is not None
    plain = Network()
    gain, counts = torch.tensor(prepared.advantage), torch.tensor(batch.executed)
    terms = (gain[:, None, None] * plain(batch, np.arange(N)).log_prob)[counts]
    (-terms.mean()).backward()
    assert plain.tokens.grad is not None
    assert plain.tokens.grad.abs().max() > 1e-3
    torch.testing.assert_close(network.tokens.grad, plain.tokens.grad, rtol=1e-5, atol=1e-7)


# ---- rewards and advantages


def test_success_is_the_reward_or_the_recorded_ones_are() -> None:
    batch = blocks()
    success = of(adv_estimator="rloo").prepare(batch)
    assert success.metrics["score"] == success.metrics["success"] == 0.5
    # group 4: episodes 0, 1, 3 with 1, 0, 1; group 9: episodes 2, 4, 5 with 0, 0, 1
    assert success.advantage.tolist() == np.float32([0.5, -1, -0.5, 0.5, -0.5, 1])[batch.episode].tolist()
    recorded = of(adv_estimator="rloo", reward_source="rewards").prepare(batch)
    score = np.array([batch.reward[batch.episode == one].astype(np.float64).sum() for one in range(6)])
    assert recorded.metrics["score"] == pytest.approx(score.mean())
    assert recorded.metrics["success"] == 0.5
    wanted = score[0] - (score[1] + score[3]) / 2
    assert recorded.advantage[:3].tolist() == pytest.approx([wanted] * 3, rel=1e-6)


def test_grpo_divides_by_the_spread_of_the_group_or_not() -> None:
    batch = blocks()
    plain = of(grpo_use_std=False).prepare(batch).advantage
    np.testing.assert_allclose(plain, np.array([1, -2, -1, 1, -1, 2])[batch.episode] / 3, rtol=1e-6)
    np.testing.assert_allclose(of().prepare(batch).advantage, plain / ((1 / 3) ** 0.5 + 1e-6), rtol=1e-6)


def test_reinforce_discounts_per_block_and_whitens_over_steps() -> None:
    batch = blocks()
    plain = of(adv_estimator="reinforce_plus_plus", whiten_advantages=False, discount=0.5).prepare(batch).advantage
    assert plain.tolist() == [0.25, 0.5, 1, 0, 0, 0, 0.125, 0.25, 0.5, 1, 0, 0.25, 0.5, 1]
    found = of(adv_estimator="reinforce_plus_plus", discount=0.5).prepare(batch)
    steps = batch.executed.sum(axis=1)
    mean = (plain * steps).sum() / steps.sum()
    spread = math.sqrt(((plain - mean) ** 2 * steps).sum() / steps.sum() + 1e-8)
    np.testing.assert_allclose(found.advantage, (plain - mean) / spread, rtol=1e-5)
    assert found.metrics["advantage"] == pytest.approx(0, abs=1e-6)
    assert found.metrics["advantage_std"] == pytest.approx(1, rel=1e-6)


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "reinforce_plus_plus", "gae"])
def test_whitening_is_on_where_it_is_usual_and_can_be_chosen(estimator: str) -> None:
    batch = blocks()
    by = {one: of(adv_estimator=estimator, whiten_advantages=one).prepare(batch) for one in (None, False, True)}
    usual = estimator in ("gae", "reinforce_plus_plus")
    assert np.array_equal(by[None].advantage, by[usual].advantage)
    assert not np.allclose(by[True].advantage, by[False].advantage)
    assert by[True].metrics["advantage_std"] == pytest.approx(1, rel=1e-6)


@pytest.mark.parametrize(
    ("options", "bootstraps"),
    [
        ({}, False),
        ({"reward_source": "rewards"}, True),
        ({"bootstrap_truncated": True}, True),
        ({"reward_source": "rewards", "bootstrap_truncated": False}, False),
    ],
)
def test_a_time_limit_is_an_end_for_success_and_not_for_rewards(options: dict[str, Any], bootstraps: bool) -> None:
    batch = blocks()
    assert batch.next_value is not None
    algorithm = of(adv_estimator="gae", whiten_advantages=False, **options)
    before = algorithm.prepare(batch).advantage
    after = algorithm.prepare(replace(batch, next_value=batch.next_value + 1)).advantage
    moved = ~np.isclose(before, after)
    assert moved.tolist() == (~batch.terminated & bootstraps)[batch.episode].tolist()
    last = np.cumsum(LENGTHS) - 1
    np.testing.assert_allclose((after - before)[last], 0.99 * (~batch.terminated & bootstraps), atol=1e-6)


def test_metrics_of_a_batch_by_hand() -> None:
    metrics = of(grpo_use_std=False).prepare(blocks(group=np.array([4, 4, 9, 4, 9, 7]))).metrics
    # scores of group 4: 1, 0, 1; of group 9: 0, 0; of group 7, which has one member: 1
    steps = np.array([7, 3, 5, 10, 3, 9])
    advantage = np.array([1 / 3, -2 / 3, 0, 1 / 3, 0, 0])
    mean = (steps * advantage).sum() / 37
    wanted = {
        "score": 0.5,
        "success": 0.5,
        "episode_steps": 37 / 6,
        "advantage": mean,
        "advantage_std": math.sqrt((steps * (advantage - mean) ** 2).sum() / 37),
        "no_advantage": 17 / 37,
    }
    assert metrics == pytest.approx(wanted, rel=1e-6)


# ---- KL


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "reinforce_plus_plus", "gae"])
def test_kl_in_the_reward_is_paid_where_it_arose(estimator: str) -> None:
    batch = blocks()
    other = reference(batch)
    options: dict[str, Any] = {"adv_estimator": estimator, "whiten_advantages": False}
    if estimator == "gae":
        options["bootstrap_truncated"] = True  # of both sources of the reward
    found = of(**options, kl_in="reward", kl_coef=0.3, kl_estimator="kl").prepare(batch, reference_log_prob=other)
    away = np.where(batch.executed[..., None], batch.log_prob.astype(np.float64) - other, 0).sum(axis=(1, 2))
    paid = -0.3 * away / batch.executed.sum(axis=1)  # as a reward of each step
    paid[np.cumsum(LENGTHS) - 1] += batch.success / batch.executed.sum(axis=1)[np.cumsum(LENGTHS) - 1]
    same = replace(batch, reward=(paid[:, None] * batch.executed).astype(np.float32))
    wanted = of(**options, reward_source="rewards").prepare(same)
    np.testing.assert_allclose(found.advantage, wanted.advantage, rtol=1e-4, atol=1e-5)
    assert found.metrics["score"] == 0.5  # what was earned, not what was paid
    assert found.metrics["kl"] == pytest.approx(away.sum() / (batch.executed.sum() * D))
    assert found.metrics["kl_coef"] == 0.3
    assert found.reference_log_prob is None  # the loss need not know


def test_kl_in_the_loss_leaves_the_advantage_alone() -> None:
    batch = blocks()
    found = of(kl_in="loss").prepare(batch, reference_log_prob=reference(batch))
    assert np.array_equal(found.advantage, of().prepare(batch).advantage)
    assert found.reference_log_prob is not None


@pytest.mark.parametrize("kl_in", ["reward", "loss"])
def test_an_adaptive_price_is_of_the_next_batch_and_moves_both_ways(kl_in: Any) -> None:
    batch = blocks()
    other = reference(batch)
    for target, change in ((1e-4, 1 + 0.2 * 6 / 60), (1e4, 1 - 0.2 * 6 / 60)):
        algorithm = of(kl_in=kl_in, kl_coef=0.5, kl_controller="adaptive", kl_target=target, kl_horizon=60)
        assert algorithm.prepare(batch, reference_log_prob=other).kl_coef == 0.5
        second = algorithm.prepare(batch, reference_log_prob=other)
        assert second.kl_coef == second.metrics["kl_coef"] == pytest.approx(0.5 * change)
        _, sums = learned(algorithm, batch, second, [whole(algorithm, batch)])
        assert sums["loss"] - sums["policy_loss"] == pytest.approx(second.kl_coef * sums.get("kl_loss", 0.0))
        assert ("kl_loss" in sums) == (kl_in == "loss")
        another = PolicyGradient(algorithm.config)
        another.restore(json.loads(json.dumps(algorithm.state())))
        assert another.prepare(batch, reference_log_prob=other).kl_coef == pytest.approx(0.5 * change**2)
    with pytest.raises(
        AlgorithmError, match=r"kl_controller: the state was saved with 'adaptive', this run has 'fixed'"
    ):
        of(kl_in=kl_in).restore(algorithm.state())


# ---- learning


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "reinforce_plus_plus", "gae"])
def test_it_learns_what_succeeds(estimator: str) -> None:
    """One block, whose first token should be 2; the others do not matter."""
    algorithm, network = of(adv_estimator=estimator, ppo_epochs=1), Network()
    optimizer = torch.optim.Adam(network.parameters(), lr=0.1)
    rng, size = np.random.default_rng(0), 64
    seen = np.ones((size, SEES))

    def lived() -> BlockBatch:
        with torch.no_grad():
            odds = (torch.from_numpy(seen) @ network.tokens).reshape(size, H, D, K).softmax(dim=-1).numpy()
            value = (torch.from_numpy(seen) @ network.value).float().numpy()
        tokens = (rng.random((size, H, D, 1)) < odds.cumsum(axis=-1)).argmax(axis=-1)
        return BlockBatch(
            observation={"state": seen},
            instruction=("go",) * size,
            replay={"tokens": tokens},
            log_prob=np.log(np.take_along_axis(odds, tokens[..., None], axis=-1)[..., 0]).astype(np.float32),
            executed=np.ones((size, H), bool),
            reward=np.zeros((size, H), np.float32),
            value=value,
            next_value=np.zeros(size, np.float32),
            policy_version=np.zeros(size, np.int64),
            episode=np.arange(size),
            group=np.arange(size) // 8,
            success=tokens[:, 0, 0] == 2,
            terminated=np.ones(size, bool),
        )

    scores = []
    for iteration in range(40):
        batch = lived()
        prepared = algorithm.prepare(batch)
        scores.append(prepared.metrics["success"])
        for mini_batch in algorithm.mini_batches(batch, seed=iteration):
            optimizer.zero_grad()
            for part in algorithm.micro_batches(mini_batch):
                algorithm.loss(network(batch, part.rows), loss_inputs(prepared, part))[0].backward()
            optimizer.step()
    assert np.mean(scores[:3]) < 0.6
    assert np.mean(scores[-3:]) > 0.95


def test_a_bonus_for_an_entropy_that_no_weight_changes_is_refused() -> None:
    algorithm, batch = of(adv_estimator="grpo", entropy_coeff=0.1), blocks()
    prepared = algorithm.prepare(batch)
    rows = np.arange(N)
    part = MiniBatch(rows=rows, weight=batch.executed.astype(np.float32), value_weight=np.ones(N, np.float32))
    found = Network()(batch, rows)
    fixed = replace(found, entropy=torch.ones_like(found.entropy))
    with pytest.raises(
        AlgorithmError, match="entropy_coeff: the entropy of this policy does not depend on its weights"
    ):
        algorithm.loss(fixed, loss_inputs(prepared, part))
    algorithm.loss(found, loss_inputs(prepared, part))

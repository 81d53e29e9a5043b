"""Advantages against numbers worked out by hand, and against their definitions written out in float64."""

from __future__ import annotations

import numpy as np
import pytest

from understudy.algorithms.onpolicy import advantages


def a(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def close(found: np.ndarray, wanted: object, *, dtype: str = "float32") -> None:
    assert found.dtype == dtype
    np.testing.assert_allclose(found, np.asarray(wanted, np.float64), rtol=2e-7, atol=1e-9)


# ---- groups


def test_grpo_by_hand() -> None:
    score, group = a(1, 6, 0, 0, 2, 1), np.array([9, 4, 9, 9, 4, 9])  # of group 9: 1, 0, 0, 1; of group 4: 6, 2
    # sample standard deviations: sqrt(4 * 0.25 / 3) and sqrt((4 + 4) / 1)
    narrow, wide = (1 / 3) ** 0.5 + 1e-6, 8**0.5 + 1e-6
    half = 0.5 / narrow
    close(advantages.grpo(score, group), [half, 2 / wide, -half, -half, -2 / wide, half])
    close(advantages.grpo(score, group, use_std=False), [0.5, 2, -0.5, -0.5, -2, 0.5])
    close(advantages.grpo(a(1, 0), np.array([0, 0]), eps=1.0), [0.5 / (0.5**0.5 + 1), -0.5 / (0.5**0.5 + 1)])


def test_rloo_by_hand() -> None:
    score, group = a(1, 6, 0, 0, 2, 1), np.array([9, 4, 9, 9, 4, 9])
    close(advantages.rloo(score, group), [1 - 1 / 3, 6 - 2, -2 / 3, -2 / 3, 2 - 6, 2 / 3])


def test_rloo_takes_the_mean_of_the_others() -> None:
    rng = np.random.default_rng(1)
    score, group = rng.normal(size=40), rng.permutation(np.repeat(np.arange(8), 5))
    wanted = [score[i] - np.mean([score[j] for j in range(40) if j != i and group[j] == group[i]]) for i in range(40)]
    close(advantages.rloo(score, group), wanted)


def test_who_has_nobody_to_compare_with_has_no_advantage() -> None:
    score, group = a(1, 0.1, 0.1, 0.1, 5), np.array([0, 1, 1, 1, 2])  # groups of one, and one that all did the same
    assert advantages.grpo(score, group).tolist() == pytest.approx([0] * 5, abs=1e-6)
    assert advantages.grpo(score, group, use_std=False).tolist() == pytest.approx([0] * 5, abs=1e-6)
    assert advantages.rloo(score, group).tolist() == pytest.approx([0] * 5, abs=1e-6)
    assert advantages.rloo(a(7), np.array([3])).tolist() == [0]


# ---- returns and values


def test_discounted_returns_by_hand() -> None:
    found = advantages.discounted_returns(a(1, 2, 3, 4), np.array([0, 0, 0, 1]), discount=0.5)
    assert found.tolist() == [2.75, 3.5, 3.0, 4.0]
    assert advantages.discounted_returns(a(0, 0, 1), np.zeros(3, int), discount=1.0).tolist() == [1.0, 1.0, 1.0]


def test_gae_after_a_terminal_and_after_a_time_limit_by_hand() -> None:
    reward, value = a(0, 0, 1, 0, 0, 1), a(0.5, 0.6, 0.7, 0.5, 0.6, 0.7)
    episode, terminated = np.array([0, 0, 0, 1, 1, 1]), np.array([True, False])
    next_value = np.array([np.nan, np.nan, np.nan, np.nan, np.nan, 0.8])  # none other than the last may be looked at
    found, returns = advantages.gae(reward, value, next_value, episode, terminated, discount=0.9, lam=0.5)
    # errors 0.04, 0.03 and 1 - 0.7, or 1 + 0.9 * 0.8 - 0.7; each advantage takes 0.45 of the next
    wanted = [0.11425, 0.165, 0.3, 0.26005, 0.489, 1.02]
    np.testing.assert_allclose(found, wanted, atol=1e-6)
    np.testing.assert_allclose(returns, np.add(wanted, value), atol=1e-6)


@pytest.mark.parametrize("lam", [0.0, 0.7, 1.0])
def test_gae_is_the_discounted_sum_of_the_errors_to_come(lam: float) -> None:
    rng = np.random.default_rng(2)
    episode = np.repeat(np.arange(4), [1, 5, 2, 4])
    terminated = np.array([False, True, True, False])
    reward, value, next_value = rng.normal(size=(3, 12))
    found, returns = advantages.gae(reward, value, next_value, episode, terminated, discount=0.9, lam=lam)
    wanted = np.zeros(12)
    for one in range(4):
        rows = np.flatnonzero(episode == one)
        after = [*value[rows[1:]], 0.0 if terminated[one] else next_value[rows[-1]]]
        errors = reward[rows] + 0.9 * np.array(after) - value[rows]
        for t in range(len(rows)):
            wanted[rows[t]] = sum((0.9 * lam) ** (k - t) * errors[k] for k in range(t, len(rows)))
    close(found, wanted)
    close(returns, wanted + value)


def test_gae_with_lambda_1_gives_discounted_returns() -> None:
    rng = np.random.default_rng(3)
    reward, value = rng.normal(size=(2, 7))
    episode = np.repeat([0, 1], [4, 3])
    _, returns = advantages.gae(reward, value, value, episode, np.array([True, True]), discount=0.9, lam=1.0)
    close(returns, advantages.discounted_returns(reward, episode, discount=0.9).astype(np.float64))


# ---- over the batch


def test_whiten_by_hand() -> None:
    close(advantages.whiten(a(1, 3), a(1, 1), eps=0), [-1, 1])
    spread = 0.75**0.5  # mean 1.5; variance (3 * 0.25 + 2.25) / 4
    close(advantages.whiten(a(1, 3), a(3, 1), eps=0), [-0.5 / spread, 1.5 / spread])
    close(advantages.whiten(a(1, 3), a(1, 1), eps=3), [-0.5, 0.5])
    assert advantages.whiten(a(0.3, 0.3), a(1, 2)).tolist() == pytest.approx([0, 0], abs=1e-6)


def test_whiten_listens_only_to_what_weighs() -> None:
    values = np.random.default_rng(4).normal(size=6)
    found = advantages.whiten(np.append(values, 1e6), np.append(np.arange(1, 7), 0))
    close(found[:6], advantages.whiten(values, np.arange(1, 7)).astype(np.float64))


def test_explained_variance_by_hand() -> None:
    returns = a(1, 2, 3)
    assert advantages.explained_variance(returns, returns) == 1.0
    assert advantages.explained_variance(returns + 5, returns) == 1.0  # an offset is no variance
    assert advantages.explained_variance(a(9, 9, 9), returns) == 0.0
    assert advantages.explained_variance(-returns, returns) == pytest.approx(-3.0)
    assert advantages.explained_variance(returns, a(1, 1, 1)) == 0.0

"""PPO's losses: by hand, written out in float64 numpy, and what must have no influence."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from understudy.algorithms.onpolicy import ppo_losses as ppo

MODES: tuple[Any, ...] = ("token-mean", "episode-mean", "episode-sum")
CLIP: dict[str, Any] = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": None}


def t(values: object) -> torch.Tensor:
    return torch.tensor(np.asarray(values, np.float64))


# ---- weights


def test_weights_by_hand() -> None:
    executed = np.array([[True, True], [True, False], [True, True]])
    steps = np.array([3, 3, 4])  # the third block is half of an episode, so there are one and a half
    by = {mode: ppo.weights(executed, steps, 2, mode) for mode in MODES}
    for found in by.values():
        assert found.dtype == np.float32
    np.testing.assert_allclose(by["token-mean"], executed / 10, rtol=1e-6)  # 5 steps of 2 log-probs
    np.testing.assert_allclose(by["episode-mean"], [[1 / 9, 1 / 9], [1 / 9, 0], [1 / 12, 1 / 12]], rtol=1e-6)
    np.testing.assert_allclose(by["episode-sum"], executed / 1.5, rtol=1e-6)


def test_weights_of_whole_episodes_are_the_means_they_are_called() -> None:
    rng = np.random.default_rng(0)
    episode = np.repeat(np.arange(3), [1, 4, 2])
    executed = np.ones((7, 3), bool)
    executed[[0, 4, 6], 1:] = False
    steps = np.array([executed[episode == one].sum() for one in episode])
    terms = rng.normal(size=(7, 3, 2))
    each = [terms[episode == one][executed[episode == one]] for one in range(3)]
    wanted: dict[Any, float] = {
        "token-mean": np.concatenate(each).mean(),
        "episode-mean": np.mean([one.mean() for one in each]),
        "episode-sum": np.mean([one.sum() for one in each]),
    }
    for mode, value in wanted.items():
        weight = ppo.weights(executed, steps, 2, mode)
        assert (weight[..., None] * terms).sum() == pytest.approx(value, rel=1e-6), mode


# ---- the clipped surrogate


@pytest.mark.parametrize(
    ("ratio", "advantage", "c", "term", "moves", "counted"),
    [
        (1.1, 1.0, None, -1.1, True, None),
        (1.27, 1.0, None, -1.27, True, None),  # 1.2 would have been clipped below
        (1.5, 1.0, None, -1.28, False, "clip_high"),
        (0.7, 1.0, None, -0.7, True, None),  # likely again: never clipped
        (0.81, -1.0, None, 0.81, True, None),
        (0.7, -1.0, None, 0.8, False, "clip_low"),
        (1.5, -1.0, None, 1.5, True, None),
        (4.0, -1.0, None, 4.0, True, None),
        (4.0, -1.0, 3.0, 3.0, False, "clip_dual"),
        (2.9, -1.0, 3.0, 2.9, True, None),
        (4.0, 2.0, 3.0, -2.56, False, "clip_high"),
        (0.1, -2.0, 3.0, 1.6, False, "clip_low"),
        (1.0, 0.0, 3.0, 0.0, False, None),
    ],
)
def test_one_term_by_hand(
    ratio: float, advantage: float, c: float | None, term: float, moves: bool, counted: str | None
) -> None:
    log_prob = t([[[math.log(ratio) - 1.5]]]).requires_grad_()
    options = {**CLIP, "clip_ratio_c": c}
    loss, sums = ppo.policy_loss(log_prob, t([[[-1.5]]]), t([advantage]), t([[1.0]]), **options)
    assert loss.item() == pytest.approx(term, abs=1e-12)
    loss.backward()
    assert log_prob.grad is not None
    assert log_prob.grad.item() == pytest.approx(-advantage * ratio if moves else 0.0, abs=1e-12)
    fractions = {name: value.item() for name, value in sums.items() if name.startswith("clip_")}
    wanted = {"clip_low", "clip_high"} | ({"clip_dual"} if c is not None else set())
    assert fractions == {name: float(name == counted) for name in wanted}


def test_loss_and_metrics_written_out() -> None:
    rng = np.random.default_rng(1)
    new, old = rng.normal(size=(2, 6, 3, 2)) * 0.4
    advantage = rng.normal(size=6)
    weight = rng.random((6, 3)) * (rng.random((6, 3)) < 0.7)
    loss, sums = ppo.policy_loss(
        t(new), t(old), t(advantage), t(weight), clip_ratio_low=0.1, clip_ratio_high=0.3, clip_ratio_c=1.5
    )
    wanted = dict.fromkeys(("loss", "n", "ratio", "spread", "kl", "low", "high", "dual"), 0.0)
    for b in range(6):
        for h in range(3):
            for d in range(2):
                if weight[b, h] == 0:
                    continue
                r, gain = math.exp(new[b, h, d] - old[b, h, d]), advantage[b]
                term = max(-gain * r, -gain * min(max(r, 0.9), 1.3))
                if gain < 0:
                    term = min(term, -gain * 1.5)
                wanted["loss"] += weight[b, h] * term
                wanted["n"] += 1
                wanted["ratio"] += r
                wanted["spread"] += (r - 1) ** 2
                wanted["kl"] += r - 1 - math.log(r)
                wanted["low"] += gain < 0 and r < 0.9
                wanted["high"] += gain > 0 and r > 1.3
                wanted["dual"] += gain < 0 and r > 1.5
    assert min(wanted["low"], wanted["high"], wanted["dual"]) > 0  # all sides are there
    names = ("log_probs", "ratio", "ratio_spread", "approx_kl", "clip_low", "clip_high", "clip_dual")
    assert loss.item() == sums["policy_loss"].item() == pytest.approx(wanted["loss"], rel=1e-13)
    assert [sums[name].item() for name in names] == pytest.approx(list(wanted.values())[1:], rel=1e-12)
    assert {value.dtype for value in sums.values()} == {torch.float64}


@pytest.mark.parametrize("bad", [3.0, math.inf, -math.inf, math.nan])
def test_what_weighs_nothing_may_be_anything(bad: float) -> None:
    weight = t([[0.5, 0.5, 0.0], [0.25, 0.0, 0.0]])
    outcomes = []
    for value in (0.0, bad):
        arrays = np.random.default_rng(3).normal(size=(2, 2, 3, 2))
        for array in arrays:
            array[0, 2], array[1, 1:] = value, -value
        log_prob = t(arrays[0]).requires_grad_()
        loss, sums = ppo.policy_loss(log_prob, t(arrays[1]), t([1.0, -1.0]), weight, **CLIP)
        (loss + ppo.weighted_sum(log_prob, weight)).backward()
        assert log_prob.grad is not None
        outcomes.append((loss.item(), [one.item() for one in sums.values()], log_prob.grad.tolist()))
    assert outcomes[0] == outcomes[1]
    assert np.isfinite(outcomes[0][2]).all()


def test_a_policy_that_ran_away_gives_no_infinity() -> None:
    log_prob = t([[[1000.0]], [[-1000.0]]]).float().requires_grad_()
    old, advantage = t([[[-1.0]], [[-1.0]]]).float(), t([-1.0, 1.0]).float()
    loss, sums = ppo.policy_loss(log_prob, old, advantage, t([[1.0], [1.0]]).float(), **CLIP)
    loss.backward()
    assert log_prob.grad is not None
    assert loss.item() == pytest.approx(math.exp(20), rel=1e-6)
    assert all(
        math.isfinite(value) for value in [*log_prob.grad.flatten().tolist(), *(one.item() for one in sums.values())]
    )


# ---- values


def test_value_loss_by_hand() -> None:
    value = t([1.0, 2.0, 0.0]).requires_grad_()
    returns, old, weight = t([0.0, 3.0, 0.0]), t([1.5, 1.0, 0.0]), t([0.5, 0.25, 0.25])
    loss, sums = ppo.value_loss(value, returns, old, weight, clip=None)
    assert loss.item() == 0.5 * 1 + 0.25 * 1
    assert {name: one.item() for name, one in sums.items()} == {"value_loss": 0.75, "blocks": 3}
    # moved by -0.5 and 1, may move by 0.3: 1.2 and 1.3 stand in for them where that is worse
    clipped, sums = ppo.value_loss(value, returns, old, weight, clip=0.3)
    assert clipped.item() == pytest.approx(0.5 * 1.44 + 0.25 * 1.7**2, rel=1e-14)
    assert sums["value_clip_fraction"].item() == 2
    clipped.backward()
    assert value.grad is not None
    assert value.grad.tolist() == [0, 0, 0]
    away = t([1.8]).requires_grad_()  # moved away from its return: it may always come back
    ppo.value_loss(away, t([0.0]), t([1.5]), t([1.0]), clip=0.1)[0].backward()
    assert away.grad is not None
    assert away.grad.item() == pytest.approx(3.6)


def test_values_of_padding_may_be_anything() -> None:
    value = t([1.0, math.nan]).requires_grad_()
    loss, sums = ppo.value_loss(value, t([0.0, 0.0]), t([0.9, 0.0]), t([1.0, 0.0]), clip=0.05)
    loss.backward()
    assert value.grad is not None
    assert (loss.item(), sums["blocks"].item(), value.grad.tolist()) == (1.0, 1, [2.0, 0.0])

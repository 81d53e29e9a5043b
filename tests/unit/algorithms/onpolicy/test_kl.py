"""KL: its estimators by hand and in the mean over all choices, and what it costs from batch to batch."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
import torch

from understudy.algorithms import AlgorithmError
from understudy.algorithms.onpolicy import kl

LOG_2 = math.log(2.0)
ALL: tuple[Any, ...] = ("kl", "abs", "mse", "low_var_kl")


def t(values: object) -> torch.Tensor:
    return torch.tensor(np.asarray(values, np.float64))


@pytest.mark.parametrize(
    ("estimator", "twice", "half"),
    [  # as likely again as under the reference; half as likely
        ("kl", LOG_2, -LOG_2),
        ("abs", LOG_2, LOG_2),
        ("mse", LOG_2**2 / 2, LOG_2**2 / 2),
        ("low_var_kl", 0.5 - 1 + LOG_2, 2 - 1 - LOG_2),
    ],
)
def test_estimators_by_hand(estimator: Any, twice: float, half: float) -> None:
    found = kl.estimate(t([LOG_2, -LOG_2, -3.0]), t([0.0, 0.0, -3.0]), estimator)
    assert found.tolist() == pytest.approx([twice, half, 0.0], rel=1e-14)


def choices() -> tuple[torch.Tensor, torch.Tensor]:
    """All log-probs of a policy and of a reference over five choices."""
    logits = torch.tensor([0.3, -1.0, 0.7, 0.0, 0.1], dtype=torch.float64, requires_grad=True)
    return logits, torch.log_softmax(t([0.0, -0.5, 0.2, 0.4, -0.3]), dim=0)


@pytest.mark.parametrize("estimator", ALL)
def test_in_the_mean_over_all_choices_they_are_the_kl_or_close(estimator: Any) -> None:
    logits, reference = choices()
    log_prob = torch.log_softmax(logits, dim=0)
    true = (log_prob.exp() * (log_prob - reference)).sum().item()
    mean = (log_prob.exp() * kl.estimate(log_prob, reference, estimator)).sum().item()
    if estimator in ("kl", "low_var_kl"):
        assert mean == pytest.approx(true, rel=1e-12)
    else:
        assert mean > 0
        assert mean != pytest.approx(true, rel=1e-3)


@pytest.mark.parametrize("estimator", ALL)
def test_only_kl_has_no_gradient_in_the_mean(estimator: Any) -> None:
    logits, reference = choices()
    log_prob = torch.log_softmax(logits, dim=0)
    (log_prob.exp().detach() * kl.estimate(log_prob, reference, estimator)).sum().backward()
    assert logits.grad is not None
    assert (logits.grad.abs().max().item() < 1e-15) == (estimator == "kl")


@pytest.mark.parametrize("estimator", ALL)
def test_far_away_is_a_number(estimator: Any) -> None:
    assert kl.estimate(t([1000.0, -1000.0]).float(), t([0.0, 0.0]).float(), estimator).isfinite().all()


def test_small_distances_are_not_lost_in_float32() -> None:
    found = kl.estimate(torch.tensor([-2.0 + 1e-4]), torch.tensor([-2.0]), "low_var_kl").item()
    assert found == pytest.approx(0.5e-8, rel=0.1)


# ---- what it costs


def test_an_adaptive_price_rises_and_falls_by_hand() -> None:
    price = kl.AdaptiveKL(coef=0.1, target=0.05, horizon=100)
    price.update(0.055, 50)  # a tenth too far, half a horizon
    assert price.coef == pytest.approx(0.1 * 1.05)
    price.update(5.0, 50)  # much too far counts as a fifth
    assert price.coef == pytest.approx(0.1 * 1.05 * 1.1)
    price.update(0.0, 50)
    assert price.coef == pytest.approx(0.1 * 1.05 * 1.1 * 0.9)
    price.update(0.05, 50)
    assert price.coef == pytest.approx(0.1 * 1.05 * 1.1 * 0.9)
    price.update(0.0, 10**6)  # no more than one horizon at once, so it stays a price
    assert price.coef == pytest.approx(0.1 * 1.05 * 1.1 * 0.9 * 0.8)


def test_a_fixed_price_stays() -> None:
    price = kl.FixedKL(coef=0.1)
    price.update(100.0, 1000)
    assert price.coef == 0.1


def test_a_saved_price_is_gone_on_with() -> None:
    price = kl.AdaptiveKL(coef=0.1, target=0.05, horizon=100)
    price.update(1.0, 64)
    saved = json.loads(json.dumps(price.state()))
    another = kl.AdaptiveKL(coef=0.1, target=0.05, horizon=100)
    another.restore(saved)
    assert another == price
    fixed = kl.FixedKL(coef=0.1)
    fixed.restore(json.loads(json.dumps(fixed.state())))
    assert fixed == kl.FixedKL(coef=0.1)


def test_a_state_of_another_price_is_refused() -> None:
    fixed, adaptive = kl.FixedKL(coef=0.1), kl.AdaptiveKL(coef=0.3, target=1, horizon=1)
    with pytest.raises(AlgorithmError, match=r"kl_controller: .* saved with 'fixed', this run has 'adaptive'; resume"):
        adaptive.restore(fixed.state())
    with pytest.raises(AlgorithmError, match=r"kl_controller: .* saved with None, this run has 'fixed'; resume"):
        fixed.restore({})
    with pytest.raises(AlgorithmError, match=r"kl_coef: .* saved with 0\.2, this run has 0\.1; resume"):
        fixed.restore(kl.FixedKL(coef=0.2).state())
    for bad in (None, "1", math.nan, -1.0):
        with pytest.raises(AlgorithmError, match=r"kl_coef: expected a number of 0 or more in the saved state, got"):
            adaptive.restore({"kl_controller": "adaptive", "kl_coef": bad})
    assert (fixed.coef, adaptive.coef) == (0.1, 0.3)

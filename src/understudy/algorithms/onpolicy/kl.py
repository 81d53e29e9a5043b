"""KL divergence of a policy from a reference, estimated from log-probs of drawn actions, and control of its cost."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from understudy.algorithms.algorithm import AlgorithmError
from understudy.algorithms.onpolicy.config import Estimator
from understudy.algorithms.onpolicy.ppo_losses import MAX_LOG_RATIO

MAX_ERROR = 0.2  # largest relative distance from the target that an adaptive controller reacts to


def estimate(log_prob: Tensor, reference_log_prob: Tensor, estimator: Estimator) -> Tensor:
    """For each log-prob an estimate of KL(policy, reference), if the policy drew it; d = log_prob - reference.

    kl          d: unbiased, of either sign; its gradient is 0 on average, so it is of no use in a loss
    abs         |d|
    mse         d^2 / 2: biased a little, never negative, steady
    low_var_kl  exp(-d) - 1 + d: unbiased and never negative
    """
    difference = (log_prob - reference_log_prob).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if estimator == "kl":
        return difference
    if estimator == "abs":
        return difference.abs()
    if estimator == "mse":
        return 0.5 * difference.square()
    return torch.expm1(-difference) + difference


@dataclass
class FixedKL:
    """A fixed cost of KL divergence."""

    coef: float

    def update(self, kl: float, num_episodes: int) -> None:
        """Nothing."""

    def state(self) -> dict[str, Any]:
        """Plain JSON."""
        return {"kl_controller": "fixed", "kl_coef": self.coef}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Check that the saved cost is the same."""
        if _coef(state, "fixed") != self.coef:
            raise AlgorithmError(
                f"kl_coef: the state was saved with {state['kl_coef']}, this run has {self.coef}; "
                f"resume with the saved config, or begin a new run"
            )


@dataclass
class AdaptiveKL:
    """A cost that rises while the KL divergence is above `target`, and falls while it is below.

    An update multiplies it by 1 + error * num_episodes / horizon, where the error is kl / target - 1, from -0.2 to 0.2.
    """

    coef: float
    target: float  # KL per log-prob
    horizon: float  # episodes

    def update(self, kl: float, num_episodes: int) -> None:
        """Set the price of the next batch by the KL of this one."""
        error = min(max(kl / self.target - 1.0, -MAX_ERROR), MAX_ERROR)
        self.coef *= 1.0 + error * min(num_episodes / self.horizon, 1.0)

    def state(self) -> dict[str, Any]:
        """Plain JSON."""
        return {"kl_controller": "adaptive", "kl_coef": self.coef}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on with the saved price."""
        self.coef = _coef(state, "adaptive")


def _coef(state: Mapping[str, Any], controller: str) -> float:
    """The price that a saved state of this kind of controller holds."""
    if state.get("kl_controller") != controller:
        raise AlgorithmError(
            f"kl_controller: the state was saved with {state.get('kl_controller')!r}, this run has {controller!r}; "
            f"resume with the saved config, or begin a new run"
        )
    coef = state.get("kl_coef")
    if not isinstance(coef, float) or not (math.isfinite(coef) and coef >= 0):
        raise AlgorithmError(f"kl_coef: expected a number of 0 or more in the saved state, got {coef!r}; save state()")
    return coef

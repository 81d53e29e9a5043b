"""A batch of blocks and a small network that decides on such, which the tests of policy gradients share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from understudy.algorithms.onpolicy.policy_gradient import (
    MiniBatch,
    PolicyGradient,
    PolicyGradientConfig,
    PreparedBatch,
    loss_inputs,
)
from understudy.core import BlockBatch
from understudy.policies import Evaluated

H, D, K, SEES = 3, 2, 4, 5  # actions of a block, tokens of an action, values of a token, numbers of an observation
LENGTHS = (3, 1, 2, 4, 1, 3)  # blocks of each episode
N = sum(LENGTHS)
FULL: dict[str, Any] = {
    "adv_estimator": "gae",
    "clip_ratio_c": 1.5,
    "entropy_coeff": 0.02,
    "value_clip": 0.3,
    "kl_in": "loss",
    "kl_coef": 0.1,
}


class Network(torch.nn.Module):
    """Tokens, each drawn from K values, and a value; in float64."""

    def __init__(self, seed: int = 0):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.tokens = torch.nn.Parameter(torch.randn(SEES, H * D * K, generator=generator, dtype=torch.float64) * 0.3)
        self.value = torch.nn.Parameter(torch.randn(SEES, generator=generator, dtype=torch.float64) * 0.3)

    def forward(self, batch: BlockBatch, chosen: np.ndarray) -> Evaluated:
        seen = torch.from_numpy(batch.observation["state"][chosen])
        all_log_probs = (seen @ self.tokens).reshape(-1, H, D, K).log_softmax(dim=-1)
        tokens = torch.from_numpy(batch.replay["tokens"][chosen])
        return Evaluated(
            log_prob=all_log_probs.gather(-1, tokens[..., None])[..., 0],
            entropy=-(all_log_probs.exp() * all_log_probs).sum(dim=-1),
            value=seen @ self.value,
        )

    def gradient(self) -> np.ndarray:
        found = [weight.grad for weight in self.parameters()]
        return np.concatenate([np.zeros(0)] + [one.numpy().ravel() for one in found if one is not None])


def blocks(seed: int = 0, **changes: Any) -> BlockBatch:
    """Six episodes of two groups, some of which end within a block, as recorded by a network a little off."""
    rng = np.random.default_rng(seed)
    executed = np.ones((N, H), bool)
    ends = np.cumsum(LENGTHS) - 1
    executed[ends[[0, 3]], 1:] = executed[ends[[2]], 2:] = False
    drawn: dict[str, Any] = {
        "observation": {"state": rng.normal(size=(N, SEES))},
        "instruction": ("go",) * N,
        "replay": {"tokens": rng.integers(0, K, (N, H, D))},
        "log_prob": np.zeros((N, H, D), np.float32),
        "executed": executed,
        "reward": (rng.random((N, H)) * executed).astype(np.float32),
        "value": rng.normal(size=N).astype(np.float32),
        "next_value": rng.normal(size=N).astype(np.float32),
        "policy_version": np.zeros(N, np.int64),
        "episode": np.repeat(np.arange(6), LENGTHS),
        "group": np.array([4, 4, 9, 4, 9, 9]),
        "success": np.array([True, False, False, True, False, True]),
        "terminated": np.array([True, False, False, True, False, True]),
    }
    recorded = Network(seed=1)(BlockBatch(**drawn), np.arange(N)).log_prob
    drawn["log_prob"] = recorded.detach().numpy().astype(np.float32)
    return BlockBatch(**{**drawn, **changes})


def reference(batch: BlockBatch) -> np.ndarray:
    return Network(seed=2)(batch, np.arange(N)).log_prob.detach().numpy().astype(np.float32)


def of(**options: Any) -> PolicyGradient:
    return PolicyGradient(PolicyGradientConfig(**options))


def whole(algorithm: PolicyGradient, batch: BlockBatch) -> MiniBatch:
    """All rows as one mini batch."""
    (found,) = PolicyGradient(
        replace(algorithm.config, ppo_epochs=1, ppo_mini_batch_size=N, shuffle=False)
    ).mini_batches(batch, seed=0)
    return found


def learned(
    algorithm: PolicyGradient, batch: BlockBatch, prepared: PreparedBatch, parts: Sequence[MiniBatch]
) -> tuple[np.ndarray, dict[str, float]]:
    """The gradient and the sums, added up over parts."""
    network = Network()
    sums: dict[str, float] = {}
    for part in parts:
        loss, more = algorithm.loss(network(batch, part.rows), loss_inputs(prepared, part))
        loss.backward()
        sums = {name: sums.get(name, 0.0) + float(value) for name, value in more.items()}
    return network.gradient(), sums

"""The losses against sums written out in float64 numpy, numbers worked out by hand, and recorded updates."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.unit.algorithms.batches import CAMERAS, GRIPPER, STATE, random_batch, small_actor, small_sac

from understudy.algorithms import (
    SAC,
    Algorithm,
    ClassifierTraining,
    ClassifierTrainingConfig,
    Cloning,
    CloningConfig,
)
from understudy.algorithms.offpolicy import sac_losses as losses
from understudy.core import Source, StepSpec, TransitionBatch
from understudy.policies import ClassifierConfig, Inputs, Stats
from understudy.policies.rlpd import tanh_normal

torch.set_num_threads(1)

RNG = np.random.default_rng(5)
B, E, K, D = 7, 4, 3, 2
REWARD, WEIGHT = RNG.normal(size=B), RNG.random(B)
TERMINATED = np.array([0, 1, 0, 0, 1, 0, 0], float)
NUM_STEPS = np.array([1, 1, 3, 2, 2, 1, 5], float)
Q, NEXT_Q, LOG_PROB = RNG.normal(size=(E, B)), RNG.normal(size=(E, B)), RNG.normal(size=B)
VALUES, NEXT_VALUES, NEXT_TARGET = (RNG.normal(size=(B, K)) for _ in range(3))
CHOICE = np.array([0, 2, 1, 1, 0, 2, 2])
MEAN, LOG_STD, PRE = RNG.normal(size=(B, D)), RNG.uniform(-1, 0.5, (B, D)), RNG.normal(size=(B, D))
LABEL = np.array([1, 0, 0, 0, 1, 0, 0], float)
GAMMA = 0.9


def t(array: object) -> torch.Tensor:
    return torch.tensor(np.asarray(array))


def close(found: torch.Tensor, wanted: object) -> None:
    np.testing.assert_allclose(found.numpy(), np.asarray(wanted), rtol=1e-13, atol=1e-13)


def test_bellman_target() -> None:
    wanted = [REWARD[b] + (0.0 if TERMINATED[b] else GAMMA ** NUM_STEPS[b] * NEXT_Q[0, b]) for b in range(B)]
    close(losses.bellman_target(t(REWARD), t(TERMINATED), t(NUM_STEPS), t(NEXT_Q[0]), discount=GAMMA), wanted)


def test_bellman_target_by_hand() -> None:
    found = losses.bellman_target(
        t([1.0, 1.0, 1.0]), t([0.0, 1.0, 0.0]), t([1.0, 1.0, 2.0]), t([10.0, 10.0, 10.0]), discount=0.5
    )
    assert found.tolist() == [6.0, 1.0, 3.5]


def test_pessimistic_value() -> None:
    least = [min(NEXT_Q[:, b]) for b in range(B)]
    close(losses.pessimistic(t(NEXT_Q), None, t(LOG_PROB)), least)
    close(losses.pessimistic(t(NEXT_Q), t(0.3), t(LOG_PROB)), [least[b] - 0.3 * LOG_PROB[b] for b in range(B)])


def test_critic_loss() -> None:
    wanted = sum(WEIGHT[b] * (Q[e, b] - REWARD[b]) ** 2 for e in range(E) for b in range(B)) / (E * B)
    close(losses.critic_loss(t(Q), t(REWARD), t(WEIGHT)), wanted)


def test_critic_loss_by_hand() -> None:
    found = losses.critic_loss(t([[1.0, 2.0], [3.0, 2.0]]), t([1.0, 1.0]), t([1.0, 0.5]))
    assert found.item() == ((0 + 4) / 2 * 1.0 + (1 + 1) / 2 * 0.5) / 2  # 1.25


def test_actor_loss() -> None:
    wanted = sum(WEIGHT[b] * (0.2 * LOG_PROB[b] - sum(Q[:, b]) / E) for b in range(B)) / B
    close(losses.actor_loss(t(Q), t(LOG_PROB), t(0.2), t(WEIGHT)), wanted)


def test_temperature_loss_and_its_direction() -> None:
    log_temperature = torch.tensor(-1.5, dtype=torch.float64, requires_grad=True)
    for target in (-5.0, 5.0):
        found = losses.temperature_loss(log_temperature, t(LOG_PROB), target)
        close(found.detach(), math.exp(-1.5) * (-LOG_PROB.mean() - target))
        (slope,) = torch.autograd.grad(found, log_temperature)
        too_random = -LOG_PROB.mean() > target
        assert (slope.item() > 0) == too_random  # a step down the slope lowers the temperature then


def test_gripper_losses() -> None:
    best = [int(np.argmax(NEXT_VALUES[b])) for b in range(B)]
    close(losses.double_q(t(NEXT_VALUES), t(NEXT_TARGET)), [NEXT_TARGET[b, best[b]] for b in range(B)])
    wanted = sum(WEIGHT[b] * (VALUES[b, CHOICE[b]] - REWARD[b]) ** 2 for b in range(B)) / B
    close(losses.gripper_loss(t(VALUES), t(CHOICE), t(REWARD), t(WEIGHT)), wanted)
    odds = [VALUES[b, CHOICE[b]] - math.log(sum(math.exp(v) for v in VALUES[b])) for b in range(B)]
    close(losses.choice_loss(t(VALUES), t(CHOICE), t(WEIGHT)), -sum(WEIGHT * odds) / B)


def test_bc_losses() -> None:
    wanted = sum(WEIGHT[b] * ((MEAN[b] - PRE[b]) ** 2).sum() / D for b in range(B)) / B
    close(losses.bc_mse(t(MEAN), t(PRE), t(WEIGHT)), wanted)
    close(losses.bc_likelihood(t(LOG_PROB), t(WEIGHT)), -sum(WEIGHT * LOG_PROB) / B)


def test_success_loss_and_balance() -> None:
    logits = VALUES[:, 0]
    chance = 1 / (1 + np.exp(-logits))
    wanted = -sum(WEIGHT * (LABEL * np.log(chance) + (1 - LABEL) * np.log(1 - chance))) / B
    close(losses.success_loss(t(logits), t(LABEL), t(WEIGHT)), wanted)
    close(losses.balancing_weight(t(LABEL)), np.where(LABEL == 1, 3.5 / 2, 3.5 / 5))
    close(losses.balancing_weight(t(np.zeros(3))), np.ones(3))
    close(losses.balancing_weight(t(np.ones(3))), np.ones(3))


def test_tanh_normal_log_prob() -> None:
    std = np.exp(LOG_STD)
    normal = -0.5 * ((PRE - MEAN) / std) ** 2 - np.log(std * math.sqrt(2 * math.pi))
    wanted = (normal - np.log(1 - np.tanh(PRE) ** 2)).sum(axis=1)
    np.testing.assert_allclose(tanh_normal.log_prob(t(PRE), t(MEAN), t(LOG_STD)).numpy(), wanted, rtol=1e-11)
    noise = (PRE - MEAN) / std
    np.testing.assert_allclose(tanh_normal.log_prob_of_noise(t(noise), t(PRE), t(LOG_STD)).numpy(), wanted, rtol=1e-11)


def test_tanh_normal_density_sums_to_one() -> None:
    action = np.linspace(-1, 1, 200_001)[1:-1]
    pre = t(np.arctanh(action))[:, None]
    density = tanh_normal.log_prob(pre, torch.full_like(pre, 0.4), torch.full_like(pre, -0.5)).exp().numpy()
    assert abs((density[1:] + density[:-1]).sum() * (action[1] - action[0]) / 2 - 1) < 1e-6


@pytest.mark.parametrize("log_std", [-3.0, -1.0, 0.0])
def test_tanh_normal_entropy(log_std: float) -> None:
    """Against the integral of -p log p over the action, on a fine grid in u."""
    mean = 0.7
    u = np.linspace(mean - 12 * math.exp(log_std), mean + 12 * math.exp(log_std), 400_001)
    normal = np.exp(-0.5 * ((u - mean) / math.exp(log_std)) ** 2) / (math.exp(log_std) * math.sqrt(2 * math.pi))
    one = torch.tensor([[log_std]], dtype=torch.float64)
    log_p = tanh_normal.log_prob(t(u)[:, None], torch.tensor([[mean]], dtype=torch.float64), one).numpy()
    wanted = -(normal * log_p).sum() * (u[1] - u[0])
    found = tanh_normal.entropy(torch.tensor([[mean]], dtype=torch.float64), one).item()
    assert abs(found - wanted) < 1e-3


# ---- traces: twenty updates of each algorithm, recorded when SAC still had an Adam of its own over flat weights


def traced_batch(spec: StepSpec, seed: int) -> TransitionBatch:
    rng = np.random.default_rng(100 + seed)
    return random_batch(
        spec,
        16,
        seed,
        source=np.where(rng.random(16) < 0.5, Source.HUMAN, Source.POLICY).astype(np.uint8),
        weight=rng.random(16).astype(np.float32),
        extras={"grasp_penalty": -rng.random(16).astype(np.float32)},
    )


def traced_sac() -> SAC:
    return small_sac(
        CAMERAS,
        actor=small_actor(gripper=GRIPPER),
        num_critics=4,
        num_target_critics=2,
        critic_steps=2,
        backup_entropy=True,
        bc_weight=0.5,
        gripper_penalty="grasp_penalty",
    )


def traced_cloning() -> Cloning:
    config = CloningConfig(actor=small_actor(gripper=GRIPPER), loss="likelihood")
    return Cloning(config, CAMERAS, Stats.none(Inputs(CAMERAS.observation)), seed=1)


def traced_classifier() -> ClassifierTraining:
    config = ClassifierTrainingConfig(classifier=ClassifierConfig(encoder=small_actor().encoder, hidden=(8,)))
    return ClassifierTraining(config, CAMERAS.observation, Stats.none(Inputs(CAMERAS.observation)), seed=1)


TRACED: dict[str, tuple[StepSpec, Callable[[], Algorithm]]] = {
    "sac": (STATE, lambda: small_sac(STATE, critic_lr=1e-3, actor_lr=1e-3)),
    "sac with cameras, gripper and bc_weight": (CAMERAS, traced_sac),
    "cloning": (CAMERAS, traced_cloning),
    "classifier": (CAMERAS, traced_classifier),
}
TRACES = json.loads(Path(__file__).with_name("loss_traces.json").read_text())


@pytest.mark.parametrize("name", TRACED)
def test_updates_give_the_recorded_metrics(name: str) -> None:
    spec, make = TRACED[name]
    algorithm, wanted = make(), TRACES[name]
    for update in range(20):
        metrics = algorithm.update(traced_batch(spec, update))
        expected = {metric: values[update] for metric, values in wanted.items() if values[update] is not None}
        assert metrics == pytest.approx(expected, rel=1e-6, abs=1e-6), update

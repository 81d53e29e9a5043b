"""Flow matching as numbers: lines, loss and steps, and that noise in the steps leaves the distribution alone."""

from __future__ import annotations

import math

import pytest
import torch

from understudy.policies.flow import flow_matching as flow


def test_lines_and_their_velocities_by_hand() -> None:
    noise, action = torch.tensor([[[2.0, -1.0]]]), torch.tensor([[[0.0, 1.0]]])
    assert flow.interpolated(noise, action, torch.tensor([0.25])).tolist() == [[[1.5, -0.5]]]
    # x1 - x0 is (-2, 2): a velocity of (-1, 2) is off by 1 and 0
    assert flow.squared_errors(torch.tensor([[[-1.0, 2.0]]]), noise, action).tolist() == [[0.5]]


def test_towards_good_by_hand() -> None:
    """From 1 without knowing to 3 where it is good: half the way, all the way, and half as far again."""
    plain, good = torch.tensor([1.0, -2.0]), torch.tensor([3.0, -2.0])
    found = [flow.towards_good(plain, good, guidance).tolist() for guidance in (0.0, 0.5, 1.0, 1.5)]
    assert found == [[1.0, -2.0], [2.0, -2.0], [3.0, -2.0], [4.0, -2.0]]


def test_the_noise_of_steps_by_hand() -> None:
    """sigma^2 = a^2 (1 - t) / max(t, 1/4), over steps of length 1/4."""
    assert flow.times(4) == [0.0, 0.25, 0.5, 0.75]
    wanted = [0.5 * math.sqrt(ratio / 4) for ratio in (4.0, 3.0, 1.0, 1.0 / 3.0)]
    assert flow.noise_stds(4, 0.5) == pytest.approx(wanted, rel=1e-13)
    assert flow.noise_stds(1, 0.5) == [0.5]


def test_a_noisy_step_by_hand() -> None:
    """From x = 2 at t = 1/2 with v = 1, std 0.25: 2 + 1/4 - 0.0625 / (2 * 0.5) * (2 - 0.5)."""
    x, v = torch.tensor(2.0, dtype=torch.float64), torch.tensor(1.0, dtype=torch.float64)
    assert flow.step_mean(x, v, 4, 0.5, 0.25).item() == pytest.approx(2.25 - 0.0625 * 1.5, rel=1e-13)
    assert flow.step_mean(x, v, 4, 0.5, 0.0).item() == 2.25


def test_log_probs_of_a_chain_by_hand() -> None:
    """Two steps of two numbers, of stds 0.4 and 0.4 / sqrt(2), at temperature 2."""
    chain = torch.tensor([[[[1.0, 0.0]], [[0.5, 0.5]], [[0.0, 0.25]]]], dtype=torch.float64)  # [1, 3, 1, 2]
    velocity = torch.tensor([[[[1.0, -1.0]], [[0.0, 2.0]]]], dtype=torch.float64)
    mean, std = flow.sde_steps(chain[:, :-1], velocity, 0.4)
    found = flow.step_log_probs(chain[:, 1:], mean, 2.0 * std)
    assert found.shape == (1, 1, 2)

    def density(to: float, mean: float, std: float) -> float:
        return -0.5 * ((to - mean) / std) ** 2 - math.log(std) - 0.5 * math.log(2 * math.pi)

    first, second = 0.4 * math.sqrt(2 / 2), 0.4 * math.sqrt(1 / 2)
    pull = [first**2 / 2, second**2]  # std^2 / (2 (1 - t))
    means = [
        [1.0 + 0.5 - pull[0] * 1.0, 0.0 - 0.5 - pull[0] * 0.0],
        [0.5 + 0.0 - pull[1] * (0.5 - 0.0), 0.5 + 1.0 - pull[1] * (0.5 - 1.0)],
    ]
    wanted = [
        density(0.5, means[0][0], 2 * first) + density(0.5, means[0][1], 2 * first),
        density(0.0, means[1][0], 2 * second) + density(0.25, means[1][1], 2 * second),
    ]
    assert found[0, 0].tolist() == pytest.approx(wanted, rel=1e-12)


def test_entropy_and_noise_by_hand() -> None:
    std = torch.full((1, 2, 1, 3), 0.5, dtype=torch.float64)  # two steps of one action with three numbers
    wanted = 3 * (0.5 * math.log(2 * math.pi * math.e * 0.25))
    assert flow.step_entropies(std).tolist() == [[[pytest.approx(wanted, rel=1e-13)] * 2]]
    noise = torch.tensor([[[1.0, -2.0]]], dtype=torch.float64)
    wanted = -0.5 * (1 + 4) / 4 - 2 * math.log(2.0) - math.log(2 * math.pi)
    assert flow.noise_log_probs(noise, 2.0).item() == pytest.approx(wanted, rel=1e-13)


def test_a_learned_std_stays_between_its_bounds() -> None:
    raw = torch.tensor([-50.0, 0.0, 50.0, math.atanh(0.5)], dtype=torch.float64)
    found = flow.bounded_std(raw, (0.04, 0.16)).tolist()
    assert found == pytest.approx([0.04, 0.08, 0.16, 0.04 * 4**0.75], rel=1e-12)


@pytest.mark.parametrize("level", [0.0, 0.5, 1.0])
def test_noise_in_the_steps_leaves_the_distribution_of_blocks_as_it_is(level: float) -> None:
    """For actions that are normal, with mean 0.4 and spread 0.3, the best velocity is known. 200 steps, 20,000 rows."""
    mean, spread, num_steps = 0.4, 0.3, 200
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(20_000, generator=generator, dtype=torch.float64)
    for time, std in zip(flow.times(num_steps), flow.noise_stds(num_steps, level), strict=True):
        variance = (1 - time) ** 2 + (time * spread) ** 2
        velocity = mean + (time * spread**2 - (1 - time)) / variance * (x - time * mean)
        drawn = torch.randn(x.shape, generator=generator, dtype=torch.float64)
        x = flow.step_mean(x, velocity, num_steps, time, std) + std * drawn
    assert x.mean().item() == pytest.approx(mean, abs=0.02)
    assert x.std().item() == pytest.approx(spread, rel=0.04)

"""Guidance: the weights and the guided velocity by hand, and what a flow policy makes of them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from tests.unit.policies.rtc.driving import H, flow_policy

from understudy.core import ArraySpec
from understudy.envs import ToyTable
from understudy.policies import Acted, Sampling
from understudy.policies.flow import flow_matching as flow
from understudy.policies.rtc import Guidance, prefix_weights

INSTRUCTION = "stack the red block on the blue block"


def test_weights_by_hand() -> None:
    """H = 8, d = 2, horizon 5: c = (5 - i) / 4 for i = 2, 3, 4."""
    falling = [0.75, 0.5, 0.25]
    assert prefix_weights(8, 2, 5, "linear").tolist() == [1, 1, *falling, 0, 0, 0]
    wanted = [c * (math.exp(c) - 1) / (math.e - 1) for c in falling]
    assert prefix_weights(8, 2, 5, "exp").tolist() == pytest.approx([1, 1, *wanted, 0, 0, 0], rel=1e-6)
    assert prefix_weights(8, 2, 5, "ones").tolist() == [1, 1, 1, 1, 1, 0, 0, 0]
    assert prefix_weights(8, 2, 5, "zeros").tolist() == [1, 1, 0, 0, 0, 0, 0, 0]
    assert prefix_weights(4, 4, 4, "exp").tolist() == [1, 1, 1, 1]
    assert prefix_weights(4, 0, 0, "linear").tolist() == [0, 0, 0, 0]


def test_the_weight_of_guidance_by_hand() -> None:
    """(1 - t) / (t r^2), r^2 = (1 - t)^2 / (t^2 + (1 - t)^2), at t = 1/4: 3 / (9/10) = 10/3."""
    assert flow.guidance_weight(0.25, 10.0) == pytest.approx(10 / 3, rel=1e-13)
    assert flow.guidance_weight(0.5, 10.0) == pytest.approx(2.0, rel=1e-13)
    assert flow.guidance_weight(0.25, 3.0) == 3.0
    assert flow.guidance_weight(0.0, 7.0) == 7.0


def test_a_guided_velocity_by_hand() -> None:
    """With v = 2 x at t = 1/2, x becomes 2 x, whose gradient is 2; the weight of guidance is 2."""
    x = torch.tensor([[[1.0], [1.0]]], dtype=torch.float64, requires_grad=True)
    wanted, weight = torch.tensor([[[5.0], [5.0]]], dtype=torch.float64), torch.tensor([[1.0, 0.5]])
    found = flow.guided(2.0 * x, x, wanted, weight, 0.5, 10.0)
    assert found.flatten().tolist() == [2.0 + 2.0 * 2.0 * 3.0, 2.0 + 2.0 * 2.0 * 1.5]
    assert not found.requires_grad


def guidance(num: int, **change: Any) -> Guidance:
    rng = np.random.default_rng(3)
    options: dict[str, Any] = {
        "previous": rng.uniform(-0.9, 0.9, (num, H, 4)).astype(np.float32),
        "has_previous": np.arange(num) != 1,
        "method": "rtc",
        "inference_delay": 2,
        "execution_horizon": 5,
        "prefix_attention_schedule": "exp",
        "max_guidance_weight": 4.0,
    }
    return Guidance(**{**options, **change})


def act(policy: Any, rows: list[int], guided: Guidance | None) -> Acted:
    spec: ArraySpec = ToyTable(cameras=False).step_spec.observation.flat["state"]
    state = np.random.default_rng(0).normal(size=(6, *spec.fixed_shape)).astype(np.float32)[rows]
    rngs = [np.random.default_rng([5, row]) for row in rows]
    if guided is not None:
        chosen = {"previous": np.asarray(guided.previous)[rows], "has_previous": guided.has_previous[rows]}
        guided = guidance(0, **{**vars(guided), **chosen})
    found: Acted = policy.act(
        {"state": state}, [INSTRUCTION] * len(rows), rngs=rngs, sampling=Sampling(), guidance=guided
    )
    return found


@pytest.mark.parametrize("towards_good", [None, 1.5])  # the other guidance, of RECAP
@pytest.mark.parametrize("noise_level", [0.0, 0.5])
@pytest.mark.parametrize("method", ["rtc", "inpaint"])
def test_a_guided_row_depends_on_itself_alone_and_evaluate_finds_its_log_probs(
    method: str, noise_level: float, towards_good: float | None
) -> None:
    policy = flow_policy(noise_level=noise_level)
    if towards_good is not None:
        policy = policy.with_advantage(towards_good)
    all_of_it = guidance(6, method=method)
    together, plain = act(policy, list(range(6)), all_of_it), act(policy, list(range(6)), None)
    for rows in ([0], [4, 1, 2]):
        alone = act(policy, rows, all_of_it)
        np.testing.assert_array_equal(alone.replay["chain"], together.replay["chain"][rows])
        np.testing.assert_array_equal(alone.log_prob, together.log_prob[rows])
    np.testing.assert_array_equal(together.action[1], plain.action[1])  # it continues nothing
    assert np.abs(together.action[0] - plain.action[0]).max() > 0.01
    spec = ToyTable(cameras=False).step_spec.observation.flat["state"]
    state = np.random.default_rng(0).normal(size=(6, *spec.fixed_shape)).astype(np.float32)
    found = policy.evaluate({"state": state}, [INSTRUCTION] * 6, together.replay, sampling=Sampling())
    np.testing.assert_allclose(found.log_prob.detach().numpy(), together.log_prob, rtol=0, atol=3e-5)


def test_guidance_brings_the_beginning_close_and_the_end_less() -> None:
    policy = flow_policy()
    wanted = guidance(6)
    plain, guided = act(policy, list(range(6)), None), act(policy, list(range(6)), wanted)

    def away(acted: Acted, steps: slice) -> float:
        rows = wanted.has_previous
        return float(np.abs(acted.action[rows, steps] - np.asarray(wanted.previous)[rows, steps]).mean())

    assert away(guided, slice(0, 2)) < 0.25 * away(plain, slice(0, 2))
    assert away(guided, slice(2, 4)) < 0.8 * away(plain, slice(2, 4))
    assert abs(away(guided, slice(5, 8)) - away(plain, slice(5, 8))) < 0.5 * away(plain, slice(5, 8))

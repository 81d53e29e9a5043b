"""The contract of a block policy: a row depends on itself alone, and what was drawn is weighed the same again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest

pytest.importorskip("transformers")

from tests.unit.policies.vla.test_policy import INSTRUCTIONS, SAMPLED, TINY, act, observations, policy_of, told

from understudy.core import ArraySpec, Spec, StepSpec
from understudy.core import tree as trees
from understudy.policies import Acted, Sampling
from understudy.policies.vla import VLAConfig, VLAPolicy

PICTURE = ArraySpec(shape=(64, 64, 3), dtype="uint8")
SPEC = StepSpec(
    observation=Spec({"front": PICTURE, "state": ArraySpec(shape=(4,), dtype="float32")}),
    action=Spec(ArraySpec(shape=(4,), dtype="float32", low=-1.0, high=1.0)),
)
FULL = VLAConfig(use_proprio=("state",), value_head=True)  # of the size that is used


def row(acted: Acted, number: int) -> dict[str, Any]:
    assert acted.value is not None
    return {
        "action": acted.action[number],
        "tokens": acted.replay["tokens"][number],
        "log_prob": acted.log_prob[number],
        "value": acted.value[number],
    }


def among(policy: VLAPolicy, place: int, num: int) -> dict[str, Any]:
    """One and the same row at a place among others that are new each time."""
    mine, seen = observations(1, seed=0, spec=SPEC), observations(num, seed=100 * num + place, spec=SPEC)
    for name, array in seen.items():
        array[place] = mine[name][0]
    instructions = told(num + place)[place:]
    instructions[place] = INSTRUCTIONS[1]
    rngs = [np.random.default_rng([num, place, number]) for number in range(num)]
    rngs[place] = np.random.default_rng(7)
    return row(policy.act(seen, instructions, rngs=rngs, sampling=SAMPLED), place)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_row_comes_to_the_same_bits_whatever_the_others_are_and_however_many(
    dtype: Literal["float32", "bfloat16"],
) -> None:
    policy = policy_of(replace(FULL, dtype=dtype), SPEC, shaken=0.1)
    alone = among(policy, 0, 1)
    places = [(place, num) for num in (2, 3, 7, 8, 9, 17) for place in sorted({0, 1, num // 2, num - 1})]
    for place, num in places:
        assert trees.equal(among(policy, place, num), alone), (place, num)
    other = row(act(policy, observations(1, seed=3, spec=SPEC), told(1)), 0)
    assert not trees.equal(other, alone)


def test_what_was_drawn_is_weighed_the_same_again_in_batches_of_any_size() -> None:
    policy = policy_of(FULL, SPEC, shaken=0.1)
    for sampling in (SAMPLED, Sampling(temperature=0.6), Sampling(temperature=1.7, greedy=True)):
        seen = observations(13, spec=SPEC)
        acted = act(policy, seen, told(13), sampling)
        assert acted.value is not None
        for size in (1, 3, 13):
            part = {name: array[:size] for name, array in seen.items()}
            found = policy.evaluate(part, told(size), {"tokens": acted.replay["tokens"][:size]}, sampling=sampling)
            assert found.value is not None
            np.testing.assert_allclose(found.log_prob.detach().numpy(), acted.log_prob[:size], atol=1e-5)
            np.testing.assert_allclose(found.value.detach().numpy(), acted.value[:size], atol=1e-5)
        other = policy.evaluate(seen, told(13), acted.replay, sampling=Sampling(temperature=1.1 * sampling.temperature))
        assert np.abs(other.log_prob.detach().numpy() - acted.log_prob).max() > 1e-2


def test_log_probs_and_entropy_are_those_of_a_distribution() -> None:
    policy = policy_of(replace(TINY, value_head=True))
    seen, num_bins = observations(2), TINY.num_bins
    total, surprise = np.zeros((2, 3, 2)), np.zeros((2, 3, 2))
    for token in range(num_bins):
        found = policy.evaluate(seen, told(2), {"tokens": np.full((2, 3, 2), token)}, sampling=SAMPLED)
        log_prob = found.log_prob.detach().double().numpy()
        total += np.exp(log_prob)
        surprise -= np.exp(log_prob) * log_prob
    np.testing.assert_allclose(total, 1.0, atol=1e-5)
    np.testing.assert_allclose(found.entropy.detach().numpy(), surprise, atol=1e-5)
    assert surprise.min() < 0.95 * np.log(num_bins)

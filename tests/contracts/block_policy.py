"""What every BlockPolicy promises, as functions that tests call with a policy of theirs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from understudy.core import Spec
from understudy.core import tree as trees
from understudy.policies import BlockPolicy, Sampling

SAMPLED, HOT, GREEDY = Sampling(), Sampling(temperature=1.6), Sampling(temperature=0.7, greedy=True)


def rngs(num: int, seed: int = 0) -> list[np.random.Generator]:
    return [np.random.default_rng([seed, row]) for row in range(num)]


def rows(observation: Any, chosen: Sequence[int]) -> Any:
    return trees.map_leaves(lambda leaf: np.asarray(leaf)[list(chosen)], observation)


def numbers(value: Any) -> Any:
    """An array of a tensor that may want gradients."""
    return value.detach().numpy() if hasattr(value, "detach") else value


def check_shapes(
    policy: BlockPolicy, observation: Any, said: Sequence[str], action: Spec, *, density: bool = False
) -> None:
    """`density`: log-probs are those of a density, which may be more than 1."""
    num, steps = len(said), policy.block_steps
    acted = policy.act(observation, said, rngs=rngs(num), sampling=SAMPLED)
    assert acted.version == policy.version
    assert acted.log_prob.shape == (num, steps, policy.log_prob_size)
    assert acted.log_prob.dtype == np.float32
    assert density or (acted.log_prob <= 0).all()
    assert np.isfinite(acted.log_prob).all()
    for row in range(num):
        policy.replay_spec.check({name: array[row] for name, array in acted.replay.items()}, "replay")
        for step in range(steps):
            action.check(trees.map_leaves(lambda leaf, at=(row, step): leaf[at], acted.action), "action")
    assert (acted.value is not None) == policy.has_value
    if acted.value is not None:
        assert acted.value.shape == (num,)
        assert acted.value.dtype == np.float32


def check_evaluate_finds_what_act_recorded(
    policy: BlockPolicy, observation: Any, said: Sequence[str], *, density: bool = False
) -> None:
    for sampling in (SAMPLED, HOT, GREEDY):
        acted = policy.act(observation, said, rngs=rngs(len(said)), sampling=sampling)
        evaluated = policy.evaluate(observation, said, acted.replay, sampling=sampling)
        np.testing.assert_allclose(numbers(evaluated.log_prob), acted.log_prob, rtol=0, atol=3e-5)
        entropy = numbers(evaluated.entropy)
        assert entropy.shape == acted.log_prob.shape
        assert density or (entropy > 0).all()
        if policy.has_value:
            np.testing.assert_allclose(numbers(evaluated.value), acted.value, rtol=0, atol=3e-5)
        else:
            assert evaluated.value is None
        other = policy.evaluate(observation, said, acted.replay, sampling=Sampling(temperature=3.0))
        assert np.abs(numbers(other.log_prob) - acted.log_prob).max() > 1e-2


def check_rows_are_alone(policy: BlockPolicy, observation: Any, said: Sequence[str]) -> None:
    """To the same bits, in any company and order."""
    together = policy.act(observation, said, rngs=rngs(len(said)), sampling=HOT)
    for chosen in ([0], [len(said) - 1, 0], list(reversed(range(len(said))))):
        drawn = [rngs(len(said))[row] for row in chosen]
        alone = policy.act(rows(observation, chosen), [said[row] for row in chosen], rngs=drawn, sampling=HOT)
        for name, array in together.replay.items():
            np.testing.assert_array_equal(alone.replay[name], array[chosen])
        np.testing.assert_array_equal(alone.log_prob, together.log_prob[chosen])
        if policy.has_value:
            np.testing.assert_array_equal(alone.value, together.value[chosen])  # type: ignore[index]


def check_chance(policy: BlockPolicy, observation: Any, said: Sequence[str]) -> None:
    num = len(said)
    first, again, other = (
        policy.act(observation, said, rngs=rngs(num, seed), sampling=HOT).replay for seed in (1, 1, 2)
    )
    assert trees.equal(first, again)
    assert not trees.equal(first, other)
    used = rngs(num)
    most_likely = policy.act(observation, said, rngs=used, sampling=GREEDY)
    assert [one.bit_generator.state for one in used] == [one.bit_generator.state for one in rngs(num)]
    assert trees.equal(most_likely.replay, policy.act(observation, said, rngs=rngs(num, 5), sampling=GREEDY).replay)
    hot = policy.act(observation, said, rngs=rngs(num), sampling=Sampling(temperature=50.0))
    cold = policy.act(observation, said, rngs=rngs(num), sampling=Sampling(temperature=0.02))
    assert np.exp(cold.log_prob).mean() > 0.5 > np.exp(hot.log_prob).mean()


def check_words_matter(policy: BlockPolicy, observation: Any, said: Sequence[str], other: str) -> None:
    """What is drawn is likely or not by the words, or the same random numbers become something else."""
    acted = policy.act(observation, said, rngs=rngs(len(said)), sampling=SAMPLED)
    told = policy.evaluate(observation, [other] * len(said), acted.replay, sampling=SAMPLED)
    if np.abs(numbers(told.log_prob) - acted.log_prob).max() <= 1e-3:
        again = policy.act(observation, [other] * len(said), rngs=rngs(len(said)), sampling=SAMPLED)
        assert max(np.abs(again.replay[name] - array).max() for name, array in acted.replay.items()) > 1e-3


def check_all(
    policy: BlockPolicy,
    observation: Any,
    said: Sequence[str],
    action: Spec,
    other: str | None,
    *,
    density: bool = False,
) -> None:
    """`other`: another instruction; None for a policy that takes none."""
    check_shapes(policy, observation, said, action, density=density)
    check_evaluate_finds_what_act_recorded(policy, observation, said, density=density)
    check_rows_are_alone(policy, observation, said)
    check_chance(policy, observation, said)
    if other is not None:
        check_words_matter(policy, observation, said, other)


def check_draws_nothing(policy: BlockPolicy, observation: Any, said: Sequence[str], action: Spec) -> None:
    """Of a policy that has one block for an observation, and is sure of it."""
    check_shapes(policy, observation, said, action)
    check_rows_are_alone(policy, observation, said)
    used = rngs(len(said), 3)
    drawn = policy.act(observation, said, rngs=used, sampling=HOT)
    assert [one.bit_generator.state for one in used] == [one.bit_generator.state for one in rngs(len(said), 3)]
    assert trees.equal(drawn.replay, policy.act(observation, said, rngs=rngs(len(said)), sampling=GREEDY).replay)
    found = policy.evaluate(observation, said, drawn.replay, sampling=HOT)
    assert not drawn.log_prob.any()
    assert not numbers(found.log_prob).any()
    assert not numbers(found.entropy).any()

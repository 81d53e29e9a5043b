"""Advantages: how much better a decision turned out than expected. Pure functions of numpy, in float64.

N decisions (blocks) of E whole episodes that lie one after another; the reward of a decision is the sum over its
executed steps, and a discount is per decision. `docs/ppo.md` has the formulas.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def grpo(score: Array, group: Array, *, use_std: bool = True, eps: float = 1e-6) -> Array:
    """float32 [E]: score minus the mean of its group, by default over the group's sample standard deviation (+ eps).

    The only member of a group has nothing to be compared with: 0. So has a group whose members all did the same.
    """
    above, count, which = _above_mean(score, group)
    if use_std:
        above = above / (np.sqrt(np.bincount(which, above**2) / np.maximum(count - 1, 1)) + eps)[which]
    return above.astype(np.float32)


def rloo(score: Array, group: Array) -> Array:
    """float32 [E]: score minus the mean of the others in its group. The only member of a group gets 0."""
    above, count, which = _above_mean(score, group)
    return np.asarray(above * (count / np.maximum(count - 1, 1))[which], np.float32)


def discounted_returns(reward: Array, episode: Array, *, discount: float) -> Array:
    """float32 [N]: the reward [N] of each decision and, discounted, of all that follow in its episode.

    Where a time limit ended an episode, nobody is there to say what would have followed: it counts as nothing.
    """
    found = np.zeros(len(reward))
    following = 0.0
    for row in range(len(reward) - 1, -1, -1):
        following = reward[row] + (0.0 if _is_last(episode, row) else discount * following)
        found[row] = following
    return found.astype(np.float32)


def gae(
    reward: Array, value: Array, next_value: Array, episode: Array, terminated: Array, *, discount: float, lam: float
) -> tuple[Array, Array]:
    """Advantage and return, float32 [N] each, of decisions with reward, value and next_value [N]; terminated is [E].

    The value of what followed a decision is that of the next one; behind the last of an episode it is `next_value`
    where a time limit ended it, and 0 where the task did. The return, advantage + value, is what a value should be.
    """
    value = value.astype(np.float64)
    found = np.zeros(len(reward))
    advantage = 0.0
    for row in range(len(reward) - 1, -1, -1):
        if _is_last(episode, row):
            after, advantage = (0.0 if terminated[episode[row]] else float(next_value[row])), 0.0
        else:
            after = value[row + 1]
        advantage = reward[row] + discount * after - value[row] + discount * lam * advantage
        found[row] = advantage
    return found.astype(np.float32), (found + value).astype(np.float32)


def whiten(values: Array, weight: Array, *, eps: float = 1e-8) -> Array:
    """float32 [N]: shifted and scaled so that the weighted mean is 0 and the weighted variance 1."""
    values, weight = values.astype(np.float64), weight.astype(np.float64)
    centred = values - np.average(values, weights=weight)
    return np.asarray(centred / np.sqrt(np.average(centred**2, weights=weight) + eps), np.float32)


def explained_variance(value: Array, returns: Array) -> float:
    """1 where values equal returns, 0 where they say no more than a constant, below where they say less; 0 if all
    returns are the same."""
    returns = returns.astype(np.float64)
    spread = float(np.var(returns))
    return 1.0 - float(np.var(returns - value)) / spread if spread > 0 else 0.0


def _above_mean(score: Array, group: Array) -> tuple[Array, Array, Array]:
    """Score minus the mean of its group [E]; members of each group [G]; the number of each one's group [E]."""
    score = score.astype(np.float64)
    _, which, count = np.unique(group, return_inverse=True, return_counts=True)
    return score - (np.bincount(which, score) / count)[which], count, which


def _is_last(episode: Array, row: int) -> bool:
    return row + 1 == len(episode) or bool(episode[row + 1] != episode[row])

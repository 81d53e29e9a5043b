"""Returns, bins, advantages: the pure functions of RECAP, on numpy arrays.

    return of step t      = -(T - t), and -C more if the episode of T steps failed, over the largest such number
    value                 = what a model expects the return to be: a mean over bins from -1 to 0
    advantage of step t   = the n rewards from t on + value at t + n - value at t

A return of 0 is a success that has been reached; -1 is a failure at the end of the longest episode.
"""

from __future__ import annotations

import numpy as np

from understudy.algorithms.algorithm import AlgorithmError
from understudy.policies.protocol import Array

NUM_BINS = 201


def returns(num_steps: int, *, success: bool, failure_steps: int, longest: int) -> Array:
    """float32 [T + 1]: of each step of an episode, and of its end.

    A failure counts as `failure_steps` steps; `longest` is the number of steps of the longest episode.
    """
    if not 0 < num_steps <= longest or failure_steps < 0:
        raise AlgorithmError(
            f"returns: expected from 1 to {longest} steps, the longest episode, and failure_steps from 0, got "
            f"{num_steps} and {failure_steps}"
        )
    left = np.arange(num_steps, -1, -1) + (0 if success else failure_steps)
    return np.asarray(-left / (longest + failure_steps), np.float32)


def to_bins(values: Array) -> Array:
    """int64: the nearest of the bins, whose centres go from -1 to 0 in equal steps."""
    return np.rint((np.clip(values, -1.0, 0.0) + 1.0) * (NUM_BINS - 1)).astype(np.int64)


def bin_centres() -> Array:
    """float32 [NUM_BINS]."""
    return np.linspace(-1.0, 0.0, NUM_BINS, dtype=np.float32)


def advantages(values: Array, *, end: float, num_steps: int, step_cost: float) -> Array:
    """float32 [T]: how much better the next `num_steps` steps went than expected.

    `values` [T] are those of the steps, `end` is the return at the end of the episode, and each step costs
    `step_cost`. Near the end of the episode the steps that are left are counted.
    """
    known = np.append(np.asarray(values, np.float32), np.float32(end))
    here = np.arange(len(values))
    there = np.minimum(here + num_steps, len(values))
    return np.asarray(known[there] - known[here] - step_cost * (there - here), np.float32)


def best(values: Array, share: float) -> Array:
    """Bool [N]: the highest numbers, as many as this share of them all, rounded up; equal ones of the last are in."""
    if not len(values) or share <= 0:
        return np.zeros(len(values), bool)
    number = min(int(np.ceil(share * len(values))), len(values))
    return np.asarray(values >= np.partition(values, -number)[-number])

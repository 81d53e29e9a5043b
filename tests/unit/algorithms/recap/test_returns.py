"""Returns, bins and advantages of RECAP, by hand."""

from __future__ import annotations

import numpy as np
import pytest

from understudy.algorithms import AlgorithmError
from understudy.algorithms.recap.returns import NUM_BINS, advantages, best, bin_centres, returns, to_bins


def test_returns_of_a_success_and_of_a_failure_by_hand() -> None:
    """The longest episode has 6 steps and a failure counts as 4 more: a tenth for each step."""
    success = returns(3, success=True, failure_steps=4, longest=6)
    np.testing.assert_allclose(success, [-0.3, -0.2, -0.1, 0.0], rtol=1e-6)
    failure = returns(6, success=False, failure_steps=4, longest=6)
    np.testing.assert_allclose(failure, [-1.0, -0.9, -0.8, -0.7, -0.6, -0.5, -0.4], rtol=1e-6)
    assert (success.dtype, failure.dtype) == (np.float32, np.float32)
    np.testing.assert_allclose(returns(2, success=False, failure_steps=0, longest=2), [-1.0, -0.5, 0.0])
    with pytest.raises(AlgorithmError, match="expected from 1 to 2 steps, the longest episode"):
        returns(3, success=True, failure_steps=4, longest=2)


def test_bins_by_hand() -> None:
    """201 bins: 0.005 from centre to centre."""
    assert NUM_BINS == 201
    found = to_bins(np.array([-1.0, -0.9976, -0.9974, -0.5, -0.0024, 0.0, 0.3, -7.0]))
    assert found.tolist() == [0, 0, 1, 100, 200, 200, 200, 0]
    assert bin_centres()[[0, 1, 100, 200]].tolist() == pytest.approx([-1.0, -0.995, -0.5, 0.0])
    assert to_bins(bin_centres()).tolist() == list(range(201))


def test_advantages_by_hand() -> None:
    """A step costs 0.1. Two steps from the first lead from -0.5 to -0.2 and cost 0.2: 0.1 better than expected."""
    values = np.array([-0.5, -0.4, -0.2], np.float32)
    found = advantages(values, end=0.0, num_steps=2, step_cost=0.1)
    np.testing.assert_allclose(found, [-0.2 + 0.5 - 0.2, 0.0 + 0.4 - 0.2, 0.0 + 0.2 - 0.1], rtol=1e-5)
    failed = advantages(values, end=-0.6, num_steps=1, step_cost=0.1)
    np.testing.assert_allclose(failed, [0.0, 0.1, -0.5], atol=1e-6)
    # if values are the returns themselves, everything goes as expected
    known = returns(5, success=False, failure_steps=3, longest=7)
    for num_steps in (1, 3, 9):
        found = advantages(known[:-1], end=float(known[-1]), num_steps=num_steps, step_cost=0.1)
        np.testing.assert_allclose(found, np.zeros(5), atol=1e-6)


def test_the_best_by_hand() -> None:
    values = np.array([0.3, -0.1, 0.2, 0.9, 0.2])
    assert best(values, 0.2).tolist() == [False, False, False, True, False]
    assert best(values, 0.3).tolist() == [True, False, False, True, False]  # 1.5, rounded up
    assert best(values, 0.5).tolist() == [True, False, True, True, True]  # the third and its equal
    assert best(values, 0.0).sum() == 0
    assert best(values, 1.0).all()
    assert best(np.zeros(0), 0.5).tolist() == []

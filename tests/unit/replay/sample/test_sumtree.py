"""SumTree against numpy's running sums."""

import numpy as np
import pytest

from understudy.replay.sample.sumtree import SumTree


@pytest.mark.parametrize("dtype", [np.int64, np.float64])
def test_a_sum_tree_against_running_sums(dtype: type) -> None:
    rng = np.random.default_rng(0)
    tree, plain = SumTree(dtype), np.zeros(0, dtype)
    for _ in range(40):
        more = rng.integers(0, 5, rng.integers(0, 300)).astype(dtype)
        tree.append(more)
        plain = np.concatenate([plain, more])
        if not plain.any():
            continue
        ids = rng.permutation(len(plain))[:20]
        plain[ids] = rng.integers(0, 5, len(ids))
        tree.set(ids, plain[ids])
        sums = np.cumsum(plain)
        assert tree.total == sums[-1]
        targets = rng.integers(0, int(sums[-1]), 100).astype(dtype)
        found, rest = tree.find(targets)
        wanted = np.searchsorted(sums, targets, side="right")
        assert np.array_equal(found, wanted)
        assert np.array_equal(rest, targets - (sums[wanted] - plain[wanted]))

"""Rows in one process; what several do is in tests/system/test_ranks.py."""

from __future__ import annotations

import numpy as np
import pytest

from understudy.training.distributed.errors import RanksError
from understudy.training.distributed.ranks import single_rank
from understudy.training.distributed.row_exchange import exchange_rows


def test_alone_nothing_moves() -> None:
    ids, column = np.array([7, 3, 5]), np.arange(6.0).reshape(3, 2)
    same = exchange_rows(single_rank(), ids, {"a": column}, ids)
    assert same.columns["a"] is column
    picked = exchange_rows(single_rank(), ids, {"a": column}, np.array([5, 7, 5]))
    assert picked.columns["a"].tolist() == [[4.0, 5.0], [0.0, 1.0], [4.0, 5.0]]
    assert (picked.num_rows_moved, picked.num_bytes_sent, picked.num_bytes_received) == (0, 0, 0)
    none = exchange_rows(single_rank(), ids, {"a": column}, np.array([]))
    assert none.columns["a"].shape == (0, 2)
    empty = exchange_rows(single_rank(), np.array([]), {"a": np.zeros((0, 2), np.uint8)}, np.array([], np.int64))
    assert empty.columns["a"].shape == (0, 2)


@pytest.mark.parametrize(
    ("ids", "columns", "need", "said"),
    [
        (np.array([1, 2]), {"a": np.zeros(3)}, np.array([1]), r"a: expected 2 rows, one for each id, got \[3\]"),
        (np.array([1]), {"a": np.array([object()])}, np.array([1]), "a: expected numbers or text of a fixed width"),
        (np.array([1.5]), {}, np.array([1]), r"ids: expected int64 \[N\], got float64 \[1\]"),
        (np.array([1]), {}, np.array([[1]]), r"need: expected int64 \[N\], got int64 \[1, 1\]"),
        (np.array([1]), {"a": np.zeros(1)}, np.array([2]), "need: rank 0 needs 1 rows that no rank has: 2"),
    ],
)
def test_refuses(ids: np.ndarray, columns: dict, need: np.ndarray, said: str) -> None:
    with pytest.raises(RanksError, match=said):
        exchange_rows(single_rank(), ids, columns, need)

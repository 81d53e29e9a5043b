"""Mini batches, ranks and micro batches: every row exactly once, and nobody with less to do than another."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from understudy.algorithms import AlgorithmError
from understudy.algorithms.onpolicy import minibatches
from understudy.algorithms.onpolicy.minibatches import MiniBatch

# ---- mini batches


def test_every_row_is_in_one_mini_batch_of_each_pass() -> None:
    found = minibatches.mini_batches(130, 64, 3, shuffle=True, seed=7)
    assert [len(one) for one in found] == [44, 43, 43] * 3  # 64, 64 and 2 would be a noisy step
    for epoch in range(3):
        assert sorted(np.concatenate(found[3 * epoch : 3 * epoch + 3])) == list(range(130))
    assert [len(one) for one in minibatches.mini_batches(128, 64, 1, shuffle=True, seed=7)] == [64, 64]
    assert [len(one) for one in minibatches.mini_batches(5, 64, 2, shuffle=True, seed=7)] == [5, 5]


def test_order_is_of_the_seed_and_the_pass() -> None:
    once, again, other = (minibatches.mini_batches(50, 50, 2, shuffle=True, seed=seed) for seed in (3, 3, 4))
    assert np.array_equal(once, again)
    assert not np.array_equal(once[0], once[1])
    assert not np.array_equal(once[0], other[0])
    plain = minibatches.mini_batches(6, 3, 2, shuffle=False, seed=3)
    assert [one.tolist() for one in plain] == [[0, 1, 2], [3, 4, 5]] * 2


def test_mini_batches_of_whole_episodes_by_hand() -> None:
    """Episodes of 3, 1, 2 and 4 rows; at most three in a mini batch are two and two, and not three and one."""
    episode = np.array([0, 0, 0, 1, 2, 2, 4, 4, 4, 4])  # episode 3 has no rows
    found = minibatches.whole_episodes(episode, 3, 2, shuffle=False, seed=0)
    assert [one.tolist() for one in found] == [[0, 1, 2, 3], [4, 5, 6, 7, 8, 9]] * 2
    assert [one.tolist() for one in minibatches.whole_episodes(episode, 4, 1, shuffle=False, seed=0)] == [[*range(10)]]


@given(st.lists(st.integers(1, 5), min_size=1, max_size=20), st.integers(1, 9), st.integers(0, 5))
def test_no_episode_is_cut_in_two(lengths: list[int], size: int, seed: int) -> None:
    episode = np.repeat(np.arange(len(lengths)), lengths)
    found = minibatches.whole_episodes(episode, size, 2, shuffle=True, seed=seed)
    num = -(-len(lengths) // size)
    assert len(found) == 2 * num
    for once in (found[:num], found[num:]):
        assert sorted(np.concatenate(once)) == list(range(len(episode)))
        whole = [set(episode[rows]) for rows in once]
        assert max(len(one) for one in whole) <= size
        assert sum(len(one) for one in whole) == len(lengths)


# ---- ranks


@given(st.integers(1, 60), st.integers(1, 9))
def test_ranks_have_equally_many_and_together_all(num_rows: int, world_size: int) -> None:
    rows = np.arange(100, 100 + num_rows)
    shares = [minibatches.split(rows, rank, world_size) for rank in range(world_size)]
    assert {len(mine) for mine, _ in shares} == {-(-num_rows // world_size)}
    real = np.concatenate([mine[~is_padding] for mine, is_padding in shares])
    assert sorted(real) == rows.tolist()
    assert all(np.isin(mine, rows).all() for mine, _ in shares)  # padding can be evaluated like others


def test_more_ranks_than_rows() -> None:
    shares = [minibatches.split(np.array([7, 8]), rank, 5) for rank in range(5)]
    assert [mine.tolist() for mine, _ in shares] == [[7], [8], [7], [8], [7]]
    assert [is_padding.tolist() for _, is_padding in shares] == [[False], [False], [True], [True], [True]]


def test_what_cannot_be_split() -> None:
    with pytest.raises(AlgorithmError, match=r"rank: expected from 0 to world_size - 1 \(1\), got 2"):
        minibatches.split(np.arange(4), 2, 2)
    with pytest.raises(AlgorithmError, match=r"rows: expected at least one to split, got none"):
        minibatches.split(np.arange(0), 0, 2)


def test_a_part_of_a_mini_batch_has_its_weights_and_padding_has_none() -> None:
    whole = MiniBatch(
        rows=np.array([5, 3, 9]),
        weight=np.arange(1, 7, dtype=np.float32).reshape(3, 2),
        value_weight=np.array([0.1, 0.2, 0.3], np.float32),
    )
    part = whole.part(np.array([2, 0]), np.array([False, True]))
    assert (len(part), part.rows.tolist()) == (2, [9, 5])
    assert part.weight.tolist() == [[5, 6], [0, 0]]
    assert part.value_weight.tolist() == [np.float32(0.3), 0]
    assert part.weight.dtype == part.value_weight.dtype == np.float32
    assert whole.part(np.array([1])).weight.tolist() == [[3, 4]]


# ---- micro batches


def test_micro_batches_by_number() -> None:
    assert [one.tolist() for one in minibatches.micro_batches(np.array([4, 5, 6, 7, 8]), 2)] == [[4, 5], [6, 7], [8]]


def test_micro_batches_by_length_by_hand() -> None:
    first = np.array([10, 50, 30, 10, 20, 10])  # with 60 tokens: 50 | 30 20 (2 rows of 30) | 10 10 10
    second = np.full(6, 10)  # would fit into one
    found = minibatches.by_length([first, second], 60)
    assert [one.tolist() for one in found[0]] == [[1], [2, 4], [0, 3, 5]]
    assert [one.tolist() for one in found[1]] == [[0, 1], [2], [3, 4, 5]]
    assert [one.tolist() for one in minibatches.by_length([second], 60)[0]] == [[0, 1, 2, 3, 4, 5]]
    assert [one.tolist() for one in minibatches.by_length([np.array([99, 99])], 60)[0]] == [[0], [1]]  # too long


@given(st.data(), st.integers(1, 20), st.integers(1, 4), st.integers(1, 120))
def test_micro_batches_by_length(data: st.DataObject, num_rows: int, world_size: int, max_tokens: int) -> None:
    lengths = [
        np.array(data.draw(st.lists(st.integers(1, 50), min_size=num_rows, max_size=num_rows)))
        for _ in range(world_size)
    ]
    found = minibatches.by_length(lengths, max_tokens)
    again = minibatches.by_length(lengths, max_tokens)
    assert len({len(pieces) for pieces in found}) == 1  # nobody is left alone in an all-reduce
    for pieces, repeated, mine in zip(found, again, lengths, strict=True):
        assert sorted(np.concatenate(pieces)) == list(range(num_rows))
        assert all(len(piece) == 1 or len(piece) * mine[piece].max() <= max_tokens for piece in pieces)
        assert all(len(piece) for piece in pieces)
        assert [one.tolist() for one in pieces] == [one.tolist() for one in repeated]


def test_lengths_that_nobody_split() -> None:
    with pytest.raises(
        AlgorithmError, match=r"lengths: expected equally many rows on all ranks, and some, got \[2, 1\]"
    ):
        minibatches.by_length([np.ones(2), np.ones(1)], 9)
    with pytest.raises(AlgorithmError, match=r"got \[0\]; split\(\) them"):
        minibatches.by_length([np.ones(0)], 9)

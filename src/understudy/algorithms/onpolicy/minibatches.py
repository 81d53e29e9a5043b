"""Mini batches: which rows make an optimizer step, and how they are split over ranks and into pieces that fit.

A mini batch is one step of the optimizer. Ranks split it; each rank cuts its share into micro batches and adds up their
gradients. All functions are pure: the same arguments give the same rows on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from understudy.algorithms.algorithm import AlgorithmError

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, kw_only=True, eq=False)
class MiniBatch:
    """M rows of a batch, or a part of them, and what each weighs; padding weighs 0."""

    rows: Array  # [M] int64, into the batch
    weight: Array  # [M, H] float32: of each log-prob of a step
    value_weight: Array  # [M] float32: of a row as a whole; adds up to 1 over all of a mini batch

    def __len__(self) -> int:
        return len(self.rows)

    def part(self, positions: Array, is_padding: Array | None = None) -> MiniBatch:
        """The rows at these positions of the mini batch (not of the batch), in this order."""
        counts = np.ones(len(positions), np.float32) if is_padding is None else (~is_padding).astype(np.float32)
        return MiniBatch(
            rows=self.rows[positions],
            weight=self.weight[positions] * counts[:, None],
            value_weight=self.value_weight[positions] * counts,
        )


def mini_batches(num_rows: int, size: int, epochs: int, *, shuffle: bool, seed: int) -> list[Array]:
    """The rows of each mini batch, over all epochs in order; every row is in exactly one of an epoch.

    There are as few as `size` allows, and they are equally large, or one apart: 130 rows with a size of 128 are two of
    65, not one of 128 and a noisy one of 2. Shuffled anew for each epoch, from the seed and its number.
    """
    found = []
    for epoch in range(epochs):
        rows = np.random.default_rng([seed, epoch]).permutation(num_rows) if shuffle else np.arange(num_rows)
        found += np.array_split(rows, _num_pieces(num_rows, size))
    return found


def whole_episodes(episode: Array, size: int, epochs: int, *, shuffle: bool, seed: int) -> list[Array]:
    """The rows of each mini batch, as `mini_batches` has them, but `size` counts episodes, and none is cut in two.

    `episode` [N] says which episode each row is of; an episode's rows stand one after another.
    """
    of_episode = np.split(np.arange(len(episode)), np.flatnonzero(np.diff(episode)) + 1)
    chosen = mini_batches(len(of_episode), size, epochs, shuffle=shuffle, seed=seed)
    return [np.concatenate([of_episode[number] for number in one]) for one in chosen]


def split(rows: Array, rank: int, world_size: int) -> tuple[Array, Array]:
    """The rows of a rank, and which of them are padding (bool), equally many on all ranks.

    Ranks take rows in turn. Where they do not come out even, rows from the front are used again as padding, which must
    weigh 0.
    """
    if not 0 <= rank < world_size:
        raise AlgorithmError(f"rank: expected from 0 to world_size - 1 ({world_size - 1}), got {rank}")
    if not len(rows):
        raise AlgorithmError("rows: expected at least one to split, got none")
    padded = np.resize(rows, _num_pieces(len(rows), world_size) * world_size)
    return padded[rank::world_size], np.arange(len(padded))[rank::world_size] >= len(rows)


def micro_batches(rows: Array, size: int) -> list[Array]:
    """The rows in pieces of `size`; the last may have fewer."""
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def by_length(lengths: Sequence[Array], max_tokens: int) -> list[list[Array]]:
    """For each rank its micro batches, as positions among its rows; `lengths` has the tokens of each of a rank's rows.

    Every row is in exactly one. A micro batch takes (number of rows) * (longest row) tokens, since rows are padded to
    the longest, and that is at most `max_tokens` unless it has a single row. There are as few as that allows, and
    equally many on all ranks (who could do with fewer cuts the largest up): nobody is left alone in an all-reduce.
    """
    if len({len(one) for one in lengths}) != 1 or not len(lengths[0]):
        counts = [len(one) for one in lengths]
        raise AlgorithmError(f"lengths: expected equally many rows on all ranks, and some, got {counts}; split() them")
    found = [_pack(np.asarray(one), max_tokens) for one in lengths]
    wanted = max(len(pieces) for pieces in found)
    for pieces in found:
        while len(pieces) < wanted:  # a rank has at least as many rows as any rank has pieces
            largest = int(np.argmax([len(piece) for piece in pieces]))
            pieces[largest : largest + 1] = np.array_split(pieces[largest], 2)
    return found


def _pack(lengths: Array, max_tokens: int) -> list[Array]:
    """Longest first, each piece as full as it gets: the fewest pieces, and the least padding."""
    order = np.argsort(-lengths, kind="stable")
    pieces = []
    start = 0
    while start < len(order):
        fits = max(1, int(max_tokens // max(int(lengths[order[start]]), 1)))
        pieces.append(order[start : start + fits])
        start += fits
    return pieces


def _num_pieces(number: int, size: int) -> int:
    return -(-number // size)

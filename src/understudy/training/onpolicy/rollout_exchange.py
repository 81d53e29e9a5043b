"""Rollout exchange: what all ranks know of an iteration, and which rank holds its observations.

Rewards, tokens and log-probs are small, so every rank has those of all episodes and computes the same advantages.
Observations stay on the rank that collected them and go only to the ranks that learn from them, each row once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from understudy.core import Episode, Tree
from understudy.core import tree as trees
from understudy.training.collection.rollout import Rollout
from understudy.training.collection.serialization import deserialize_rollouts, serialize_rollouts
from understudy.training.distributed.ranks import Ranks
from understudy.training.distributed.row_exchange import exchange_rows

Array = np.ndarray[Any, Any]


class RolloutExchange:
    """The rollouts of all ranks without observations, and the observations that this rank holds."""

    def __init__(self, ranks: Ranks):
        self.ranks = ranks
        self.num_bytes_moved = 0  # received by this rank so far
        self._here: dict[int, Tree] = {}  # observations [T, ...] by ticket number

    def add(self, mine: Sequence[Rollout]) -> dict[int, Rollout]:
        """The rollouts of all ranks, by the number of their ticket; `mine` are this rank's, with observations."""
        light = [self.keep(rollout) for rollout in mine]
        facts, arrays = serialize_rollouts(light)
        gathered = self.ranks.gather_json(facts, name="rollouts")
        found: dict[int, Rollout] = {}
        for rank, theirs in enumerate(gathered):
            sent = self.ranks.broadcast_arrays(arrays if rank == self.ranks.rank else None, source=rank)
            found |= {rollout.ticket.number: rollout for rollout in deserialize_rollouts(theirs, sent)}
        return found

    def keep(self, rollout: Rollout) -> Rollout:
        """Keep the observations of a rollout on this rank; returns the rollout without them."""
        episode = rollout.episode
        if episode is None:
            return rollout
        self._here[rollout.ticket.number] = trees.map_leaves(lambda rows: rows[: len(episode)], episode.observation)
        return replace(rollout, episode=_without_arrays(episode))

    def keep_only(self, rollouts: Sequence[Rollout]) -> None:
        """Drop the observations of all other rollouts."""
        numbers = {rollout.ticket.number for rollout in rollouts}
        self._here = {number: tree for number, tree in self._here.items() if number in numbers}

    def observations(self, rollouts: Sequence[Rollout], need: Array) -> Tree:
        """The observations of rows `need` of a batch of these rollouts, from any rank. All ranks call this."""
        ids, columns = self._columns(rollouts)
        got = exchange_rows(self.ranks, ids, columns, need)
        self.num_bytes_moved += got.num_bytes_received
        return trees.unflatten(got.columns)

    def with_observations(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """The rollouts with their observations on rank 0; unchanged on the others. All ranks call this."""
        counts = [rollout.num_rows for rollout in rollouts]
        wanted = np.arange(sum(counts) if self.ranks.first else 0)
        flat = trees.flatten(self.observations(rollouts, wanted)) if rollouts else {}
        if not self.ranks.first:
            return list(rollouts)
        ends = np.cumsum(counts)
        found = []
        for rollout, end in zip(rollouts, ends, strict=True):
            part = trees.unflatten({path: rows[end - rollout.num_rows : end] for path, rows in flat.items()})
            episode = rollout.episode
            found.append(rollout if episode is None else replace(rollout, episode=replace(episode, observation=part)))
        return found

    def _columns(self, rollouts: Sequence[Rollout]) -> tuple[Array, dict[str, Array]]:
        """The rows whose observations this rank holds: their numbers in the batch, and flat columns."""
        ids, parts, first = [], [], 0
        for rollout in rollouts:
            if rollout.ticket.number in self._here:
                ids.append(np.arange(first, first + rollout.num_rows))
                parts.append(trees.flatten(self._here[rollout.ticket.number]))
            first += rollout.num_rows
        if not ids:
            return np.zeros(0, np.int64), {}
        return np.concatenate(ids), {path: np.concatenate([part[path] for part in parts]) for path in parts[0]}


def _without_arrays(episode: Episode) -> Episode:
    return replace(episode, observation={}, action={}, proposal={})

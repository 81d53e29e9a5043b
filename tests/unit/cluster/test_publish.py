"""Weights are put into Ray's object store once, however many learners there are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("ray")

from understudy.cluster.config import ClusterConfig
from understudy.cluster.roles.rank import RankBackend, RankJob


class Runner:
    """Keeps what it is told to use."""

    def __init__(self) -> None:
        self.put: list[tuple[int, Any]] = []
        self.used: list[tuple[int, Any]] = []

    @property
    def weights(self) -> Any:
        return f"reference to version {self.put[-1][0]}"

    def publish(self, version: int, weights: Any) -> None:
        self.put.append((version, weights()))

    def use(self, version: int, weights: Any) -> None:
        self.used.append((version, weights))


class Rank:
    """A place among ranks that meet at once."""

    def __init__(self, rank: int):
        self.rank, self.first, self.met = rank, rank == 0, 0

    def barrier(self, name: str) -> None:
        self.met += 1


def test_the_first_rank_puts_and_the_others_use_its_reference(tmp_path: Any) -> None:
    job = RankJob(run=tmp_path, cluster=ClusterConfig(), token="", addresses={}, learner_nodes=())
    runners, ranks = [Runner(), Runner()], [Rank(0), Rank(1)]
    backends = [
        RankBackend(job, runner, rank, lambda doing: None, lambda: runners[0].weights, max_lag=0)  # type: ignore[arg-type]
        for runner, rank in zip(runners, ranks, strict=True)
    ]
    gathered = []

    def weights(rank: Rank) -> dict[str, Any]:
        gathered.append(rank.rank)
        return {"adapter": np.ones(3)} if rank.first else {}

    for version in (0, 0, 1):  # the second time nothing is new
        for backend, rank in zip(backends, ranks, strict=True):
            backend.publish(version, lambda rank=rank: weights(rank))  # type: ignore[misc]
    assert [version for version, _ in runners[0].put] == [0, 1]
    assert list(runners[0].put[0][1]) == ["adapter"]
    assert runners[1].put == []
    assert runners[1].used == [(0, "reference to version 0"), (1, "reference to version 1")]
    assert gathered == [0, 1, 0, 1]
    assert [rank.met for rank in ranks] == [2, 2]

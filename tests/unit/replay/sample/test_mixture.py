"""Mixture: the shares of its samplers are exact."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from understudy.core import StoreError
from understudy.replay import Reader
from understudy.replay.read.view import DEMO, ONLINE, Clause, View
from understudy.replay.sample.mixture import Mixture, shares
from understudy.replay.sample.sampler import Sampler

LENGTHS = (3, 10, 1, 25, 7, 14)  # steps of the episodes 1 to 6, see conftest.py
KINDS = ("practice", "demonstration", "practice", "practice", "demonstration", "practice")
ALL = View(name="all", clauses=(Clause(),))


WEIGHTS = st.lists(st.integers(0, 9) | st.integers(0, 900), min_size=1, max_size=14).filter(any)


@given(WEIGHTS, st.integers(0, 300), st.integers(0, 50))
def test_shares_are_exact(weights: list[int], batch_size: int, num_batches: int) -> None:
    totals = [0] * len(weights)
    allowed = max(1, math.ceil(math.log2(len(weights))))
    for batch in range(num_batches):
        part = shares(weights, batch_size, batch)
        assert sum(part) == batch_size
        assert min(part) >= 0
        totals = [total + count for total, count in zip(totals, part, strict=True)]
        due = [(batch + 1) * batch_size * weight / sum(weights) for weight in weights]
        assert all(abs(total - wanted) < allowed + 1e-9 for total, wanted in zip(totals, due, strict=True))
        assert all(count == 0 for count, weight in zip(part, weights, strict=True) if weight == 0)


def test_shares_in_figures() -> None:
    assert [shares([1, 1], 1, batch) for batch in range(4)] == [[0, 1], [1, 0], [0, 1], [1, 0]]
    assert shares([1, 1], 0, 3) == [0, 0]
    assert [shares([1, 1], 255, batch) for batch in range(2)] == [[127, 128], [128, 127]]
    assert shares([3, 1], 256, 9) == [192, 64]
    few = [shares([5, 1, 5], 1, batch) for batch in range(11)]  # exact parts, rounded, would go back from 1 to 0
    assert [sum(counts) for counts in zip(*few, strict=True)] == [5, 1, 5]
    assert min(map(min, few)) == 0
    with pytest.raises(StoreError, match="not all of them 0"):
        shares([0, 0], 4, 0)


@pytest.mark.parametrize("batch_size", [1, 7, 8])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_mixture_of_demonstrations_and_practice(reader: Reader, batch_size: int, world_size: int) -> None:
    def make(rank: int, world_size: int) -> Mixture:
        samplers = {view.name: Sampler(reader, view, batch_size=batch_size, seed=6) for view in (DEMO, ONLINE)}
        mixture = Mixture(samplers, {"demo": 1, "online": 1}, batch_size=batch_size, rank=rank, world_size=world_size)
        assert mixture.follow() == 60
        assert mixture.num_steps == {"demo": 17, "online": 43}
        return mixture

    whole = make(0, 1)
    ranks = [make(rank, world_size) for rank in range(world_size)]
    for number in range(6):
        batch = whole.sample()
        demo = [KINDS[e - 1] == "demonstration" for e in batch.episode.tolist()]
        assert [sum(demo), batch_size - sum(demo)] == shares([1, 1], batch_size, number)
        parts = [rank.sample() for rank in ranks]
        assert np.concatenate([part.episode for part in parts]).tolist() == batch.episode.tolist()
        assert np.concatenate([part.observation for part in parts]).tolist() == batch.observation.tolist()


def test_a_mixture_goes_on_after_a_restart(reader: Reader) -> None:
    def make() -> Mixture:
        samplers = {view.name: Sampler(reader, view, batch_size=5, seed=7) for view in (DEMO, ONLINE)}
        return Mixture(samplers, {"demo": 1, "online": 2}, batch_size=5)

    first = make()
    first.follow()
    for _ in range(4):
        first.sample()
    second = make()
    second.restore(json.loads(json.dumps(first.state())))
    for _ in range(20):
        assert first.sample().index.tolist() == second.sample().index.tolist()
    with pytest.raises(StoreError, match="must have the same names"):
        Mixture(first.samplers, {"demo": 1}, batch_size=5)
    with pytest.raises(StoreError, match=r"mixture: expected a sampler as 'demo', got View; pass us\.Sampler\(reader"):
        Mixture({"demo": DEMO}, {"demo": 1}, batch_size=5)  # type: ignore[dict-item]

"""Selectors: the frequencies of samples against their probabilities, with fixed seeds."""

import json

import numpy as np
import pytest

from understudy.core import StoreError
from understudy.replay import Reader
from understudy.replay.read.view import Clause, View
from understudy.replay.sample.sampler import Sampler
from understudy.replay.sample.selectors import Fifo, Prioritized, Uniform, UniformEpisodes

LENGTHS = (3, 10, 1, 25, 7, 14)  # steps of the episodes 1 to 6, see conftest.py
ALL = View(name="all", clauses=(Clause(),))


def counts(sampler: Sampler, batches: int) -> dict[tuple[int, int], int]:
    sampler.follow()
    found: dict[tuple[int, int], int] = {}
    for _ in range(batches):
        batch = sampler.sample()
        for key in zip(batch.episode.tolist(), batch.index.tolist(), strict=True):
            found[key] = found.get(key, 0) + 1
    return found


def chi_square(found: dict[tuple[int, int], int], law: dict[tuple[int, int], float]) -> float:
    """How far the counts are from the law, in standard deviations of the statistic."""
    assert found.keys() <= law.keys()
    total, whole = sum(found.values()), sum(law.values())
    expected = {key: total * p / whole for key, p in law.items()}
    statistic = sum((found.get(key, 0) - e) ** 2 / e for key, e in expected.items())
    freedom = len(law) - 1
    return (statistic - freedom) / (2 * freedom) ** 0.5


def every_step(episodes: range | list[int] = range(1, 7)) -> list[tuple[int, int]]:
    return [(episode, index) for episode in episodes for index in range(LENGTHS[episode - 1])]


def test_uniform_over_steps(reader: Reader) -> None:
    found = counts(Sampler(reader, ALL, batch_size=100, seed=1), 300)
    assert abs(chi_square(found, dict.fromkeys(every_step(), 1.0))) < 3


def test_uniform_over_the_newest_steps(reader: Reader) -> None:
    found = counts(Sampler(reader, ALL, batch_size=100, seed=2, selector=Uniform(last_steps=20)), 200)
    assert abs(chi_square(found, dict.fromkeys(every_step()[-20:], 1.0))) < 3


def test_uniform_over_episodes(reader: Reader) -> None:
    found = counts(Sampler(reader, ALL, batch_size=100, seed=3, selector=UniformEpisodes()), 300)
    assert abs(chi_square(found, {(e, i): 1 / LENGTHS[e - 1] for e, i in every_step()})) < 3


@pytest.mark.parametrize("by_steps", [False, True])
def test_the_newest_episodes(reader: Reader, by_steps: bool) -> None:
    selector = UniformEpisodes(last_episodes=2, by_steps=by_steps)
    found = counts(Sampler(reader, ALL, batch_size=100, seed=4, selector=selector), 300)
    law = {(e, i): 1.0 if by_steps else 1 / LENGTHS[e - 1] for e, i in every_step([5, 6])}
    assert abs(chi_square(found, law)) < 3


def test_prioritized_draws_and_weights(reader: Reader) -> None:
    selector = Prioritized(alpha=0.5, beta=1.0)
    sampler = Sampler(reader, ALL, batch_size=100, seed=5, selector=selector)
    sampler.follow()
    keys = every_step()
    priority = np.linspace(0.1, 4.0, len(keys))
    episode, index = np.array(keys).T
    selector.update(sampler.index, episode, index, priority)
    law = {key: p**0.5 for key, p in zip(keys, priority, strict=True)}
    assert abs(chi_square(counts(sampler, 400), law)) < 3
    batch = sampler.sample()
    wanted = np.array([1 / law[e, i] for e, i in zip(batch.episode.tolist(), batch.index.tolist(), strict=True)])
    assert np.allclose(batch.weight, wanted / wanted.max(), rtol=1e-5)
    with pytest.raises(StoreError, match="priority: expected finite numbers above 0; add a small constant"):
        selector.update(sampler.index, episode[:1], index[:1], np.zeros(1))


def test_a_new_step_has_the_highest_priority(reader: Reader) -> None:
    selector = Prioritized(alpha=1.0)
    sampler = Sampler(reader, ALL, batch_size=10, selector=selector)
    sampler.follow(until=2)  # the first episode only
    before = len(sampler)
    selector.update(sampler.index, np.array([1]), np.array([0]), np.array([7.0]))
    sampler.follow()
    selector._synchronize(sampler.index)
    weights = selector._tree.weights(np.flatnonzero(sampler.index.row_mask()))
    assert before == 3
    assert weights[:3].tolist() == [7.0, 1.0, 1.0]
    assert set(weights[3:].tolist()) == {7.0}


@pytest.mark.parametrize("times", [1, 3])
def test_a_queue_gives_each_step_in_order(reader: Reader, times: int) -> None:
    sampler = Sampler(reader, ALL, batch_size=7, selector=Fifo(times=times))
    total = sampler.follow()
    assert total == len(every_step()) * times
    found: list[tuple[int, int]] = []
    while (left := len(sampler)) > 0:
        batch = sampler.sample(size=min(7, left))
        found += zip(batch.episode.tolist(), batch.index.tolist(), strict=True)
        state = json.loads(json.dumps(sampler.state()))
        sampler = Sampler(reader, ALL, batch_size=7, selector=Fifo(times=times))  # the state is a few numbers
        sampler.restore(state)
    assert found == [key for key in every_step() for _ in range(times)]
    with pytest.raises(StoreError, match="nothing to draw"):
        sampler.sample()

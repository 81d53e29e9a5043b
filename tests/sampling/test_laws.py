"""Frequencies of draws against their law, with fixed seeds; shares and limits exactly."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from understudy.core import DamageError, EpisodeInfo, StoreError
from understudy.core.examples import random_steps, small_spec
from understudy.replay import Reader, Store, compact
from understudy.replay.format.paths import segment_files
from understudy.replay.format.segment import read_layout
from understudy.replay.read.view import DEMO, ONLINE, Clause, View
from understudy.replay.sample.mixture import Mixture, shares
from understudy.replay.sample.rate_limiter import RateLimiter
from understudy.replay.sample.sampler import Sampler
from understudy.replay.sample.selectors import Fifo, Prioritized, Uniform, UniformEpisodes
from understudy.replay.sample.sumtree import SumTree

SPEC = small_spec()
LENGTHS = (3, 10, 1, 25, 7, 14)  # steps of the episodes 1 to 6
KINDS = ("practice", "demonstration", "practice", "practice", "demonstration", "practice")


@pytest.fixture
def reader(tmp_path: Path):
    with Store.open(tmp_path / "store", segment_bytes=4000) as store:
        writer = store.writer("w", SPEC, commit_steps=6)
        for seed, (length, kind) in enumerate(zip(LENGTHS, KINDS, strict=True)):
            writer.begin(EpisodeInfo(kind=kind, seed=seed))
            steps, last = random_steps(SPEC, length, seed, human=False)
            for step in steps:
                writer.append(step)
            writer.end(last, success=True)
    with Reader(tmp_path / "store") as opened:
        yield opened


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
    selector._keep_up(sampler.index)
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


def test_an_empty_view_says_so(reader: Reader) -> None:
    sampler = Sampler(reader, View(name="none", clauses=()), batch_size=4)
    sampler.follow()
    with pytest.raises(StoreError, match="view 'none': there is nothing to draw as of commit 15; record something"):
        sampler.sample()


def test_a_condition_on_something_that_is_no_attribute_is_refused() -> None:
    with pytest.raises(StoreError, match=r"view 'x': condition 'num_human > 0': there is no column 'num_human'; "):
        View(name="x", clauses=(Clause(where="num_human > 0"),))


# ---- mixtures


@given(st.lists(st.integers(0, 9), min_size=1, max_size=4).filter(any), st.integers(0, 300), st.integers(0, 50))
def test_shares_are_exact(weights: list[int], batch_size: int, num_batches: int) -> None:
    totals = [0] * len(weights)
    for batch in range(num_batches):
        part = shares(weights, batch_size, batch)
        assert sum(part) == batch_size
        totals = [total + count for total, count in zip(totals, part, strict=True)]
        due = [(batch + 1) * batch_size * weight / sum(weights) for weight in weights]
        assert all(abs(total - wanted) < 1 + 1e-9 for total, wanted in zip(totals, due, strict=True))
        assert all(count == 0 for count, weight in zip(part, weights, strict=True) if weight == 0)


def test_shares_in_figures() -> None:
    assert [shares([1, 1], 1, batch) for batch in range(4)] == [[0, 1], [1, 0], [0, 1], [1, 0]]
    assert shares([1, 1], 0, 3) == [0, 0]
    assert [shares([1, 1], 255, batch) for batch in range(2)] == [[127, 128], [128, 127]]
    assert shares([3, 1], 256, 9) == [192, 64]
    with pytest.raises(StoreError, match="not all of them 0"):
        shares([0, 0], 4, 0)


@pytest.mark.parametrize("batch_size", [1, 7, 8])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_mixture_of_demonstrations_and_practice(reader: Reader, batch_size: int, world_size: int) -> None:
    def make(rank: int, world_size: int) -> Mixture:
        samplers = {view.name: Sampler(reader, view, batch_size=batch_size, seed=6) for view in (DEMO, ONLINE)}
        mixture = Mixture(samplers, {"demo": 1, "online": 1}, batch_size=batch_size, rank=rank, world_size=world_size)
        assert mixture.follow() == {"demo": 17, "online": 43}
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


# ---- limits


@given(
    st.floats(0.1, 20),
    st.integers(1, 50),
    st.integers(1, 20),
    st.integers(1, 300),
    st.floats(0, 100),
    st.lists(st.booleans(), max_size=200),
)
def test_one_side_may_always_go_on(
    ratio: float, min_size: int, insert: int, sample: int, slack: float, wishes: list[bool]
) -> None:
    limiter = RateLimiter(
        samples_per_insert=ratio,
        min_size=min_size,
        error_window=(sample + insert * ratio) / 2 + slack,
        max_insert=insert,
        max_sample=sample,
    )
    for wish in wishes:
        assert limiter.may_insert(insert) or limiter.may_sample(sample)
        if wish and limiter.may_insert(insert):
            limiter = limiter.inserted(insert)
        elif limiter.may_sample(sample):
            limiter = limiter.sampled(sample)
        if limiter.size >= min_size + insert:  # once begun, the ratio is held
            assert abs(limiter.diff - min_size * ratio) <= limiter.error_window + insert * ratio + sample


def test_the_formulas_in_figures() -> None:
    limiter = RateLimiter(samples_per_insert=2, min_size=10, error_window=6, max_sample=4)
    assert not limiter.may_sample(1)
    limiter = limiter.inserted(10)  # diff 20, window 14 to 26
    assert limiter.may_sample(4)
    assert limiter.may_insert(1)
    assert not limiter.sampled(3).may_sample(4)  # 17 - 4 < 14
    assert limiter.sampled(2).may_sample(4)  # 18 - 4 = 14
    assert not limiter.inserted(3).may_insert(1)  # 26 + 2 > 26
    assert limiter.inserted(3).removed(4).may_insert(1)  # below min_size
    assert RateLimiter.from_json(limiter.to_json()) == limiter
    with pytest.raises(StoreError, match=r"error_window: expected at least 3 .* both sides could wait for each other"):
        RateLimiter(samples_per_insert=2, min_size=10, error_window=2, max_sample=4)
    with pytest.raises(StoreError, match="asked about 5 at once, and max_sample is 4"):
        limiter.may_sample(5)


# ---- the tree


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


# ---- the same batches again


def test_any_past_batch_is_drawn_again_from_its_line(reader: Reader) -> None:
    sampler = Sampler(reader, ALL, batch_size=9, seed=8)
    lines, batches = [], []
    for commit in (3, 6, 9, 15):
        sampler.follow(until=commit)
        for _ in range(3):
            batches.append(sampler.sample())
            lines.append(str(sampler.last_record))
    assert lines[4] == '{"view": "all", "commit": 6, "seed": 8, "batch": 4, "size": 9}'
    for line, wanted in zip(lines, batches, strict=True):
        again = Sampler(reader, ALL, batch_size=1).rebuild(line)
        assert again.episode.tolist() == wanted.episode.tolist()
        assert again.observation.tolist() == wanted.observation.tolist()


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_ranks_share_a_batch_and_a_new_number_of_ranks_changes_none(reader: Reader, world_size: int) -> None:
    whole = Sampler(reader, ALL, batch_size=10, seed=9)
    whole.follow()
    two = [Sampler(reader, ALL, batch_size=10, seed=9, rank=rank, world_size=2) for rank in range(2)]
    for sampler in two:
        sampler.follow()
    for _ in range(3):
        wanted = whole.sample().index.tolist()
        assert [i for sampler in two for i in sampler.sample().index.tolist()] == wanted
    later = [
        Sampler(reader, ALL, batch_size=10, seed=9, rank=rank, world_size=world_size) for rank in range(world_size)
    ]
    for sampler in later:
        sampler.restore(two[0].state())
    for _ in range(3):
        assert [i for s in later for i in s.sample().index.tolist()] == whole.sample().index.tolist()
    with pytest.raises(StoreError, match="rank: expected a number from 0 to 1, got 2"):
        Sampler(reader, ALL, batch_size=10, rank=2, world_size=2)


def test_a_state_is_refused_where_it_does_not_belong(reader: Reader) -> None:
    sampler = Sampler(reader, ALL, batch_size=4)
    sampler.follow()
    state = sampler.state()
    with pytest.raises(StoreError, match="restored before it follows the store; make a new one"):
        sampler.restore(state)
    with pytest.raises(StoreError, match="the state is of 'all', and this sampler of 'demo'"):
        Sampler(reader, DEMO, batch_size=4).restore(state)
    with pytest.raises(StoreError, match="the state is of commit 99, and this store has only 15; is it the right"):
        Sampler(reader, ALL, batch_size=4).restore({**state, "commit": 99})


def test_a_batch_of_what_was_removed_cannot_be_drawn_again(tmp_path: Path) -> None:
    path = tmp_path / "purged"
    with Store.open(path) as store:
        writer = store.writer("w", SPEC)
        for seed in range(4):
            writer.begin()
            steps, last = random_steps(SPEC, 5, seed)
            for step in steps:
                writer.append(step)
            writer.end(last)
        with Reader(path) as opened:
            sampler = Sampler(opened, ALL, batch_size=4)
            sampler.follow()
            sampler.sample()
        store.delete([2])
        compact(store, min_dead=0.0)
    with Reader(path) as opened, pytest.raises(StoreError, match=r"episode 2 .* was removed by compaction"):
        Sampler(opened, ALL, batch_size=4).rebuild(str(sampler.last_record))


def test_damage_to_a_small_field_is_not_served(reader: Reader) -> None:
    segment = segment_files(reader.path)[0]
    with segment.open("r+b") as file:
        file.seek(read_layout(segment).columns["reward"].at(2))
        file.write(b"\x01\x02")
    sampler = Sampler(reader, ALL, batch_size=200)
    sampler.follow()
    with pytest.raises(DamageError, match="a field of row 2 is not what was written; run `understudy verify`"):
        sampler.sample()


def test_compaction_between_following_and_sampling(tmp_path: Path) -> None:
    path = tmp_path / "moving"
    with Store.open(path, segment_bytes=4000) as store, Reader(path) as one, Reader(path) as two:
        writer = store.writer("w", SPEC)
        for seed in range(40):
            writer.begin()
            steps, last = random_steps(SPEC, 9, seed, human=False)
            for step in steps:
                writer.append(step)
            writer.end(last)
        keep = View(name="keep", clauses=(Clause(where="labels not like '%drop%'"),))
        dropped = list(range(2, 40, 3))
        store.label(dropped, {"drop": "yes"})
        plain, moved = Sampler(one, keep, batch_size=50, seed=3), Sampler(two, keep, batch_size=50, seed=3)
        everything = Sampler(two, ALL, batch_size=500, seed=3)
        for sampler in (plain, moved, everything):
            sampler.follow()
        wanted = plain.sample()
        for segment in two._segments.values():  # as if this process had not opened the files yet
            segment.close()
        two._segments.clear()
        store.delete(dropped)
        assert compact(store, min_dead=0.0).rows_moved > 0
        assert moved.sample().observation.tolist() == wanted.observation.tolist()
        with pytest.raises(StoreError, match=r"was deleted and its rows removed since commit .*; call follow"):
            everything.sample()
        assert everything.follow() == 27 * 9
        everything.sample()

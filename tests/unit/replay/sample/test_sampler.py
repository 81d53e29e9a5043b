"""Sampler: the same batches for the same seed, commit and number; and what it refuses."""

from pathlib import Path

import pytest

from understudy.core import DamageError, StoreError
from understudy.core.examples import random_steps, small_spec
from understudy.replay import Reader, Store, compact
from understudy.replay.format.paths import segment_files
from understudy.replay.format.segment import read_layout
from understudy.replay.read.view import DEMO, Clause, View
from understudy.replay.sample.sampler import Sampler

LENGTHS = (3, 10, 1, 25, 7, 14)  # steps of the episodes 1 to 6, see conftest.py
SPEC = small_spec()
ALL = View(name="all", clauses=(Clause(),))


def test_an_empty_view_says_so(reader: Reader) -> None:
    sampler = Sampler(reader, View(name="none", clauses=()), batch_size=4)
    sampler.follow()
    with pytest.raises(StoreError, match="view 'none': there is nothing to draw as of commit 15; record something"):
        sampler.sample()


def test_a_sampler_that_has_not_followed_says_what_is_missing(reader: Reader) -> None:
    sampler = Sampler(reader, ALL, batch_size=4)
    wanted = r"nothing to draw as of commit 0; the store is at commit 15, so call follow\(\) first"
    with pytest.raises(StoreError, match=wanted):
        sampler.sample()
    sampler.follow()
    assert len(sampler.sample().reward) == 4


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

"""Sampled transitions against a brute-force reconstruction."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from tests.unit.replay.sample.worlds import SIZES, World

from understudy.replay import Reader
from understudy.replay.read.batch_shapes import Transitions
from understudy.replay.read.view import DEMO, EVERYTHING, ONLINE
from understudy.replay.sample.sampler import Sampler


@pytest.mark.parametrize("seed", [3, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in (0, 1, 2, 4, 5))])
def test_every_transition_is_right_while_the_world_goes_on(seed: int, tmp_path: Path) -> None:
    assert sample_a_world(tmp_path / "store", seed, num_batches=3) > 3000


@pytest.mark.nightly
def test_a_million_transitions_are_right(tmp_path: Path) -> None:
    total = 0
    for seed in range(100, 1000):
        total += sample_a_world(tmp_path / f"store-{seed}", seed, num_batches=40)
        shutil.rmtree(tmp_path / f"store-{seed}")
        print(f"{total:,} transitions, 0 wrong", flush=True)
        if total >= 1_000_000:
            return
    pytest.fail(f"only {total} were sampled")


def sample_a_world(path: Path, seed: int, num_batches: int) -> int:
    """Live, sample and compare in turn; returns how many transitions were compared."""
    total = 0
    world = World(path, seed, num_actors=2 + seed % 4)
    world.live(300)
    with Reader(path) as reader:
        samplers = [
            Sampler(
                reader,
                view,
                batch_size=64,
                seed=seed,
                shape=Transitions(num_steps=num_steps, discount=0.9),
                resize=SIZES if resized else None,
            )
            for view in (DEMO, ONLINE, EVERYTHING)
            for num_steps, resized in ((1, seed % 2 == 0), (3, seed % 2 == 1))
        ]
        for _ in range(8):
            world.live(60)
            for sampler in samplers:
                truth = world.steps(sampler.view.name)
                assert sampler.follow() == len(truth)
                if not truth:
                    continue
                span, offset = sampler.index.find(np.arange(len(truth)))
                steps = sampler.step_index
                index = steps.span_first_index.values[span] + offset - 1
                found = zip(steps.span_episode.values[span], index, strict=True)
                assert {(int(e), int(i)) for e, i in found} == truth
                rows = steps.row_number(span, offset)
                assert [sampler.index.position_of_row(int(row)) for row in rows] == list(range(len(truth)))
                assert np.array_equal(np.flatnonzero(sampler.index.row_mask()), rows)
                assert [part.tolist() for part in steps.row_position(rows)] == [span.tolist(), offset.tolist()]
                for _ in range(num_batches):
                    batch = sampler.sample()
                    total += len(batch)
                    assert {(int(e), int(i)) for e, i in zip(batch.episode, batch.index, strict=True)} <= truth
                    num_steps: int = sampler.shape.num_steps  # type: ignore[attr-defined]
                    sizes = SIZES if (num_steps == 3) == (seed % 2 == 1) else None
                    world.check(batch, num_steps, 0.9, sizes)
        for sampler in samplers:
            sampler.close()
    world.close()
    return total


def test_the_same_state_gives_the_same_batches_after_the_store_has_grown(tmp_path: Path) -> None:
    world = World(tmp_path / "store", 7)
    world.live(400)
    with Reader(tmp_path / "store") as reader:
        first = Sampler(reader, DEMO, batch_size=32, seed=5)
        first.follow()
        for _ in range(3):
            first.sample()
        state = first.state()
        wanted = [first.sample() for _ in range(20)]
    # grow without purging what was there then
    for _ in range(300):
        world._act(world.rng.randrange(world.num_actors))
    world.commit_all()
    world._judge()
    world._delete()
    with Reader(tmp_path / "store") as reader:
        again = Sampler(reader, DEMO, batch_size=32, seed=5)
        again.restore(json.loads(json.dumps(state)))
        for batch in wanted:
            new = again.sample()
            assert np.array_equal(new.episode, batch.episode)
            assert np.array_equal(new.index, batch.index)
            assert np.array_equal(new.observation["camera"], batch.observation["camera"])
    world.close()

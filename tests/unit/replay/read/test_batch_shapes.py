"""Stacks and sequences against a brute-force reconstruction, and a foil that shows that the test can fail."""

from itertools import pairwise

import numpy as np
import pytest
from tests.unit.replay.sample.worlds import Truth, World, observation_of

from understudy.core import Source, StoreError
from understudy.replay import Reader
from understudy.replay.read.batch_shapes import Sequences, Transitions
from understudy.replay.read.view import DEMO, EVERYTHING, ONLINE, Clause, View
from understudy.replay.sample.sampler import Sampler
from understudy.replay.sample.selectors import Uniform, UniformEpisodes


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory):
    made = World(tmp_path_factory.mktemp("shapes") / "store", 11, num_actors=4)
    made.live(900)
    yield made
    made.close()


def by_id(world: World) -> dict[int, Truth]:
    return {episode.id: episode for episode in world.episodes.values()}


@pytest.mark.parametrize("num_steps", [1, 3])
@pytest.mark.parametrize("stack", [2, 4])
def test_stacks_never_cross_an_episode(world: World, stack: int, num_steps: int) -> None:
    with Reader(world.path) as reader:
        shape = Transitions(stack=stack, num_steps=num_steps, discount=0.5)
        sampler = Sampler(reader, ONLINE, batch_size=64, shape=shape, seed=3)
        sampler.follow()
        batch, truth = sampler.make(), by_id(world)
        for _ in range(10):
            sampler.sample(batch)
            for b in range(64):
                episode, index = truth[int(batch.episode[b])], int(batch.index[b])
                count = int(batch.num_steps[b])
                assert count == min(num_steps, episode.num_transitions - index)
                for place in range(stack):
                    here = max(index - stack + 1 + place, 0)
                    assert batch.observation["id"][b, place].tolist() == [episode.uid, here]
                    frame = observation_of(episode.uid, here)["camera"]
                    assert np.array_equal(batch.observation["camera"][b, place], frame)
                assert batch.next_observation["id"][b, -1].tolist() == [episode.uid, index + count]
                if num_steps == 1:
                    for place in range(stack):
                        there = max(index - stack + 2 + place, 0)
                        assert batch.next_observation["id"][b, place].tolist() == [episode.uid, there]


def test_observation_and_next_observation_share_their_frames(world: World) -> None:
    with Reader(world.path) as reader:
        sampler = Sampler(reader, ONLINE, batch_size=8, shape=Transitions(stack=4))
        sampler.follow()
        batch = sampler.sample()
        assert np.shares_memory(batch.observation["camera"], batch.next_observation["camera"])
        assert np.array_equal(batch.observation["camera"][:, 1:], batch.next_observation["camera"][:, :-1])


@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("length", [1, 5, 12])
def test_sequences(world: World, length: int, padded: bool) -> None:
    with Reader(world.path) as reader:
        sampler = Sampler(reader, EVERYTHING, batch_size=32, shape=Sequences(length=length, padded=padded), seed=4)
        truth = by_id(world)
        starts = {
            (episode, index)
            for episode, index in world.steps("everything")
            if padded or index + length <= truth[episode].num_transitions
        }
        assert sampler.follow() == len(starts)
        batch = sampler.make()
        for _ in range(15):
            sampler.sample(batch)
            for b in range(32):
                episode, index = truth[int(batch.episode[b])], int(batch.index[b])
                assert (episode.id, index) in starts
                left = min(length, episode.num_transitions - index)
                assert batch.weight[b].tolist() == [1.0] * left + [0.0] * (length - left)
                wanted = [[episode.uid, index + place] for place in range(left + 1)]
                assert batch.observation["id"][b].tolist() == wanted + [[0, 0]] * (length - left)
                assert batch.action[b].tolist() == wanted[:-1] + [[0, 0]] * (length - left)
                rewards = episode.rewards[index : index + left] + [0.0] * (length - left)
                assert batch.reward[b].tolist() == rewards
                last = index + left == len(episode.sources)
                assert batch.terminated[b].tolist() == [
                    place == left - 1 and last and episode.terminated for place in range(length)
                ]
                frame = observation_of(episode.uid, index + left)["camera"]
                assert np.array_equal(batch.observation["camera"][b, left], frame)


def test_shapes_refuse_what_they_cannot_be() -> None:
    with pytest.raises(StoreError, match="transitions: expected num_steps and stack from 1 and a discount from 0 to 1"):
        Transitions(num_steps=0)
    with pytest.raises(StoreError, match="sequences: expected a length from 1, got 0"):
        Sequences(length=0)
    with pytest.raises(StoreError, match="last_steps: expected None or a number from 1, got 0"):
        Uniform(last_steps=0)


# ---- the foil


def row_position_demo_buffer(world: World) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """The usual way: the intervened steps go into a buffer of their own, and the frame after a step is the next row.

    Returns pairs of (episode, index): an observation and what such a buffer takes for its next observation.
    """
    rows = [
        (episode.uid, index)
        for episode in world.episodes.values()
        for index in range(episode.num_transitions)
        if episode.sources[index] is Source.HUMAN
    ]
    return list(pairwise(rows))


def is_right(here: tuple[int, int], there: tuple[int, int]) -> bool:
    return there == (here[0], here[1] + 1)


def test_a_buffer_by_row_position_pairs_wrong_frames_and_ours_does_not(world: World) -> None:
    foil = row_position_demo_buffer(world)
    wrong = sum(not is_right(here, there) for here, there in foil)
    assert wrong / len(foil) > 0.1  # every burst of takeover ends in a wrong pair
    with Reader(world.path) as reader:
        sampler = Sampler(reader, DEMO, batch_size=256, seed=5)
        sampler.follow()
        for _ in range(20):
            batch = sampler.sample()
            pairs = zip(batch.observation["id"].tolist(), batch.next_observation["id"].tolist(), strict=True)
            assert all(is_right(tuple(here), tuple(there)) for here, there in pairs)


def test_action_blocks(world: World) -> None:
    with Reader(world.path) as reader:
        whole = Sampler(reader, EVERYTHING, batch_size=32, shape=Sequences(length=6), seed=6)
        blocks = Sampler(
            reader, EVERYTHING, batch_size=32, shape=Sequences(length=6, first_observation_only=True), seed=6
        )
        whole.follow()
        blocks.follow()
        for _ in range(5):
            sequence, block = whole.sample(), blocks.sample()
            assert block.observation["camera"].shape == (32, 1, 20, 20, 3)
            assert np.array_equal(block.observation["camera"], sequence.observation["camera"][:, :1])
            assert np.array_equal(block.action, sequence.action)
            assert np.array_equal(block.weight, sequence.weight)


def test_whole_episodes(world: World) -> None:
    ended = View(name="ended", clauses=(Clause(where="state = 'ended'"),))
    with Reader(world.path) as reader:
        longest = max(episode.num_transitions for episode in world.episodes.values())
        sampler = Sampler(
            reader, ended, batch_size=16, shape=Sequences(length=longest), selector=UniformEpisodes(from_start=True)
        )
        sampler.follow()
        batch = sampler.sample()
        for b in range(16):
            episode = by_id(world)[int(batch.episode[b])]
            count = int(batch.weight[b].sum())
            assert (batch.index[b], count) == (0, episode.num_transitions)
            assert batch.action[b, :count, 1].tolist() == list(range(count))
            assert batch.terminated[b, count - 1] or batch.truncated[b, count - 1]
    with pytest.raises(StoreError, match="by_steps and from_start exclude each other"):
        UniformEpisodes(by_steps=True, from_start=True)

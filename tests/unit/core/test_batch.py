import dataclasses

import numpy as np
import pytest
from tests.unit.core.complaints import complaint

from understudy.core import SequenceBatch, TransitionBatch

B, L = 4, 3


def transitions(**changes):
    fields = {
        "observation": {"camera": np.zeros((B, 2, 2, 3), np.uint8), "state": np.zeros((B, 5), np.float32)},
        "action": np.zeros((B, 2), np.float32),
        "reward": np.zeros(B, np.float32),
        "next_observation": {"camera": np.zeros((B, 2, 2, 3), np.uint8), "state": np.zeros((B, 5), np.float32)},
        "terminated": np.zeros(B, bool),
        "truncated": np.zeros(B, bool),
        "num_steps": np.ones(B, np.int32),
        "source": np.zeros(B, np.uint8),
        "policy_version": np.zeros(B, np.int64),
        "proposal": np.zeros((B, 2), np.float32),
        "has_proposal": np.zeros(B, bool),
        "extras": {},
        "episode": np.zeros(B, np.int64),
        "index": np.zeros(B, np.int32),
        "weight": np.ones(B, np.float32),
    }
    return TransitionBatch(**fields | changes)


def sequences(**changes):
    fields = {
        "observation": {"state": np.zeros((B, L + 1, 5), np.float32)},
        "action": np.zeros((B, L, 2), np.float32),
        "reward": np.zeros((B, L), np.float32),
        "terminated": np.zeros((B, L), bool),
        "truncated": np.zeros((B, L), bool),
        "source": np.zeros((B, L), np.uint8),
        "policy_version": np.zeros((B, L), np.int64),
        "proposal": np.zeros((B, L, 2), np.float32),
        "has_proposal": np.zeros((B, L), bool),
        "extras": {"value": np.zeros((B, L), np.float32)},
        "episode": np.zeros(B, np.int64),
        "index": np.zeros(B, np.int32),
        "weight": np.ones((B, L), np.float32),
    }
    return SequenceBatch(**fields | changes)


def names(batch):
    return [field.name for field in dataclasses.fields(batch)]


def test_a_batch_is_as_long_as_its_rows():
    assert len(transitions()) == B
    assert len(sequences()) == B


@pytest.mark.parametrize("name", [name for name in names(TransitionBatch) if name != "reward"])
def test_every_field_of_a_transition_has_the_rows_of_the_rewards(name):
    said = complaint(transitions, **{name: np.zeros((B + 1, 2), np.float32)})
    assert said == f"{name}: expected leading dimensions [4], got float32 [5, 2]; take it from the same steps as reward"
    assert complaint(transitions, **{name: np.float32(0)}).startswith(
        f"{name}: expected leading dimensions [4], got float32 []"
    )


WANTED = {"observation": [B, L + 1], "episode": [B], "index": [B]}


@pytest.mark.parametrize("name", [name for name in names(SequenceBatch) if name != "reward"])
def test_every_field_of_a_sequence_has_the_rows_of_the_rewards(name):
    wanted = WANTED.get(name, [B, L])
    assert sequences(**{name: np.zeros((*wanted, 2))}) is not None
    for axis in range(len(wanted)):
        shape = list(wanted)
        shape[axis] += 1
        said = complaint(sequences, **{name: np.zeros(shape)})
        assert said == (
            f"{name}: expected leading dimensions {wanted}, got float64 {shape}; take it from the same steps as reward"
        )


@pytest.mark.parametrize("name", ["action", "weight", "observation"])
def test_a_sequence_needs_both_leading_dimensions(name):
    said = complaint(sequences, **{name: np.zeros(B)})
    assert said.startswith(f"{name}: expected leading dimensions {WANTED.get(name, [B, L])}, got float64 [4];")


def test_the_rewards_need_the_leading_dimensions():
    said = complaint(transitions, reward=np.float32(1))
    assert said == "reward: expected leading dimensions [B], got float32 []; stack the rows first"
    said = complaint(sequences, reward=np.zeros(B))
    assert said == "reward: expected leading dimensions [B, L], got float64 [4]; stack the rows first"


def test_the_path_of_a_nested_field_is_named():
    camera = {"cameras": {"wrist": np.zeros((B, L, 8, 8, 3), np.uint8)}}
    said = complaint(sequences, observation=camera)
    assert said.startswith("observation/cameras/wrist: expected leading dimensions [4, 4], got uint8 [4, 3, 8, 8, 3]")


def test_a_ragged_field_is_a_list_with_one_value_per_row():
    prompts = ["pick", "place", "", "猫"]
    assert transitions(observation={"prompt": prompts}).observation["prompt"] is prompts
    images = [np.zeros(size, np.uint8) for size in range(B)]
    assert transitions(observation=images).observation is images
    assert sequences(extras={"jpeg": images}).extras["jpeg"] is images
    assert complaint(transitions, observation={"prompt": prompts[:3]}) == (
        "observation/prompt: expected leading dimensions [4], got list ['pick', 'place', '']; "
        "take it from the same steps as reward"
    )
    assert complaint(sequences, extras={"thought": prompts[:1]}).startswith(
        "extras/thought: expected leading dimensions [4, 3], got list ['pick']"
    )


def test_an_empty_batch_is_a_batch():
    none = {name: np.zeros((0, 2)) for name in names(TransitionBatch)}
    assert len(TransitionBatch(**none)) == 0


@pytest.mark.parametrize("batch", [transitions(), sequences()])
def test_a_batch_is_frozen(batch):
    with pytest.raises(dataclasses.FrozenInstanceError):
        batch.reward = np.zeros(B)

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.strategies import array_specs, specs

from understudy.core import ArraySpec, Source, StepSpec, text
from understudy.core.examples import (
    CANONICAL,
    nested_spec,
    random_episode,
    random_steps,
    random_tree,
    random_value,
    robot_spec,
    small_spec,
    text_spec,
)
from understudy.core.tree import equal

SEEDS = st.integers(0, 2**32)


@given(array_specs(), SEEDS)
def test_a_random_value_fits_its_leaf(leaf, seed):
    value = random_value(leaf, np.random.default_rng(seed))
    assert leaf.check(value, "x") is not None
    if leaf.dtype != "str":
        assert value.dtype == leaf.dtype  # so that check had nothing to convert


@given(specs, SEEDS)
def test_a_random_tree_fits_its_spec(spec, seed):
    flat = spec.check(random_tree(spec, np.random.default_rng(seed)))
    assert flat.keys() == spec.flat.keys()


@pytest.mark.parametrize(
    ("leaf", "least", "most"),
    [
        (ArraySpec(shape=(500,), dtype="float32", low=-1, high=1), -1, 1),
        (ArraySpec(shape=(500,), dtype="float32", low=200), 200, 300),
        (ArraySpec(shape=(500,), dtype="float64", high=-200), -300, -200),
        (ArraySpec(shape=(500,), dtype="float64", low=-np.inf, high=np.inf), -100, 100),
        (ArraySpec(shape=(500,), dtype="int64"), -100, 100),
        (ArraySpec(shape=(500,), dtype="uint8"), 0, 100),
        (ArraySpec(shape=(500,), dtype="int8", low=-1000, high=1000), -128, 127),
        (ArraySpec(shape=(500,), dtype="int16", low=0.5, high=3.5), 1, 3),
    ],
)
def test_random_values_fill_the_bounds(leaf, least, most):
    value = random_value(leaf, np.random.default_rng(0))
    assert least <= value.min() < least + (most - least) / 10 + 1
    assert most - (most - least) / 10 - 1 < value.max() <= most


def test_random_values_follow_the_bounds_of_each_element():
    leaf = ArraySpec(shape=(500, 2), dtype="float32", low=(0, 50), high=(1, 60))
    value = random_value(leaf, np.random.default_rng(0))
    assert value[:, 0].max() <= 1
    assert value[:, 1].min() >= 50
    assert value[:, 1].max() > 59


@pytest.mark.parametrize("leaf", [text(), ArraySpec(shape=(None, 2), dtype="int8")])
def test_random_ragged_values_differ_in_length(leaf):
    rng = np.random.default_rng(0)
    lengths = {len(random_value(leaf, rng)) for _ in range(200)}
    assert 0 in lengths
    assert len(lengths) >= 9


@pytest.mark.parametrize("shape", [(), (100,)])
def test_random_truth_values_are_both(shape):
    rng = np.random.default_rng(0)
    values = np.array([random_value(ArraySpec(shape=shape, dtype="bool"), rng) for _ in range(100)])
    assert 0.3 < values.mean() < 0.7


def test_the_size_of_the_cameras():
    assert str(robot_spec().columns["observation/wrist_1"]) == "uint8 [128, 128, 3]"
    assert str(robot_spec(16).columns["observation/wrist_2"]) == "uint8 [16, 16, 3]"


FLAGS = 4 + 1 + 1 + 1 + 8 + 1 + 1  # bytes of the reward and of what every row has


@pytest.mark.parametrize(
    ("spec", "row_bytes"),
    [
        (robot_spec(16), 2 * 16 * 16 * 3 + 20 * 4 + 2 * 7 * 4 + FLAGS),
        (small_spec(), 4 * 4 + 2 * 2 * 4 + FLAGS),
        (nested_spec(), 8 * 8 * 3 + 8 * 8 * 2 + 7 * 8 + 1 + 2 * (6 * 4 + 8) + 4 + 2 + FLAGS),
        (text_spec(), 3 * 4 + FLAGS),
    ],
)
def test_the_canonical_specs(spec, row_bytes):
    assert sum(leaf.row_bytes for leaf in spec.columns.values()) == row_bytes
    assert StepSpec.from_json(json.loads(spec.json_text)) == spec


def test_the_actions_of_arms_are_bounded():
    actions = [robot_spec().columns["action"], nested_spec().columns["action/arm"]]
    assert [(leaf.low, leaf.high) for leaf in actions] == [(-1, 1), (-1, 1)]
    gripper = nested_spec().columns["action/gripper"]
    assert (gripper.low, gripper.high) == (0, 2)


def test_an_episode_follows_from_its_seed():
    assert random_episode(nested_spec(), 8, 1).equals(random_episode(nested_spec(), 8, 1))
    assert not random_episode(nested_spec(), 8, 1).equals(random_episode(nested_spec(), 8, 2))


@pytest.mark.parametrize("terminated", [True, False])
def test_random_steps_end_as_asked(terminated):
    steps, _ = random_steps(small_spec(), 5, 0, terminated=terminated)
    assert [step.last for step in steps] == [False] * 4 + [True]
    assert (steps[-1].terminated, steps[-1].truncated) == (terminated, not terminated)
    episode = random_episode(small_spec(), 5, 0, terminated=terminated)
    assert (episode.terminated[-1], episode.truncated[-1]) == (terminated, not terminated)
    assert episode.info.success is terminated


def test_random_episodes_terminate_unless_asked_otherwise():
    steps, _ = random_steps(small_spec(), 2, 0)
    assert steps[-1].terminated
    assert random_episode(small_spec(), 2, 0).terminated[-1]


def test_the_attributes_follow_from_the_seed():
    infos = [random_episode(small_spec(), num_steps, seed).info for num_steps, seed in ((6, 9), (7, 8))]
    assert [(x.task, x.init_state, x.seed, x.group, x.operator, x.kind) for x in infos] == [
        ("task-0", 2, 9, "group-2", None, "practice"),
        ("task-2", 1, 8, "group-2", "ada", "correction"),
    ]
    versions = random_episode(small_spec(), 21, 3).policy_version
    assert [versions[index] for index in (0, 9, 10, 20)] == [30, 30, 31, 32]


def test_a_human_takes_over_in_bursts_and_keeps_the_proposal():
    steps, _ = random_steps(small_spec(), 24, 0)
    human = [index for index, step in enumerate(steps) if step.source is Source.HUMAN]
    assert human == [6, 7, 8, 18, 19, 20]
    assert [index for index, step in enumerate(steps) if step.proposal is not None] == human
    assert not equal(steps[6].proposal, steps[6].action)

    steps, _ = random_steps(small_spec(), 24, 0, human=False)
    assert {step.source for step in steps} == {Source.POLICY}
    assert all(step.proposal is None for step in steps)


@pytest.mark.parametrize(
    ("name", "num_steps"),
    [("images", 12), ("nested", 9), ("text", 10), ("encoded", 11), ("one_step", 1), ("truncated", 20), ("long", 3000)],
)
def test_the_canonical_episodes(name, num_steps):
    spec, episode = CANONICAL[name]()
    assert len(episode) == num_steps
    assert episode.truncated[-1] == (name == "truncated")
    assert (episode.info.kind == "correction") == (Source.HUMAN in episode.source)
    for step in episode.steps():
        spec.row(step)
    spec.last_row(episode.last_observation)


def test_every_canonical_episode_is_tested_above():
    assert list(CANONICAL) == ["images", "nested", "text", "encoded", "one_step", "truncated", "long"]

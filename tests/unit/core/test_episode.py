import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.strategies import step_specs

from understudy.core import KINDS, SPLITS, ArraySpec, Episode, EpisodeError, EpisodeInfo, Source, SpecError, Step
from understudy.core.episode import stack
from understudy.core.examples import (
    CANONICAL,
    random_episode,
    random_steps,
    random_tree,
    random_value,
    small_spec,
    text_spec,
)
from understudy.core.tree import equal


def complaint(function, *args, **kwargs):
    """The text of the EpisodeError of a call."""
    with pytest.raises(EpisodeError) as caught:
        function(*args, **kwargs)
    return str(caught.value)


# --- attributes --------------------------------------------------------------------------------------------------


def test_the_defaults_of_an_episode():
    assert dataclasses.asdict(EpisodeInfo()) == {
        "task": None,
        "instruction": None,
        "init_state": None,
        "seed": None,
        "group": None,
        "actor": None,
        "operator": None,
        "success": None,
        "split": "train",
        "kind": "practice",
        "labels": {},
    }


@pytest.mark.parametrize("name", ["task", "instruction", "group", "actor", "operator"])
def test_an_attribute_that_is_text(name):
    assert getattr(EpisodeInfo(**{name: "å"}), name) == "å"
    assert type(getattr(EpisodeInfo(**{name: np.str_("a")}), name)) is str
    assert complaint(EpisodeInfo, **{name: 3}) == f"{name}: expected str or None, got int 3; convert it"
    assert complaint(EpisodeInfo, **{name: b"a"}) == f"{name}: expected str or None, got bytes b'a'; convert it"


@pytest.mark.parametrize("name", ["init_state", "seed"])
def test_an_attribute_that_is_a_whole_number(name):
    assert type(getattr(EpisodeInfo(**{name: np.uint32(3)}), name)) is int
    assert complaint(EpisodeInfo, **{name: "3"}) == f"{name}: expected int or None, got str '3'; convert it"
    assert complaint(EpisodeInfo, **{name: np.float64(3)}) == f"{name}: expected int or None, got float 3.0; convert it"
    assert complaint(EpisodeInfo, **{name: True}) == f"{name}: expected int or None, got bool True; convert it"
    assert complaint(EpisodeInfo, **{name: np.zeros(2)}) == f"{name}: expected int or None, got float64 [2]; convert it"


def test_success_is_a_truth_value():
    assert EpisodeInfo(success=np.bool_(True)).success is True
    assert complaint(EpisodeInfo, success=1) == "success: expected bool or None, got int 1; convert it"


def test_the_kinds_and_splits():
    assert KINDS == ("demonstration", "practice", "correction")
    assert SPLITS == ("train", "eval")
    assert [EpisodeInfo(kind=kind).kind for kind in KINDS] == list(KINDS)
    assert [EpisodeInfo(split=split).split for split in SPLITS] == list(SPLITS)
    said = complaint(EpisodeInfo, kind="demo")
    assert said == "kind: expected one of demonstration, practice, correction, got 'demo'"
    assert complaint(EpisodeInfo, split=None) == "split: expected one of train, eval, got None"


@pytest.mark.parametrize("labels", [{"a": 1}, {1: "a"}, {"a": None}])
def test_labels_are_text(labels):
    said = complaint(EpisodeInfo, labels=labels)
    assert said == f"labels: expected names and values that are text, got {labels!r}; convert"


@pytest.mark.parametrize(("labels", "shown"), [(None, "None"), ([("a", "b")], "list [('a', 'b')]")])
def test_labels_are_a_dict(labels, shown):
    said = complaint(EpisodeInfo, labels=labels)
    assert said == f"labels: expected a dict of text to text, got {shown}; convert it"


def test_labels_are_copied():
    mine = {"colour": "red"}
    info = EpisodeInfo(labels=mine)
    mine["colour"] = "blue"
    assert info.labels == {"colour": "red"}


# --- steps and columns -------------------------------------------------------------------------------------------


def counted(num_steps, **last):
    """Steps whose numbers tell where they stand, and the last observation."""
    steps = [
        Step(observation=np.full(4, i, np.float32), action=np.full(2, 10 + i, np.float32), reward=i / 2)
        for i in range(num_steps)
    ]
    steps[-1] = dataclasses.replace(steps[-1], **last)
    return steps, np.full(4, num_steps, np.float32)


def test_the_columns_of_an_episode():
    proposal = np.array([7, 7], np.float32)
    steps, last = counted(3, terminated=True, source=Source.HUMAN, policy_version=9, proposal=proposal)
    episode = Episode.from_steps(small_spec(), steps, last, EpisodeInfo(task="stack"))
    assert len(episode) == 3
    assert episode.observation[:, 0].tolist() == [0, 1, 2, 3]
    assert episode.action[:, 0].tolist() == [10, 11, 12]
    assert episode.proposal[:, 0].tolist() == [0, 0, 7]
    assert episode.has_proposal.tolist() == [False, False, True]
    assert episode.reward.tolist() == [0, 0.5, 1]
    assert episode.terminated.tolist() == [False, False, True]
    assert episode.truncated.tolist() == [False, False, False]
    assert episode.source.tolist() == [0, 0, 1]
    assert episode.policy_version.tolist() == [-1, -1, 9]
    assert episode.extras == {}
    assert episode.info.task == "stack"
    assert episode.last_observation.tolist() == [3, 3, 3, 3]
    dtypes = {path: str(column.dtype) for path, column in episode.columns().items()}
    assert dtypes == {
        "observation": "float32",
        "action": "float32",
        "proposal": "float32",
        "reward": "float32",
        "terminated": "bool",
        "truncated": "bool",
        "source": "uint8",
        "policy_version": "int64",
        "has_proposal": "bool",
    }


def test_a_ragged_field_is_a_list_of_rows():
    _, episode = CANONICAL["text"]()
    assert [len(episode.observation[name]) for name in ("prompt", "jpeg", "state")] == [11, 11, 11]
    assert isinstance(episode.observation["prompt"], list)
    assert isinstance(episode.observation["state"], np.ndarray)
    assert len({row.shape for row in episode.action}) > 1
    assert episode.last_observation["prompt"] == episode.observation["prompt"][-1]


def test_an_episode_has_a_step():
    said = complaint(Episode.from_steps, small_spec(), [], np.zeros(4, np.float32))
    assert said == "steps: expected at least one, got none; an episode has a step and a last observation"


@pytest.mark.parametrize("end", ["terminated", "truncated"])
@pytest.mark.parametrize("index", [0, 3])
def test_nothing_follows_an_end(end, index):
    steps, last = counted(5)
    steps[index] = dataclasses.replace(steps[index], **{end: True})
    said = complaint(Episode.from_steps, small_spec(), steps, last)
    assert said == (
        f"steps[{index}]: terminated or truncated, but {4 - index} more steps follow; end the episode there"
    )
    assert len(Episode.from_steps(small_spec(), steps[: index + 1], last)) == index + 1


def test_steps_and_the_last_observation_are_checked():
    steps, last = counted(2)
    with pytest.raises(SpecError, match=r"^observation: expected float32 \[4\], got float32 \[2\]; convert it"):
        Episode.from_steps(small_spec(), steps, last[:2])
    steps[1] = dataclasses.replace(steps[1], action=None)
    with pytest.raises(SpecError, match=r"^action: expected float32 \[2\], got None; pass a numpy array$"):
        Episode.from_steps(small_spec(), steps, last)


def test_a_step_by_its_index():
    steps, last = counted(3, truncated=True, source=Source.SCRIPT, policy_version=2)
    episode = Episode.from_steps(small_spec(), steps, last)
    for index in (2, -1):
        step = episode.step(index)
        assert step.observation.tolist() == [2, 2, 2, 2]
        assert step.action.tolist() == [12, 12]
        assert (step.reward, step.terminated, step.truncated) == (1.0, False, True)
        assert (step.source, step.policy_version, step.proposal) == (Source.SCRIPT, 2, None)
    for index in (3, -4):
        with pytest.raises(IndexError):
            episode.step(index)


@given(step_specs, st.integers(1, 5), st.integers(0, 2**32), st.booleans())
def test_steps_give_back_the_episode_they_came_from(spec, num_steps, seed, terminated):
    steps, last = random_steps(spec, num_steps, seed % 1000, terminated=terminated)
    rng = np.random.default_rng(seed)
    steps = [
        dataclasses.replace(
            step,
            reward=random_value(spec.reward, rng) if spec.reward.shape else int(rng.integers(-9, 9)),
            proposal=random_tree(spec.action, rng) if rng.random() < 0.5 else None,
        )
        for step in steps
    ]
    info = EpisodeInfo(seed=seed, success=terminated)
    episode = Episode.from_steps(spec, steps, last, info)
    again = Episode.from_steps(spec, list(episode.steps()), episode.last_observation, info)
    assert again.equals(episode)
    for step, given_step in zip(episode.steps(), steps, strict=True):
        assert equal(step.observation, given_step.observation)
        assert (step.proposal is None) == (given_step.proposal is None)


@pytest.mark.parametrize("name", CANONICAL)
def test_columns_with_their_last_row_give_back_the_episode(name):
    spec, episode = CANONICAL[name]()
    rows = [spec.row(step) for step in episode.steps()] + [spec.last_row(episode.last_observation)]
    columns = {path: stack([row[path] for row in rows], leaf) for path, leaf in spec.columns.items()}
    assert "is_step" in columns
    assert Episode.from_columns(columns, episode.info).equals(episode)


# --- equality ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted(random_episode(text_spec(), 9, 1).columns()))
def test_episodes_that_differ_in_one_row_are_not_equal(path):
    episode, other = (random_episode(text_spec(), 9, 1) for _ in range(2))
    assert episode.equals(other)
    column = other.columns()[path]  # no copy
    if isinstance(column, np.ndarray):
        column[4] = column[4] == 0
    elif isinstance(column[4], str):
        column[4] += "x"
    else:
        column[4] = np.concatenate([column[4], np.zeros_like(column[4], shape=(1, *column[4].shape[1:]))])
    assert not episode.equals(other)
    assert not other.equals(episode)


def test_episodes_that_differ_in_an_attribute_are_not_equal():
    episode = random_episode(small_spec(), 3, 1)
    assert episode.equals(random_episode(small_spec(), 3, 1))
    assert not episode.equals(dataclasses.replace(episode, info=dataclasses.replace(episode.info, seed=2)))


def test_episodes_are_frozen():
    episode = random_episode(small_spec(), 3, 1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        episode.reward = episode.reward
    with pytest.raises(dataclasses.FrozenInstanceError):
        episode.info.seed = 2


def test_stack_keeps_the_shape_of_leaves_without_elements():
    assert stack([np.zeros((0, 2))] * 3, ArraySpec(shape=(0, 2), dtype="float64")).shape == (3, 0, 2)
    assert stack([1, 2], ArraySpec(shape=(), dtype="int8")).dtype == np.int8


@pytest.mark.parametrize(
    ("label", "names"),
    [
        (
            '{"action": ["a", "b"], "state": {"motors": ["c"], "grip": ["d"]}}',
            {"action": ("a", "b"), "state": ("c", "d")},
        ),
        ('{"action": ["a", 3], "state": null, "x": {"y": "z"}}', {}),
        ("[1]", {}),
        ("no JSON", {}),
        (None, {}),
    ],
)
def test_the_names_of_numbers_are_a_label(label: str | None, names: dict[str, tuple[str, ...]]) -> None:
    assert EpisodeInfo(labels={} if label is None else {"names": label}).names == names

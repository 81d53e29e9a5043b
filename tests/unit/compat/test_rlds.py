"""TF-Agents' three functions for RLDS: its own published cases as behaviours, and each of its defects mended.

Its 39 cases are here as behaviours. Those that encode a defect end differently, and say so:

- conversion of complete and of multiple episodes, with and without policy (4): the discount into the terminal state is
  1 there and 0 here, since nothing is to be had behind it;
- push of the five valid data sets (5): 3, 3, 1, 1, 7 there, which are steps; 2, 2, 0, 0, 4 here, which are pairs;
- the same with a policy_info (5): there it is pushed into a table that has no place for it; here that is refused, and a
  store, which takes it, gives 2, 2, 0, 0, 4.
"""

from __future__ import annotations

import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.waiting import wait_for

from understudy.compat import (
    Trajectory,
    convert_rlds_to_trajectories,
    create_trajectory_data_spec,
    push_rlds_to_replay,
    replay_spec,
)
from understudy.core import ArraySpec, EpisodeError, SpecError
from understudy.core import tree as trees
from understudy.formats import find_format
from understudy.formats.rlds import read_rlds
from understudy.replay import Reader, Store, verify
from understudy.service import Server, ServerConfig, connect

GOLDEN = Path(__file__).parents[2] / "golden" / "formats" / "rlds" / "rlds.tar.xz"
OBSERVATIONS = np.array([[1, 2], [3, 4], [5, 6]], np.float32)
ACTIONS = np.array([[11], [21], [31]], np.float32)
REWARDS = np.array([1, 2, 3], np.float32)


def episode(rows: int = 3, *, terminal: bool = True, **others: Any) -> dict[str, Any]:
    last = np.arange(rows) == rows - 1
    return {
        "steps": {
            "observation": OBSERVATIONS[:rows],
            "action": ACTIONS[:rows],
            "reward": REWARDS[:rows],
            "discount": np.ones(rows, np.float32),
            "is_first": np.arange(rows) == 0,
            "is_last": last,
            "is_terminal": last & terminal,
            **others,
        }
    }


COMPLETE, TRUNCATED, SINGLE = episode(), episode(terminal=False), episode(1, terminal=False)
EXTRA = episode(1, terminal=False, extra_param=np.array([True]))
VALID = {
    "complete": [COMPLETE],
    "truncated": [TRUNCATED],
    "single": [SINGLE],
    "extra_param": [EXTRA],
    "multiple": [COMPLETE, SINGLE, TRUNCATED],
}
# (step type, next step type, row, discount) of each trajectory
AS_TRAJECTORIES = {
    "complete": [(0, 1, 0, 1.0), (1, 2, 1, 0.0), (2, 0, 2, 0.0)],
    "truncated": [(0, 1, 0, 1.0), (1, 2, 1, 1.0), (2, 0, 2, 1.0)],
    "single": [(2, 2, 0, 1.0)],
    "extra_param": [(2, 2, 0, 1.0)],
}
AS_TRAJECTORIES["multiple"] = [*AS_TRAJECTORIES["complete"], *AS_TRAJECTORIES["single"], *AS_TRAJECTORIES["truncated"]]
PAIRS = {"complete": 2, "truncated": 2, "single": 0, "extra_param": 0, "multiple": 4}

INVALID = {
    "a mid step before a first": (
        [episode(is_first=np.array([True, False, True]), is_last=np.zeros(3, bool), is_terminal=np.zeros(3, bool))],
        "episode 0, step 1: is not the last, and a first step follows",
    ),
    "an unfinished episode": (
        [episode(is_last=np.zeros(3, bool), is_terminal=np.zeros(3, bool))],
        "episode 0, step 2: is not the last, and a first step follows",
    ),
    "a terminal step that is not last": (
        [episode(is_last=np.zeros(3, bool))],
        "episode 0, step 2: is terminal and not the last",
    ),
    "a last step before one that is not first": (
        [episode(is_last=np.array([False, True, False]), is_terminal=np.array([False, True, False]))],
        "episode 0, step 1: is the last, and no first step follows",
    ),
}


def policy_info(step: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    return {"action": step["action"]}


def assert_trajectories(found: list[Trajectory], case: str) -> None:
    wanted = AS_TRAJECTORIES[case]
    assert len(found) == len(wanted)
    for trajectory, (kind, next_kind, row, discount) in zip(found, wanted, strict=True):
        assert (trajectory.step_type, trajectory.next_step_type) == (kind, next_kind)
        np.testing.assert_array_equal(trajectory.observation, OBSERVATIONS[row])
        np.testing.assert_array_equal(trajectory.action, ACTIONS[row])
        assert (trajectory.reward, trajectory.discount) == (REWARDS[row], discount)
        assert trajectory.discount.dtype == np.float32


# ---- their cases


@pytest.mark.parametrize("case", VALID)
def test_the_data_spec(case: str) -> None:
    kind, number = ArraySpec(shape=(), dtype="int32"), ArraySpec(shape=(), dtype="float32")
    assert create_trajectory_data_spec(VALID[case]) == Trajectory(
        step_type=kind,
        observation=ArraySpec(shape=(2,), dtype="float32"),
        action=ArraySpec(shape=(1,), dtype="float32"),
        policy_info=(),
        next_step_type=kind,
        reward=number,
        discount=ArraySpec(shape=(), dtype="float32", low=0, high=1),
    )


@pytest.mark.parametrize("function", [create_trajectory_data_spec, convert_rlds_to_trajectories, replay_spec])
def test_data_without_steps_or_without_their_features_is_refused(function: Any) -> None:
    with pytest.raises(ValueError, match="expected a dict with the steps of an RLDS episode, got a dict with random"):
        function([{"random": True}])
    wrong = [{"steps": [{"random1": True, "random2": False}]}]
    with pytest.raises(ValueError, match=r"expected steps with observation, action, reward.*got random1, random2"):
        function(wrong)


@pytest.mark.parametrize("case", VALID)
def test_conversion(case: str) -> None:
    found = list(convert_rlds_to_trajectories(VALID[case]))
    assert_trajectories(found, case)
    assert all(trajectory.policy_info == () for trajectory in found)


@pytest.mark.parametrize("case", VALID)
def test_conversion_with_policy_info(case: str) -> None:
    found = list(convert_rlds_to_trajectories(VALID[case], policy_info))
    assert_trajectories(found, case)
    for trajectory in found:
        np.testing.assert_array_equal(trajectory.policy_info["action"], trajectory.action)


def test_conversion_with_a_field_that_only_the_policy_info_needs() -> None:
    (found,) = convert_rlds_to_trajectories(
        [EXTRA], lambda step, after: {"action": step["action"], "extra_param": step["extra_param"]}
    )
    assert found.policy_info["extra_param"]


@pytest.mark.parametrize("case", INVALID)
def test_conversion_refuses(case: str) -> None:
    data, text = INVALID[case]
    with pytest.raises(ValueError, match=text):
        list(convert_rlds_to_trajectories(data))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "store") as opened:
        yield opened


@pytest.mark.parametrize("case", VALID)
@pytest.mark.parametrize("with_policy", [False, True])
def test_push(store: Store, case: str, with_policy: bool) -> None:
    assert push_rlds_to_replay(VALID[case], store, policy_info if with_policy else None) == PAIRS[case]
    with Reader(store.path) as reader:
        episodes = [reader.read(record.id) for record in reader.episodes()]
    assert sum(map(len, episodes)) == PAIRS[case]
    for found in episodes:
        np.testing.assert_array_equal(found.observation, OBSERVATIONS)
        np.testing.assert_array_equal(found.action, ACTIONS[:2])
        np.testing.assert_array_equal(found.reward, REWARDS[:2])
        assert found.terminated[-1] != found.truncated[-1]
        assert found.extras["discount"].tolist() == [1.0, 1.0 - found.terminated[-1]]
        if with_policy:
            np.testing.assert_array_equal(found.extras["policy_info"]["action"], found.action)


@pytest.mark.parametrize("case", INVALID)
def test_push_refuses(store: Store, case: str) -> None:
    data, text = INVALID[case]
    with pytest.raises(ValueError, match=text):
        push_rlds_to_replay(data, store)
    assert nothing_in(store)


def nothing_in(store: Store) -> bool:
    with Reader(store.path) as reader:
        return not list(reader.episodes())


def test_push_refuses_a_writer_of_another_spec(store: Store) -> None:
    other = episode(observation=OBSERVATIONS[:, :1])
    writer = store.writer("rlds", replay_spec([other]))
    with pytest.raises(ValueError, match="the writer's spec is not that of the data"):
        push_rlds_to_replay([COMPLETE], writer)
    assert push_rlds_to_replay([other], writer) == 2


# ---- their defects


def test_nested_observations_are_those_of_their_step(store: Store) -> None:
    nested = episode(
        observation={"arm": {"pose": OBSERVATIONS}, "image": np.arange(3, dtype=np.uint8)}, action={"arm": ACTIONS}
    )
    for row, found in enumerate(convert_rlds_to_trajectories([nested])):
        np.testing.assert_array_equal(found.observation["arm"]["pose"], OBSERVATIONS[row])
        assert found.observation["image"] == row
        np.testing.assert_array_equal(found.action["arm"], ACTIONS[row])
    assert push_rlds_to_replay([nested], store) == 2
    with Reader(store.path) as reader:
        assert reader.read(1).observation["image"].tolist() == [0, 1, 2]


def test_the_discount_into_a_terminal_state_is_zero() -> None:
    assert [found.discount for found in convert_rlds_to_trajectories([COMPLETE])] == [1, 0, 0]
    assert [found.discount for found in convert_rlds_to_trajectories([TRUNCATED])] == [1, 1, 1]


def test_a_first_step_that_is_not_last_is_not_followed_by_a_first() -> None:
    unfinished = episode(1, is_last=np.array([False]), is_terminal=np.array([False]))
    with pytest.raises(EpisodeError, match="episode 0, step 0: is not the last, and a first step follows"):
        list(convert_rlds_to_trajectories([unfinished, COMPLETE]))


@pytest.mark.parametrize(
    "other",
    [
        {"value": np.zeros(2, np.float32)},
        {"value": np.float64(0)},
        {"other": np.float32(0)},
        (),
    ],
)
def test_policy_info_is_checked(store: Store, other: Any) -> None:
    infos = iter([{"value": np.float32(1)}, other, other])
    with pytest.raises(SpecError, match="episode 0, step 1: policy_info"):
        push_rlds_to_replay([COMPLETE], store, lambda step, after: next(infos))
    assert nothing_in(store)
    writer = store.writer("rlds", replay_spec([COMPLETE]))
    with pytest.raises(SpecError, match="the writer's spec is not that of the data"):
        push_rlds_to_replay([COMPLETE], writer, policy_info)


def test_a_push_that_fails_leaves_whole_episodes(store: Store) -> None:
    """Of the episode with the mistake there is nothing, whatever stood before it."""
    wrong, text = INVALID["a last step before one that is not first"]
    with pytest.raises(EpisodeError, match=text.replace("episode 0", "episode 2")):
        push_rlds_to_replay([COMPLETE, TRUNCATED, *wrong], store)
    bad = episode(reward=np.array([1, np.nan, 3], np.float32))
    with pytest.raises(SpecError, match="episode 0: reward: expected a finite number"):
        push_rlds_to_replay([bad], store)
    with Reader(store.path) as reader:
        assert [(record.num_steps, record.state) for record in reader.episodes()] == [(2, "ended"), (2, "ended")]
    assert store.last_commit == 3 + 1  # a commit for each episode, and one for each writer's beginning
    assert verify(store.path).problems == []


def test_what_is_counted_can_be_sampled(store: Store) -> None:
    pushed = push_rlds_to_replay(VALID["multiple"], store)
    with Reader(store.path) as reader:
        assert pushed == sum(record.num_steps for record in reader.episodes()) == 4


@pytest.mark.parametrize("field", ["discount", "reward", "action", "observation"])
def test_float64_is_taken(store: Store, field: str) -> None:
    wide = episode(**{field: np.asarray(COMPLETE["steps"][field], np.float64)})
    found = list(convert_rlds_to_trajectories([wide]))
    assert [float(trajectory.discount) for trajectory in found] == [1, 0, 0]
    assert push_rlds_to_replay([wide], store) == 2
    if field != "discount":
        assert np.asarray(getattr(found[0], field)).dtype == np.float64


# ---- what is taken, and where it goes


def test_steps_may_come_one_by_one() -> None:
    steps = COMPLETE["steps"]
    rows = [{name: column[row] for name, column in steps.items()} for row in range(3)]
    assert_trajectories(list(convert_rlds_to_trajectories([{"steps": rows}])), "complete")
    assert_trajectories(list(convert_rlds_to_trajectories(iter([{"steps": iter(rows)}]))), "complete")


def test_the_end_is_padded_with_a_zero_first_step() -> None:
    seen: list[dict[str, Any]] = []
    list(convert_rlds_to_trajectories([COMPLETE, SINGLE], lambda step, after: seen.append(after) or {"x": np.int8(1)}))
    assert [bool(after["is_first"]) for after in seen] == [False, False, True, True]
    np.testing.assert_array_equal(seen[2]["observation"], OBSERVATIONS[0])
    np.testing.assert_array_equal(seen[3]["observation"], [0, 0])
    assert not seen[3]["is_last"]


def test_an_episode_unlike_the_first_is_refused() -> None:
    with pytest.raises(SpecError, match=r"episode 1/steps/observation: expected float32 \[2\] as in the first episode"):
        list(convert_rlds_to_trajectories([COMPLETE, episode(observation=OBSERVATIONS[:, :1])]))
    with pytest.raises(SpecError, match="episode 1/steps/extra_param: expected the fields of the first episode"):
        list(convert_rlds_to_trajectories([COMPLETE, EXTRA]))
    with pytest.raises(EpisodeError, match="expected episodes, got none"):
        convert_rlds_to_trajectories([])


def test_what_read_rlds_gives_is_taken_and_is_what_an_import_gives(store: Store, tmp_path: Path) -> None:
    with tarfile.open(GOLDEN) as archive:
        archive.extractall(tmp_path, filter="data")
    place = tmp_path / "tfrecord" / "plain"
    data = read_rlds(place)
    rows = [len(episode["steps"]["is_first"]) for episode in data]
    assert create_trajectory_data_spec(data).reward == ArraySpec(shape=(), dtype="float64")
    assert len(list(convert_rlds_to_trajectories(data))) == sum(rows)
    assert push_rlds_to_replay(data, store) == sum(rows) - len(rows)
    with Reader(store.path) as reader:
        mine = [reader.read(record.id) for record in reader.episodes()]
    for found, (_, wanted) in zip(mine, find_format("rlds").read(place, {}).episodes(), strict=True):
        for name in ("observation", "action", "reward", "terminated", "truncated"):
            np.testing.assert_array_equal(getattr(found, name), getattr(wanted, name))


def test_push_to_a_server_gives_the_same_pairs(tmp_path: Path) -> None:
    nested = episode(observation={"pose": OBSERVATIONS, "text": ["a", "é", "猫"]})
    found = []
    with Store.open(tmp_path / "there") as there, Server(there, ServerConfig(port=0)) as server:
        with connect(server.address) as remote:
            assert push_rlds_to_replay([nested, nested], remote) == 4
            with remote.writer("mine", replay_spec([nested])) as writer:
                assert push_rlds_to_replay([nested], writer) == 2
        with Reader(there.path) as reader:
            found = [reader.read(record.id) for record in reader.episodes()]
            assert {record.info.split for record in reader.episodes()} == {"train"}
    with Store.open(tmp_path / "here") as here:
        push_rlds_to_replay([nested, nested, nested], here)
        with Reader(here.path) as reader:
            wanted = [reader.read(record.id) for record in reader.episodes()]
    assert len(found) == len(wanted) == 3
    assert all(a.equals(b) for a, b in zip(found, wanted, strict=True))


def begins_wrongly() -> dict[str, Any]:
    steps = {name: np.array(column) for name, column in COMPLETE["steps"].items()}
    steps["is_first"][0] = False
    return {"steps": steps}


ENDS_WRONGLY = {"steps": {**COMPLETE["steps"], "is_last": np.zeros(3, bool), "is_terminal": np.zeros(3, bool)}}


def test_a_second_episode_that_begins_wrongly_is_refused_alike_by_all(tmp_path: Path) -> None:
    data = [COMPLETE, begins_wrongly(), COMPLETE]
    text = r"episode 0, step \d+: is the last, and no first step follows; begin the next episode with is_first"
    with pytest.raises(EpisodeError, match=text):
        list(convert_rlds_to_trajectories(data))
    with Store.open(tmp_path / "new") as store:
        with pytest.raises(EpisodeError, match=text):
            push_rlds_to_replay(data, store)
        with Reader(store.path) as reader:
            assert len(list(reader.episodes())) == 1  # the whole one before it


def test_a_conversion_can_be_iterated_again() -> None:
    found = convert_rlds_to_trajectories([COMPLETE, COMPLETE])
    first, second = list(found), list(found)
    assert len(first) == len(second) > 0
    for a, b in zip(first, second, strict=True):
        assert trees.equal({**a._asdict(), "policy_info": {}}, {**b._asdict(), "policy_info": {}})
    assert next(found).step_type == first[0].step_type
    once = convert_rlds_to_trajectories(iter([COMPLETE]))
    assert len(list(once)) == len(first) // 2
    with pytest.raises(EpisodeError, match="it is an iterator, and was read already; pass a list"):
        list(once)


def test_the_discount_of_the_original_is_an_option(store: Store) -> None:
    steps = {name: np.array(column) for name, column in COMPLETE["steps"].items()}
    steps["is_terminal"][-1] = True
    steps["discount"][:] = 1
    ours, theirs = (
        [float(t.discount) for t in convert_rlds_to_trajectories([{"steps": steps}], discount=kind)]
        for kind in ("transition", "original")
    )
    assert theirs == [1.0] * (len(theirs) - 1) + [0.0]
    assert ours == [1.0] * (len(ours) - 2) + [0.0, 0.0]
    with pytest.raises(SpecError, match="discount: expected 'transition' or 'original', got 'none'"):
        convert_rlds_to_trajectories([COMPLETE], discount="none")


def test_threads_end_when_a_push_to_a_server_fails(tmp_path: Path) -> None:
    with (
        Store.open(tmp_path / "served") as store,
        Server(store, ServerConfig(port=0)) as server,
        connect(server.address) as remote,
    ):
        push_rlds_to_replay([COMPLETE], remote)  # the server's own threads stay
        before = set(threading.enumerate())
        for wrong in (begins_wrongly(), ENDS_WRONGLY):
            with pytest.raises(EpisodeError):
                push_rlds_to_replay([COMPLETE, wrong], remote)
        wait_for(lambda: not [t for t in set(threading.enumerate()) - before if not t.name.startswith("commit")])

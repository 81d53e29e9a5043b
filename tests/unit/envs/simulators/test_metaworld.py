"""Metaworld in its own virtual environment, if that is set up: real simulators in real processes."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.docs.pages import DOCS, blocks

from understudy.core import tree as trees
from understudy.envs import SuiteError, WorldError, WorldFactory, check_env
from understudy.envs.registry import WORLD_REGISTRY
from understudy.envs.simulators.metaworld import HAND_NAMES, STATE_NAMES, TASKS, MetaworldWorld
from understudy.envs.workers.isolated import IsolatedWorld

PAGE = DOCS / "simulators.md"
METAWORLD = WORLD_REGISTRY["metaworld"]
needs_metaworld = pytest.mark.skipif(not METAWORLD.ready, reason="run `understudy env setup metaworld` first")

GOAL = slice(STATE_NAMES.index("goal_x"), None)
STILL = np.zeros(4, np.float32)


def open_metaworld(**options: Any) -> IsolatedWorld:
    return IsolatedWorld(
        WorldFactory(
            factory=METAWORLD.factory, options=options, python=str(METAWORLD.python), env=dict(METAWORLD.variables)
        )
    )


@pytest.fixture(scope="module")
def world() -> Iterator[IsolatedWorld]:
    """All tasks, no images."""
    with open_metaworld(cameras=[]) as opened:
        yield opened


@pytest.fixture(scope="module")
def seeing() -> Iterator[IsolatedWorld]:
    with open_metaworld(tasks=["reach-v3", "push-v3"], cameras=["topview", "corner4"], size=48, max_steps=30) as opened:
        yield opened


def expert_episode(world: IsolatedWorld, task: str, start: int, **advice: Any) -> tuple[list[float], dict[str, Any]]:
    """The rewards and the last info."""
    world.reset_without_observation(seed=0, options={"task": task, "start": start})
    rewards: list[float] = []
    while True:
        reward, terminated, truncated, info = world.step_without_observation(world.expert_action(**advice).action)
        rewards.append(reward)
        if terminated or truncated:
            return rewards, info


# --- without the simulator ---


def test_each_of_the_fifty_tasks_has_its_own_instruction() -> None:
    assert len(TASKS) == 50
    assert len(set(TASKS.values())) == 50
    assert all(name.endswith("-v3") for name in TASKS)
    assert len(STATE_NAMES) == 39
    assert len(set(STATE_NAMES)) == 39


@pytest.mark.skipif(importlib.util.find_spec("metaworld") is not None, reason="metaworld is installed here")
def test_where_it_is_not_installed_the_error_says_what_to_do() -> None:
    with pytest.raises(WorldError, match=r"not installed .*; run `understudy env setup metaworld`"):
        MetaworldWorld()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"tasks": ["pusch-v3"]}, "no task 'pusch-v3'; did you mean 'push-v3'?"),
        ({"tasks": "push-v3"}, "tasks: expected a list of names, got str 'push-v3'"),
        ({"cameras": ["front"]}, "cameras: expected a list with some of topview, corner"),
        ({"size": 4}, "size: expected 8 to 1024 pixels, got int 4"),
        ({"action_repeat": 0}, "action_repeat: expected a whole number from 1, got int 0"),
        ({"max_steps": 2.5}, "max_steps: expected a whole number from 1, got float 2.5"),
        ({"state": "arm"}, "state: expected 'all' or 'hand', got str 'arm'"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], said: str) -> None:
    with pytest.raises((WorldError, SuiteError), match=re.escape(said)):
        MetaworldWorld(**options)


def test_the_page_lists_every_task() -> None:
    text = PAGE.read_text()
    assert [name for name, words in TASKS.items() if f"| `{name}` | {words} |" not in text] == []


# --- the contract ---


@pytest.mark.nightly  # test_world_contract.py has the short form
@needs_metaworld
def test_it_keeps_the_contract_of_a_world() -> None:
    report = check_env(
        lambda: open_metaworld(
            tasks=["button-press-topdown-v3", "hammer-v3"], cameras=["gripperPOV"], size=16, max_steps=25
        ),
        episodes=2,
    )
    assert len(report.passed) == 11


@needs_metaworld
def test_two_processes_give_the_same_bits(seeing: IsolatedWorld) -> None:
    with open_metaworld(tasks=["reach-v3", "push-v3"], cameras=["topview", "corner4"], size=48, max_steps=30) as other:
        other.reset(seed=5, options={"task": "reach-v3", "start": 7})  # another history
        for _ in range(9):
            other.step(np.ones(4, np.float32))
        actions = np.random.default_rng(0).uniform(-1, 1, (25, 4)).astype(np.float32)
        options = {"task": "push-v3", "start": 3}
        for number, action in enumerate([None, *actions]):
            if action is None:
                one, two = (world.reset(seed=1, options=options)[0] for world in (seeing, other))
            else:
                first, second = seeing.step(action), other.step(action)
                one, two = first[0], second[0]
                assert first[1:] == second[1:]
            assert trees.equal(one, two), number


@needs_metaworld
def test_a_start_does_not_depend_on_the_seed(world: IsolatedWorld) -> None:
    def state(seed: int, start: int) -> Any:
        return world.reset(seed=seed, options={"task": "push-v3", "start": start})[0]["state"]

    assert np.array_equal(state(1, 8), state(2, 8))
    assert len({state(0, start).tobytes() for start in range(10)}) == 10


@needs_metaworld
def test_only_success_is_rewarded_and_ends_the_episode(world: IsolatedWorld) -> None:
    rewards, info = expert_episode(world, "button-press-topdown-v3", 0)
    assert rewards == [0.0] * (len(rewards) - 1) + [1.0]
    assert info["success"]
    assert 5.0 < info["dense_reward"] <= 10.0
    with pytest.raises(WorldError, match="ended"):
        world.step(STILL)


@needs_metaworld
def test_the_state_is_named(world: IsolatedWorld) -> None:
    first = dict(
        zip(STATE_NAMES, world.reset(seed=0, options={"task": "reach-v3", "start": 0})[0]["state"], strict=True)
    )
    assert first["hand_z"] == pytest.approx(0.195, abs=0.02)
    assert first["opening"] == pytest.approx(1.0, abs=0.01)
    for _ in range(10):
        observation, *_ = world.step(np.array([1, 0, 0, 1], np.float32))
    state = dict(zip(STATE_NAMES, observation["state"], strict=True))
    assert state["hand_x"] > first["hand_x"] + 0.03
    assert state["hand_x"] > state["previous_hand_x"] > first["hand_x"]
    assert state["opening"] < 0.8
    goal = world.observe()["state"][GOAL]
    assert np.array_equal(goal, [first[f"goal_{axis}"] for axis in "xyz"])
    assert goal.any()


# --- options ---


@needs_metaworld
def test_tasks_and_limits(world: IsolatedWorld, seeing: IsolatedWorld) -> None:
    assert world.suite.task_names == list(TASKS)
    assert {task.max_steps for task in world.suite.tasks} == {500}
    assert {task.num_starts for task in world.suite.tasks} == {500}
    assert seeing.suite.task_names == ["reach-v3", "push-v3"]
    assert {task.max_steps for task in seeing.suite.tasks} == {30}
    with pytest.raises(SuiteError, match=r"no task 'button-pres-v3'; did you mean 'button-press-v3'\?"):
        world.reset(options={"task": "button-pres-v3"})


@needs_metaworld
def test_one_action_can_be_several_simulator_steps(world: IsolatedWorld) -> None:
    """The hand gets as far in a third of the steps, and the expert still arrives; longer than Metaworld's own limit."""
    options = {"task": "reach-v3", "start": 0}
    with open_metaworld(tasks=["reach-v3"], cameras=[], action_repeat=3, max_steps=200) as slower:
        go = np.array([0.5, 0, 0, 0], np.float32)
        world.reset_without_observation(seed=0, options=options)
        slower.reset_without_observation(seed=0, options=options)
        for _ in range(9):
            observation, *_ = world.step(go)
        for _ in range(3):
            other, *_ = slower.step(go)
        assert np.array_equal(observation["state"], other["state"])
        for _ in range(197):
            *_, truncated, _ = slower.step_without_observation(STILL)
        assert truncated
        rewards, info = expert_episode(slower, "reach-v3", 0)
        assert info["success"]
        assert len(rewards) < 30
    with open_metaworld(tasks=["reach-v3"], cameras=[], action_repeat=3) as slower:
        assert slower.task.max_steps == 166


@needs_metaworld
def test_pictures_are_upright_and_of_the_size_asked_for(seeing: IsolatedWorld) -> None:
    observation, _ = seeing.reset(seed=0, options={"task": "push-v3", "start": 0})
    assert list(seeing.step_spec.observation.flat) == ["topview", "corner4", "state"]
    image = observation["corner4"]
    assert (image.shape, str(image.dtype)) == ((48, 48, 3), "uint8")
    assert np.ptp(image[:10, -10:].reshape(-1, 3).astype(int), axis=0).max() < 10, "the empty room is above"
    assert np.ptp(image[-10:, -10:].reshape(-1, 3).astype(int), axis=0).max() > 20, "the table is below"


@needs_metaworld
def test_the_goal_can_be_hidden_and_is_shown_where_it_is(seeing: IsolatedWorld) -> None:
    options = {"task": "reach-v3", "start": 0}
    with open_metaworld(tasks=["reach-v3"], cameras=["topview"], size=48, hide_goal=True) as hiding:
        marks = []
        for look in range(2):
            if look == 0:
                shown, hidden = (world.reset(seed=0, options=options)[0] for world in (seeing, hiding))
            else:
                shown, hidden = (world.step(STILL)[0] for world in (seeing, hiding))
            assert np.array_equal(shown["state"][: GOAL.start], hidden["state"][: GOAL.start])
            assert shown["state"][GOAL].any()
            assert not hidden["state"][GOAL].any()
            marks.append((shown["topview"] != hidden["topview"]).any(axis=2))
        advised = [world.expert_action().action for world in (seeing, hiding)]
        assert np.array_equal(*advised), "the expert knows the goal"
    assert marks[0].any()
    same = (marks[0] & marks[1]).sum() / (marks[0] | marks[1]).sum()
    assert same > 0.8, "the marker was elsewhere in the first image"


@needs_metaworld
def test_the_state_can_be_the_hands_alone(world: IsolatedWorld) -> None:
    options = {"task": "reach-v3", "start": 0}
    with open_metaworld(tasks=["reach-v3"], cameras=[], state="hand") as blind:
        assert str(blind.step_spec.observation.flat["state"]) == "float32 [4]"
        whole, hand = (one.reset(seed=0, options=options)[0]["state"] for one in (world, blind))
        assert np.array_equal(hand, whole[:4])
        action = blind.expert_action().action  # the expert still sees all
        assert np.array_equal(action, world.expert_action().action)
        whole, hand = (one.step(action)[0]["state"] for one in (world, blind))
        assert np.array_equal(hand, whole[:4])
        assert HAND_NAMES == ("hand_x", "hand_y", "hand_z", "opening")


# --- the expert ---


@needs_metaworld
@pytest.mark.parametrize("task", ["button-press-topdown-v3", "push-v3", "door-close-v3", "drawer-open-v3"])
def test_the_expert_solves_it(world: IsolatedWorld, task: str) -> None:
    assert all(expert_episode(world, task, start)[1]["success"] for start in (0, 499))


@needs_metaworld
@pytest.mark.parametrize(
    "task", ["door-close-v3", "button-press-v3"]
)  # Metaworld's experts for these write as they read
def test_asking_the_expert_changes_nothing(world: IsolatedWorld, task: str) -> None:
    before, _ = world.reset(seed=0, options={"task": task, "start": 0})
    advice = [world.expert_action() for _ in range(3)]
    assert trees.equal(world.observe(), before)
    assert all(np.array_equal(one.action, advice[0].action) for one in advice)
    assert {one.progress for one in advice} == {0.0}


@needs_metaworld
def test_noise_bends_the_way_and_leaves_the_fingers_alone(world: IsolatedWorld) -> None:
    world.reset_without_observation(seed=0, options={"task": "push-v3", "start": 0})
    plain = world.expert_action().action
    rng = np.random.default_rng(0)
    noisy = np.array([world.expert_action(noise=0.3, rng=rng).action for _ in range(20)])
    assert np.abs(noisy).max() <= 1.0
    assert (noisy[:, 3] == plain[3]).all()
    assert (noisy[:, :3].std(axis=0) > 0.05).all()
    assert expert_episode(world, "push-v3", 1, noise=0.3, rng=rng)[1]["success"]


@needs_metaworld
def test_progress_rises_along_the_experts_way_and_stalls_off_it(world: IsolatedWorld) -> None:
    world.reset_without_observation(seed=0, options={"task": "drawer-open-v3", "start": 0})

    def rise(act: Any, num_steps: int) -> float:
        before = world.expert_action().progress
        for _ in range(num_steps):
            world.step_without_observation(act())
        return world.expert_action().progress - before

    assert rise(lambda: world.expert_action().action, 20) > 0.05
    rise(lambda: STILL, 10)  # the hand swings out
    assert abs(rise(lambda: STILL, 20)) < 1e-3
    assert rise(lambda: -world.expert_action().action, 20) < 0.0


@needs_metaworld
def test_the_code_of_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    section = PAGE.read_text().partition("\n## Metaworld\n")[2].partition("\n## ")[0]
    (block,) = blocks(section)
    exec(compile(block, PAGE.name, "exec"), {})
    assert capsys.readouterr().out == "press the button from above\nsuccess: True\n"


# --- what is kept ---


@needs_metaworld
def test_few_tasks_are_kept_and_the_others_made_again() -> None:
    script = """
import json
import numpy as np
from understudy.envs.simulators import metaworld

metaworld.MAX_ALIVE = 2
names = ["push-v3", "reach-v3", "sweep-v3"]
with metaworld.MetaworldWorld(tasks=names, cameras=["topview"], size=16) as world:
    kept, seen, closed = [], [], []
    for name in ["push-v3", "reach-v3", "push-v3", "sweep-v3", "push-v3"]:
        seen.append(world.reset(seed=0, options={"task": name, "start": 1})[0])
        kept.append(list(world._simulators))
        if name == "reach-v3":
            reach = world._simulators[name]
    closed.append(reach.cameras._context is None)
    same = all(np.array_equal(seen[0][name], other[name]) for other in (seen[2], seen[4]) for name in seen[0])
    last = world._simulators["push-v3"]
closed.append(last.cameras._context is None and not world._simulators)
print(json.dumps({"kept": kept, "same": same, "closed": closed}))
"""
    sources = Path(__file__).resolve().parents[4] / "src"
    completed = subprocess.run(
        [str(METAWORLD.python), "-c", script],
        env={**os.environ, **METAWORLD.variables, "PYTHONPATH": str(sources)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert completed.returncode == 0, completed.stderr
    found = json.loads(completed.stdout)
    assert found["kept"] == [
        ["push-v3"],
        ["push-v3", "reach-v3"],
        ["reach-v3", "push-v3"],
        ["push-v3", "sweep-v3"],
        ["sweep-v3", "push-v3"],
    ]
    assert found["same"]
    assert found["closed"] == [True, True]
